"""Following a run: what is seen of it, what is said when it goes wrong, and what is begun and fails half-way."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import math
from typing import Any

import pytest
from rich.console import Console

from potluck.cli import hosting
from potluck.cli.monitor import picture
from potluck.errors import HubUnavailableError
from potluck.hub.access.member import Scopes
from potluck.hub.guard.permissions import main_permissions
from potluck.hub.leaserecord import LeaseRecord
from potluck.hub.presence import Beacon, Card, Presence
from potluck.hub.subjects import Subjects
from potluck.messages import encode
from potluck.monitor.watcher import Watcher
from potluck.peer.identity import Identity
from potluck.peer.session import Session
from potluck.round.lineage import HEAD, NO_PARENT, Head
from potluck.round.plan.messages import Commit, CommittedMember, RoundKey
from potluck.round.plan.signing import sign_commit
from potluck.sim.memoryhub import MemoryHub
from potluck.sim.virtualloop import LoopClock, in_virtual_time

SUBJECTS = Subjects("test")


class Failing:
    """A hub connection whose n-th subscription fails."""

    def __init__(self, connection: Any, failing: int) -> None:
        self._connection = connection
        self._left = failing

    async def subscribe(self, *arguments: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise HubUnavailableError("the hub is away just now")
        return await self._connection.subscribe(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@in_virtual_time
@pytest.mark.parametrize("failing", [1, 2])
async def test_a_watcher_that_cannot_start_leaves_nothing_behind(failing: int):
    hub = MemoryHub("test")
    identity = Identity.temporary()
    connection = hub.connect(identity.peer_id, main_permissions(SUBJECTS, identity.peer_id, Scopes()))
    session = Session(lambda *_: None, identity, SUBJECTS, Card(session="s1", role="observer"), LoopClock())
    session._hub = Failing(connection, failing)
    watcher = Watcher(session)
    with pytest.raises(HubUnavailableError):
        await watcher.start()
    await watcher.close()
    left = connection.statistics()
    assert (left["subscriptions"], left["watches"]) == (0, 0)


class Scene:
    """A run with one trainer, and somebody who watches it."""

    def __init__(self) -> None:
        self.hub = MemoryHub("test")
        identity = Identity.temporary()
        self.session = Session(lambda *_: None, identity, SUBJECTS, Card(session="s1", role="observer"), LoopClock())
        self.session._hub = self.hub.connect(identity.peer_id, main_permissions(SUBJECTS, identity.peer_id, Scopes()))
        self.trainer = Identity.temporary()
        self.guard = self.hub.connect("guard")
        self.parent = NO_PARENT
        card = Card(session="t", role="trainer", name="Ada", addresses=("tcp://127.0.0.1:1",))
        self.session.roster.apply(Presence(peer=self.trainer.peer_id, card=card, state="alive", host="", person="Ada"))

    async def say(self, **figures: Any) -> None:
        beacon = Beacon(session="t", **figures)
        await self.guard.publish(SUBJECTS.beacon(self.trainer.peer_id), encode(beacon))

    async def commit(self, epoch: int, at: float) -> None:
        member = CommittedMember(peer=self.trainer.peer_id, weight=1.0, holds=True, sent_bytes=1000)
        made = Commit(
            epoch=epoch, key=RoundKey(epoch=epoch, token=1, attempt=0), term=1, coordinator=self.trainer.peer_id,
            members=(member,), digest="", parent=self.parent, layout="", committed_at=at,
        )  # fmt: skip
        signed = sign_commit(made, self.trainer, "test")
        self.parent = hashlib.sha256(signed.body).hexdigest()
        await self.guard.store("lineage").put(HEAD, encode(Head(term=1, commit=signed)))


@in_virtual_time
async def test_what_peers_say_is_seen_and_what_is_wrong_raises_alarms() -> None:
    scene = Scene()
    watcher = await Watcher.started(scene.session)
    await scene.say(samples=40, samples_per_second=8.0, target=100, loss=2.5)
    await asyncio.sleep(0.1)
    now = scene.session.clock.monotonic()
    seen = watcher.view.overview(now)
    assert (seen.samples, seen.target, seen.loss, seen.due_in_seconds) == (40, 100, 2.5, 7.5)
    assert watcher.alarms() == []
    for epoch in (1, 2, 3):
        await scene.commit(epoch, at=10.0 * epoch)
        await asyncio.sleep(0.1)
    await scene.say(epoch=3, samples=10, samples_per_second=5.0)  # as DiLoCo does: no target, and nothing is predicted
    await asyncio.sleep(0.1)
    seen = watcher.view.overview(scene.session.clock.monotonic())
    assert (seen.epoch, seen.seconds_per_epoch, seen.bytes_per_epoch) == (3, 10.0, 1000)
    assert (seen.samples, seen.target, seen.due_in_seconds) == (10, 0, None)
    await asyncio.sleep(300.0)
    [alarm] = watcher.alarms()
    assert alarm.kind == "standstill"
    assert watcher.view.overview(scene.session.clock.monotonic()).samples == 0  # nobody has said anything for long
    await watcher.close()


@in_virtual_time
async def test_groups_are_seen_when_there_is_more_than_one() -> None:
    scene = Scene()
    watcher = await Watcher.started(scene.session)
    await scene.commit(1, at=10.0)
    await asyncio.sleep(0.1)
    assert [(row.name, row.epoch, row.num_members) for row in watcher.view.groups()] == [("main", 1, 1)]
    peer = scene.trainer.peer_id
    card = Card(session="t", role="trainer", name="Ada", groups=("main", "critic"))
    scene.session.roster.apply(Presence(peer=peer, card=card, state="alive", host="", person="Ada"))
    store = scene.guard.store("groups")
    await store.put("g.critic.lease.coordinator", encode(LeaseRecord(holder=peer)))
    made = Commit(
        epoch=7, key=RoundKey(epoch=7, token=1, attempt=0), term=1, coordinator=peer,
        members=(), digest="", parent="", layout="", committed_at=20.0,
    )  # fmt: skip
    forged = Head(term=1, commit=sign_commit(made, scene.trainer, "test"))  # signed for `main`, not for the group
    await store.put("g.critic.lineage.head", encode(forged))
    await asyncio.sleep(0.1)
    assert watcher.view.groups()[1].epoch == 0
    assert watcher.counts["bad_groups"] == 1
    signed = sign_commit(made, scene.trainer, SUBJECTS.of_group("critic").scope)
    await store.put("g.critic.lineage.head", encode(Head(term=1, commit=signed)))
    await asyncio.sleep(0.1)
    main, critic = watcher.view.groups()
    assert (main.name, main.epoch) == ("main", 1)
    assert (critic.name, critic.epoch, critic.num_members, critic.coordinator) == ("critic", 7, 1, "Ada")
    now = scene.session.clock.monotonic()
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(picture(watcher.view.overview(now), watcher.view.rows(now), (), watcher.view.groups()))
    assert "critic" in console.export_text()
    console.print(picture(watcher.view.overview(now), watcher.view.rows(now), (), watcher.view.groups()[:1]))
    assert "critic" not in console.export_text()
    await watcher.close()


@in_virtual_time
async def test_a_host_says_when_something_goes_wrong_and_when_it_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    scene = Scene()
    telling = asyncio.create_task(hosting.tell_alarms(scene.session, as_json=True))
    for loss in (2.0, math.nan, math.nan, 2.0):
        await scene.say(loss=loss)
        await asyncio.sleep(hosting.ALARMS_EVERY_SECONDS)
    await asyncio.sleep(hosting.ALARMS_EVERY_SECONDS)
    telling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await telling
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["event"], each["kind"]) for each in told] == [
        ("alarm", "loss not finite"),
        ("alarm over", "loss not finite"),
    ]
    assert "Ada" in told[0]["text"]
    assert told[1]["text"] == ""
