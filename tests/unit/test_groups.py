"""Several groups in one run, in virtual time: each has its own members, coordinator, lineage and rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch
from grouplab import ELEMENTS, GroupLab, Guest, group_lab, is_made
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from roundlab import at_point

from potluck.errors import AccessError, ConfigurationError
from potluck.hub.subjects import Subjects
from potluck.messages import encode
from potluck.round.plan.messages import Ready
from potluck.run.group import Group
from potluck.sim.virtualloop import in_virtual_time

PATIENCE_SECONDS = 60.0
THREE = ("main", "x", "y")
MEMBERSHIPS = (("main", "x"), ("main", "x", "y"), ("main", "y"), ("x", "y"))


async def four_in_three(there: GroupLab) -> list[Guest]:
    return [await there.join(groups) for groups in MEMBERSHIPS]


def now() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_groups_average_at_the_same_time_each_among_its_own_members() -> None:
    async with group_lab() as there:
        await four_in_three(there)
        for _ in range(3):
            await asyncio.gather(*(there.average(name) for name in THREE))
        for name in THREE:
            parts = there.parts(name)
            expected = sum(2.0**part.number for part in parts) / len(parts)
            for part in parts:
                assert torch.equal(part.values, torch.full((ELEMENTS,), expected)), name
                assert part.averager.epoch == 3
                members = {member.peer for member in part.commits[-1].members}
                assert members == {other.group.session.peer_id for other in parts}
        there.check_lineages(THREE)


@in_virtual_time
async def test_a_group_makes_epochs_at_its_own_pace() -> None:
    async with group_lab() as there:
        await four_in_three(there)
        for _ in range(5):
            await there.average("x")
        await there.average("main")
        assert {part.averager.epoch for part in there.parts("x")} == {5}
        assert {part.averager.epoch for part in there.parts("main")} == {1}
        assert {part.averager.epoch for part in there.parts("y")} == {0}


@in_virtual_time
async def test_the_death_of_a_coordinator_of_two_groups_does_not_delay_the_third() -> None:
    async def seconds_of_third(dies: bool) -> float:
        async with group_lab() as there:
            guests = [await there.join(("x", "y")) for _ in range(3)]
            others = [await there.join(("z",)) for _ in range(3)]
            await asyncio.gather(*(there.average(name) for name in "xyz"))
            await asyncio.sleep(20.0)  # leases have found their places
            both = next((guest for guest in guests if guest.held == {"x", "y"}), None)
            dying = both or next(guest for guest in guests if guest.held)
            kills: list[asyncio.Task[None]] = []
            started = now()

            async def third() -> float:
                for _ in range(5):
                    assert all(is_made(result) for result in await there.average("z"))
                return now() - started

            def kill() -> None:
                kills.append(asyncio.create_task(there.kill(dying)))

            survivors = [guest for guest in guests if guest is not dying]

            async def first_two() -> None:
                those = guests if not dies else survivors
                with at_point("round.planned" if dies else "none", kill, peer=dying.peer.peer_id) as reached:
                    working = [
                        asyncio.create_task(guest.parts[name].average()) for guest in guests for name in ("x", "y")
                    ]
                    await asyncio.wait(working)
                if dies:
                    assert reached
                    await asyncio.gather(*kills)
                for guest in those:
                    for name in ("x", "y"):
                        assert guest.parts[name].averager.epoch >= 2

            taken, _ = await asyncio.gather(third(), first_two())
            assert others
            there.check_lineages("xyz")
            return taken

    assert await seconds_of_third(dies=True) == pytest.approx(await seconds_of_third(dies=False), abs=0.2)


@in_virtual_time
async def test_who_enters_a_group_later_takes_part_in_it_and_who_leaves_is_not_waited_for() -> None:
    async with group_lab() as there:
        guests = await four_in_three(there)
        await there.average("y")
        newcomer = await there.enter(guests[0], "y")
        assert newcomer.averager.epoch == 1
        results = await there.average("y")
        assert all(is_made(result) for result in results)
        assert len(newcomer.commits[-1].members) == 4
        await there.leave_group(guests[1], "y")
        started = now()
        results = await there.average("y")
        assert all(is_made(result) for result in results)
        assert len(newcomer.commits[-1].members) == 3
        assert now() - started < 3.0
        again = await there.enter(guests[1], "y")
        await there.average("y")
        assert len(again.commits[-1].members) == 4, "the same peer, in the same process, once more"
        there.check_lineages(THREE)


@in_virtual_time
async def test_who_is_not_in_a_group_has_no_part_in_it_whatever_it_says() -> None:
    async with group_lab() as there:
        guests = await four_in_three(there)
        stranger, subjects = guests[0], Subjects(there.run.hub.subjects.run, "y")
        ready = encode(Ready(session=stranger.peer.session.card.session, epoch=1, weight=1.0))
        await stranger.peer.session.hub.publish(subjects.news(stranger.peer.peer_id, "ready"), ready)
        await there.average("y")
        for part in there.parts("y"):
            assert stranger.peer.peer_id not in {member.peer for member in part.commits[-1].members}
        holder = there.holder("y")
        assert holder is not None
        assert holder.parts["y"].averager.statistics()["coordinator_readies_of_strangers"] == 1


@in_virtual_time
async def test_who_is_not_in_a_group_hears_nothing_of_its_rounds() -> None:
    async with group_lab() as there:
        stranger, *_ = await four_in_three(there)  # in main and x
        hub = stranger.peer.session.hub
        before = hub.statistics()
        await asyncio.sleep(5.0)
        idle = hub.statistics()["handled"] - before["handled"]
        began = now()
        for _ in range(8):
            await there.average("y")
        seconds = now() - began
        after = hub.statistics()
        assert after["subscriptions"] == before["subscriptions"]
        heard = after["handled"] - before["handled"] - idle
        assert heard <= idle * (seconds / 5.0 + 1), "signs of life, and nothing else"
        await there.enter(stranger, "y")
        assert hub.statistics()["subscriptions"] > after["subscriptions"]


@in_virtual_time
async def test_a_peer_that_may_not_be_in_a_group_is_told_so_and_stays_in_the_run() -> None:
    async with group_lab() as there:
        peer = await there.run.join("guest", allowed_groups=("main", "x"))
        await Group(peer, "x").enter()
        with pytest.raises(AccessError, match=r"may not be in the group 'y'.*Ask an organiser"):
            await Group(peer, "y").enter()
        assert peer.session.card.groups == ("main", "x")
        assert not peer.session.ended.done()


@pytest.mark.parametrize("name", ["", "Critic", "a.b", "-x", "x" * 49, "a b", "*", ">"])
@in_virtual_time
async def test_a_name_that_cannot_be_a_token_is_refused(name: str) -> None:
    async with group_lab() as there:
        peer = await there.run.join("guest")
        with pytest.raises(ConfigurationError, match="cannot name a group"):
            Group(peer, name)


ACTIONS = ("kill", "join", "enter", "leave")


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2**16),
    st.lists(
        st.tuples(st.floats(0.0, 2.0), st.sampled_from(ACTIONS), st.integers(0, 7), st.sampled_from(THREE)),
        max_size=6,
    ),
)
def test_whatever_members_do_no_epoch_of_any_group_is_lost_or_committed_twice(
    seed: int, troubles: list[tuple[float, str, int, str]]
) -> None:
    in_virtual_time(_live_through)(seed, troubles)


async def _live_through(seed: int, troubles: list[tuple[float, str, int, str]]) -> None:
    async with group_lab(seed) as there:
        stayer = await there.join(THREE)  # so that every group has somebody who can tell
        for groups in MEMBERSHIPS[1:]:
            await there.join(groups)
        stop = asyncio.Event()
        tasks: dict[tuple[int, str], asyncio.Task[None]] = {}

        async def keep_averaging(guest: Guest, name: str) -> None:
            while not stop.is_set() and name in guest.parts and guest in there.guests:
                await asyncio.gather(guest.parts[name].average(5.0), return_exceptions=True)
                await asyncio.sleep(0.7)

        def begin() -> None:
            for guest in there.guests:
                for name in guest.parts:
                    if (guest.number, name) not in tasks or tasks[guest.number, name].done():
                        tasks[guest.number, name] = asyncio.create_task(keep_averaging(guest, name))

        begin()
        for pause, action, which, name in troubles:
            await asyncio.sleep(pause)
            others = [guest for guest in there.guests if guest is not stayer]
            guest = others[which % len(others)] if others else None
            await _act(there, action, guest, name)
            begin()
        before = {name: stayer.parts[name].averager.epoch for name in THREE}
        end = now() + PATIENCE_SECONDS
        while any(stayer.parts[name].averager.epoch <= before[name] for name in THREE):
            epochs = {name: stayer.parts[name].averager.epoch for name in THREE}
            assert now() < end, f"a group has come to a stop: {before} before, {epochs} now"
            await asyncio.sleep(0.5)
        stop.set()
        await asyncio.wait(tasks.values())
        there.check_lineages(THREE)


async def _act(there: GroupLab, action: str, guest: Guest | None, name: str) -> None:
    acts: dict[str, Callable[[], Awaitable[object]]] = {"join": lambda: there.join(THREE)}
    if guest is not None:
        acts["kill"] = lambda: there.kill(guest)
        if name in guest.parts:
            acts["leave"] = lambda: there.leave_group(guest, name)
        else:
            acts["enter"] = lambda: there.enter(guest, name)
    if action in acts:
        await acts[action]()
