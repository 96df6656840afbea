"""Rounds of every size and of every mix of members and paths, in memory and in virtual time."""

from __future__ import annotations

import asyncio

import pytest
import torch
from roundlab import ELEMENTS, Lab, Member, assert_same_average, at_point, lab, mean_of
from torch import Tensor

from potluck.sim.virtualloop import in_virtual_time

MOST_MEMBERS = 64
MIXES = [  # full trainers, clients, aux peers
    (2, 0, 0),
    (1, 0, 1),
    (1, 1, 0),
    (1, 3, 0),
    (0, 1, 1),
    (0, 3, 1),
    (0, 3, 2),
    (3, 1, 1),
    (2, 2, 2),
]
PATHS = {
    "direct": [("direct",)],
    "relayed": [("relay",)],
    "mixed": [("direct", "relay"), ("direct", "relay"), ("relay",)],  # by turns
}


async def join_mix(there: Lab, num_full: int, num_clients: int, num_aux: int, paths: str = "direct") -> None:
    """So many of each; aux peers come first, then those that listen, so that somebody can coordinate."""
    kinds = [{"role": "aux"}] * num_aux + [{}] * num_full + [{"is_client": True}] * num_clients
    ways = PATHS[paths]
    for number, kind in enumerate(kinds):
        await there.join(carriers=ways[number % len(ways)], **kind)
    await asyncio.sleep(0.5)


def trainers_of(there: Lab) -> list[Member]:
    return [member for member in there.members if not member.is_aux]


@pytest.mark.parametrize("num_members", [1, 2, 3, 5, 8, 16, 33])
@in_virtual_time
async def test_all_hold_the_mean(num_members: int) -> None:
    async with lab(num_members) as there:
        for epoch in (1, 2, 3) if num_members <= 5 else (1,):
            results = await there.average()
            assert_same_average(there.members, mean_of(there.members))
            assert all(result.holds and result.commit.epoch == epoch for result in results)
            assert len({result.commit.digest for result in results}) == 1
            assert set(results[0].commit.holders) == {member.id for member in there.members}
            assert results[0].commit.left_out == {}
            assert {member.averager.epoch for member in there.members} == {epoch}


@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(map(str, mix)))
@in_virtual_time
async def test_every_mix_of_members_and_paths_agrees(mix: tuple[int, int, int], paths: str) -> None:
    async with lab() as there:
        await join_mix(there, *mix, paths)
        trainers = trainers_of(there)
        results = dict(zip(there.members, await there.average(), strict=True))
        weights = {told.peer: told.weight for told in results[there.members[0]].commit.members}
        if len(trainers) == 1:  # it sends its values to nobody, so aux peers are no members
            assert weights == {trainers[0].id: 1.0}
            assert [member for member, result in results.items() if result.holds] == trainers
            return
        assert weights == {member.id: float(not member.is_aux) for member in there.members}
        assert all(result.holds for result in results.values())
        assert_same_average(trainers, mean_of(trainers))
        for member, result in results.items():
            if not member.peer.session.card.addresses:
                assert result.role == "sender"
        links = [link for member in there.members for link in member.peer.links.statistics().peers.values()]
        used = {link.path for link in links} - {"self"}
        if len(there.members) > 2 or paths != "mixed":  # the first two of a mixed run are linked directly
            assert used == {"direct": {"direct"}, "relayed": {"relay"}, "mixed": {"direct", "relay"}}[paths]


def mark(member: Member) -> None:
    """Values that tell who contributed, however many there are: of every 64 elements, one is its own."""
    member.values.copy_(torch.arange(ELEMENTS) % MOST_MEMBERS == member.number)


def marks_in(values: Tensor) -> Tensor:
    """What each member's own elements have become, by member and place."""
    return values[: ELEMENTS // MOST_MEMBERS * MOST_MEMBERS].view(-1, MOST_MEMBERS).t()


@pytest.mark.parametrize(
    ("num_full", "num_clients", "num_aux"), [(23, 6, 3), pytest.param(46, 12, 6, marks=pytest.mark.soak)]
)
@in_virtual_time
async def test_many_members_of_all_kinds_agree_and_lose_some_on_the_way(
    num_full: int, num_clients: int, num_aux: int
) -> None:
    async with lab() as there:
        await join_mix(there, num_full=num_full, num_clients=num_clients, num_aux=num_aux)

        def start() -> dict[Member, asyncio.Task[object]]:
            tasks = dict(zip(list(there.members), there.start(), strict=True))
            for member in trainers_of(there):
                mark(member)
            return tasks  # type: ignore[return-value]

        def assert_mean_of(members: list[Member]) -> None:
            assert_same_average(members)
            expected = torch.zeros(MOST_MEMBERS)
            expected[[member.number for member in members]] = 1 / len(members)
            found = marks_in(members[0].values)
            torch.testing.assert_close(found, expected[:, None].expand_as(found), rtol=1e-6, atol=0.0)

        results = await asyncio.gather(*start().values())
        assert all(result.holds for result in results)  # type: ignore[attr-defined]
        assert_mean_of(trainers_of(there))
        killed = there.members[num_aux - 1 :: len(there.members) // 5]  # an aux peer, trainers, a client
        assert {(member.is_aux, not member.peer.session.card.addresses) for member in killed} == {
            (True, False),
            (False, False),
            (False, True),
        }
        deaths: list[asyncio.Task[None]] = []

        def die() -> None:
            for victim in killed:
                there.sever(victim)
                deaths.append(asyncio.create_task(there.kill(victim)))

        survivors = [member for member in there.members if member not in killed]
        with at_point("round.half_sent", die, peer=there.members[num_aux + 2].id) as reached:
            tasks = start()
            results = await asyncio.gather(*(tasks[member] for member in survivors))
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert reached
        await asyncio.gather(*deaths)
        assert all(result.holds for result in results)  # type: ignore[attr-defined]
        trainers = [member for member in survivors if not member.is_aux]
        assert_same_average(trainers)
        found = marks_in(trainers[0].values)[[member.number for member in trainers]]
        assert float(found.min()) > 0.999 / (num_full + num_clients), "everybody who lives is in every chunk"
        assert float(found.max()) < 1.001 / len(trainers)
        await asyncio.gather(*start().values())
        assert_mean_of(trainers)
