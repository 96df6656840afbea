"""Being there before a round is due: it starts with the last one's word, and nobody is planned with who went on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from roundlab import TIMEOUT_SECONDS, Member, assert_same_average, lab, mean_of

from potluck.messages import decode
from potluck.round.coordinator.trigger import Quorum
from potluck.round.member.intent import StandBy
from potluck.round.outcome import RoundResult
from potluck.round.plan.messages import Ready
from potluck.sim.virtualloop import in_virtual_time, process

pytestmark = pytest.mark.usefixtures("each_group")

EXPECTED = StandBy(awaits=2.0, seconds=3.0, word_seconds=0.5)


def now() -> float:
    return asyncio.get_running_loop().time()


def start(member: Member, stand_by: StandBy = EXPECTED, **options: Any) -> asyncio.Task[RoundResult | None]:
    member.fill()
    options = {"weight": 1.0, "epoch": member.averager.epoch + 1, "timeout_seconds": TIMEOUT_SECONDS, **options}
    with process(member.process):
        return asyncio.create_task(member.averager.stand_by(stand_by, {"w": member.values}, **options))


async def results_of(*tasks: asyncio.Task[RoundResult | None]) -> list[RoundResult]:
    results = await asyncio.gather(*tasks)
    assert all(result is not None and result.holds for result in results)
    return [result for result in results if result is not None]


@in_virtual_time
async def test_a_round_starts_when_those_who_stand_by_have_the_weight_together() -> None:
    async with lab(2) as there:
        one, two = there.members
        first = start(one)
        await asyncio.sleep(1.5)
        assert not one.averager.is_in_round
        began = now()
        await results_of(first, start(two))
        assert now() - began < 0.2, "nobody waited for a word that it is due, nor for a grace"
        assert_same_average(there.members, mean_of(there.members))


@in_virtual_time
async def test_who_stands_by_in_vain_has_what_it_had_and_takes_part_later() -> None:
    async with lab(2) as there:
        one, two = there.members
        began, task = now(), start(one)
        before = one.values.clone()
        assert await task is None
        assert now() - began == pytest.approx(EXPECTED.seconds + EXPECTED.word_seconds)
        assert torch.equal(one.values, before)
        assert one.averager.statistics()["stood_by_in_vain"] == 1
        results = await there.average()
        assert all(result.holds for result in results)
        assert two.averager.epoch == 1


@in_virtual_time
async def test_that_the_epoch_is_due_makes_it_ready_for_as_long_as_it_takes() -> None:
    async with lab(2, trigger=Quorum(grace_seconds=6.0)) as there:
        one, two = there.members
        task = start(one)
        await asyncio.sleep(2.0)
        one.averager.confirm()
        await asyncio.sleep(3.0)
        assert not task.done(), "longer than it would have stood by"
        [other] = there.start([two])
        await results_of(task)
        assert (await other).holds
        assert_same_average(there.members, mean_of(there.members))


@in_virtual_time
async def test_a_plan_of_the_last_moment_finds_it_there() -> None:
    async with lab(2) as there:
        one, two = there.members
        first = start(one)
        await asyncio.sleep(EXPECTED.seconds - 0.1)
        held = there.run.hub.hold(there.subjects.plan("*"))
        second = start(two)
        await asyncio.sleep(0.3)  # it has stopped standing by, and a plan is on its way
        held.release()
        await results_of(first, second)
        assert_same_average(there.members, mean_of(there.members))


@in_virtual_time
async def test_nobody_is_planned_with_who_no_longer_stands_by() -> None:
    """Its withdrawal may be late: the time that it has named counts."""
    async with lab(3, trigger=Quorum(grace_seconds=0.1)) as there:
        one, two, three = there.members
        first = start(one)
        held = there.run.hub.hold(there.subjects.news(one.id, "ready"))
        await asyncio.sleep(EXPECTED.seconds + 0.2)
        results = await asyncio.gather(*there.start([two, three]))
        held.release()
        assert [sorted(result.commit.holders) for result in results] == [sorted([two.id, three.id])] * 2
        behind = await first
        assert behind is not None
        assert not behind.holds, "the epoch stands, and it knows"


@in_virtual_time
async def test_who_is_in_a_plan_waits_on_whatever_becomes_of_it() -> None:
    async with lab(2) as there:
        one, two = there.members
        heard: list[Ready] = []
        session = one.peer.session
        await session.hub.subscribe(
            there.subjects.news(two.id, "ready"), lambda delivery: heard.append(decode(Ready, delivery.payload))
        )
        await results_of(start(two), start(one))
        assert (heard[0].awaits, heard[0].until > 0) == (EXPECTED.awaits, True)
        assert (heard[-1].awaits, heard[-1].until) == (0.0, 0.0)


@in_virtual_time
async def test_who_awaits_more_than_comes_is_in_the_round_that_others_start() -> None:
    """The third, whose weight it awaits, has died: the other's grace ends, and the round is for both."""
    async with lab(3, trigger=Quorum(grace_seconds=2.0)) as there:
        one, two, _ = there.members
        patient = start(one, StandBy(awaits=50.0, seconds=30.0, stays=True))
        await asyncio.sleep(0.5)
        [other] = there.start([two])
        [result] = await results_of(patient)
        assert (await other).holds
        assert len(result.commit.holders) == 2
