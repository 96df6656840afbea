"""Groups with a real hub, real processes and real links."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from roundhouse import ANYTHING, NO_COORDINATOR, RUN, RoundHouse, open_house

from potluck.errors import AccessError, ConfigurationError, PermissionDeniedError
from potluck.hub.access.member import Scopes
from potluck.hub.keys import public_key
from potluck.peer.grouplease import in_order
from potluck.peer.identity import Identity
from potluck.run.group import Group
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children, ManagedProcess

PROGRAM = Path(__file__).with_name("groupchild.py")
PATIENCE_SECONDS = 120.0
GROUPS = ("x", "y", "z")
LATER_EPOCHS = 4


def identities(folder: Path, first_in: tuple[str, ...]) -> list[Path]:
    """Keys of four peers, of whom the first goes before the second wherever both may coordinate."""
    while True:
        peers = [Identity.temporary() for _ in range(4)]
        ids = [peer.peer_id for peer in peers[:2]]
        if all(in_order(group, ids)[0] == ids[0] for group in first_in):
            break
    paths = [folder / f"peer-{number}.nkey" for number in range(4)]
    for path, peer in zip(paths, peers, strict=True):
        path.write_bytes(peer.seed)
        path.chmod(0o600)
    return paths


async def spawn(
    house: RoundHouse, children: Children, folder: Path, key: Path, *, number: int, groups: str, **options: Any
) -> ManagedProcess:
    arguments = {
        "servers": house.address.servers,
        "ca_pem": house.address.ca_pem,
        "run": RUN,
        "invite": await house.invite(ANYTHING if options.pop("coordinates", False) else NO_COORDINATOR),
        "identity": str(key),
        "groups": list(groups),
        "value": 2.0**number,
        "fault": None,
        "fired": str(folder / "fired.jsonl"),
        **options,
    }
    path = folder / f"arguments-{number}.json"
    path.write_text(json.dumps(arguments))
    child = children.spawn([sys.executable, PROGRAM, path], name=f"peer-{number}")
    await child.until_line(r'"peer"', PATIENCE_SECONDS)
    return child


def commits(child: ManagedProcess) -> list[dict[str, Any]]:
    lines = [line for line in child.output().splitlines() if line.startswith('{"commit"')]
    return [json.loads(line) for line in lines]


def newest(child: ManagedProcess) -> dict[str, int]:
    return {commit["commit"]: commit["epoch"] for commit in commits(child)}


async def test_the_coordinator_of_two_groups_is_killed_in_the_middle_of_a_round(
    tmp_path: Path, children: Children
) -> None:
    keys = identities(tmp_path, ("x", "y"))
    async with open_house(tmp_path / "hub") as house:
        labels = {"group": "x", "role": "coordinator"}
        fault = {"point": "round.plan_published", "action": "kill", "labels": labels}
        dying, *others = await asyncio.gather(
            spawn(house, children, tmp_path, keys[0], number=0, groups="xy", coordinates=True, fault=fault),
            spawn(house, children, tmp_path, keys[1], number=1, groups="xyz", coordinates=True),
            spawn(house, children, tmp_path, keys[2], number=2, groups="xz"),
            spawn(house, children, tmp_path, keys[3], number=3, groups="yz"),
        )
        await dying.until_exit(PATIENCE_SECONDS)
        fired = [json.loads(line) for line in (tmp_path / "fired.jsonl").read_text().splitlines()]
        assert len(fired) == 1
        told = commits(dying)
        own_id = public_key(keys[0].read_bytes().strip())
        assert {commit["commit"] for commit in told if commit["coordinator"] == own_id} >= {"x", "y"}
        before = [newest(child) for child in others]

        def all_went_on() -> bool:
            return all(
                newest(child).get(group, 0) >= was.get(group, 0) + LATER_EPOCHS
                for child, was in zip(others, before, strict=True)
                for group in was
            )

        await poll_until(all_went_on, PATIENCE_SECONDS, "all groups to go on")
        seen: dict[tuple[str, int], tuple[str, str]] = {}
        for child in (dying, *others):
            for group in GROUPS:
                epochs = [commit["epoch"] for commit in commits(child) if commit["commit"] == group]
                assert epochs == sorted(set(epochs)), "none was committed twice"
            for commit in commits(child):
                what = (commit["digest"], commit["parent"])
                assert seen.setdefault((commit["commit"], commit["epoch"]), what) == what
        for group in GROUPS:
            epochs = [epoch for name, epoch in seen if name == group]
            assert sorted(epochs) == list(range(min(epochs), max(epochs) + 1)), "none was lost"


async def test_an_invite_names_the_groups_that_it_allows(tmp_path: Path) -> None:
    async with open_house(tmp_path / "hub", groups={"x": "all", "y": "all", "secret": "invited"}) as house:
        with pytest.raises(ConfigurationError, match=r"no group 'yy': it has main, secret, x, y\. Another"):
            await house.invite(Scopes(roles=("trainer",), groups=("yy",)))
        invite = await house.invite(Scopes(roles=("trainer",), groups=("main", "x")))
        peer = Peer(house.address, RUN, Identity.temporary(), PeerConfig(invite=invite, client_mode=True))
        try:
            await peer.start()
            group = Group(peer, "x")
            await group.enter()
            assert [presence.peer for presence in group.members] == [peer.peer_id]
            other = Group(peer, "y")
            with pytest.raises(AccessError, match=r"may not be in the group 'y'.*invite --group y"):
                await other.enter()
            with pytest.raises(AccessError, match="no group 'xx': it has main, secret, x, y"):
                await Group(peer, "xx").enter()
            subjects = other.session.subjects
            with pytest.raises(PermissionDeniedError):
                await peer.session.hub.subscribe(subjects.plan("*"), lambda _delivery: None)
            await group.leave()
            assert peer.session.card.groups == ("main",)
            assert not peer.session.ended.done()
        finally:
            await peer.close()
        await check_secret_group(house)


async def check_secret_group(house: RoundHouse) -> None:
    """An invite for all groups does not open one that only the invited may join; one that names it does."""
    for groups, is_let_in in (((), False), (("main", "secret"), True)):
        invite = await house.invite(Scopes(roles=("trainer",), groups=groups))
        peer = Peer(house.address, RUN, Identity.temporary(), PeerConfig(invite=invite, client_mode=True))
        try:
            await peer.start()
            group = Group(peer, "secret")
            if is_let_in:
                await group.enter()
                continue
            with pytest.raises(AccessError, match="its invite does not name the group 'secret'"):
                await group.enter()
        finally:
            await peer.close()
