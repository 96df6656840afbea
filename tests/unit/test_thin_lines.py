"""Rounds and loads on lines so thin that a single message takes longer than silence may last, in virtual time."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from roundlab import assert_same_average, lab, mean_of
from statelab import model, same, state_lab

from potluck.errors import RoundFailedError, StateUnavailableError
from potluck.sim.memorycarrier import Conditions
from potluck.sim.memoryrun import CARRIERS, MemoryRun
from potluck.sim.virtualloop import in_virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


def thin(run: MemoryRun, bytes_per_second: float) -> None:
    """All ways carry so much each."""
    shape(run, Conditions(delay_seconds=0.02, bytes_per_second=bytes_per_second))


def shape(run: MemoryRun, conditions: Conditions) -> None:
    for one, other in itertools.permutations(run.peers.values(), 2):
        for kind in CARRIERS:
            run.network.set_conditions(conditions, kind=kind, sender=one.peer_id, receiver=other.peer_id)


@in_virtual_time
async def test_a_round_on_thin_lines_is_not_given_up_while_bytes_move() -> None:
    async with lab(3) as there:
        thin(there.run, 16_000.0)
        began = now()
        results = await there.average(timeout_seconds=6.0)
        assert now() - began > 12.0, "it was to take longer than anybody waits where nothing moves"
        assert {result.commit.key.attempt for result in results} == {0}
        assert_same_average(there.members, mean_of(there.members))
        assert not [m for m in there.members if m.averager.statistics().get("coordinator_aborts")]


@in_virtual_time
async def test_a_round_in_which_nothing_moves_any_more_fails_in_time() -> None:
    async with lab(2) as there:
        thin(there.run, 16_000.0)
        started = there.start(timeout_seconds=6.0)
        await asyncio.sleep(10.0)
        assert not any(task.done() for task in started), "bytes move"
        for one, other in itertools.permutations(there.members, 2):
            there.run.muffle(one.peer, other.peer)
        outcomes = await asyncio.wait_for(asyncio.gather(*started, return_exceptions=True), 60.0)
        failures = [outcome for outcome in outcomes if isinstance(outcome, RoundFailedError)]
        assert failures, "the one that coordinates may go on alone"
        assert "nothing moved for 6 s" in str(failures[0])


@in_virtual_time
async def test_a_chunk_may_take_minutes_as_long_as_bytes_come() -> None:
    async with state_lab() as there:
        keeper, joiner = [await there.join(name) for name in ("keeper", "joiner")]
        there.commit(1, keeper)
        await keeper.publish(model(1, 2), 1)
        thin(there.run, 10_000.0)
        began = now()
        with await joiner.keeper.fetch(timeout_seconds=30.0) as fetched:
            assert same(fetched.tensors(), model(1, 2))
            assert fetched.report.given == {keeper.id: 3}
        assert now() - began > 150.0, "it was to take much longer than anybody waits where nothing comes"
        assert keeper.keeper.statistics()["serve_streams"] == 1, "it was never given up"


@in_virtual_time
async def test_a_load_of_which_nothing_comes_any_more_fails_and_says_so() -> None:
    async with state_lab() as there:
        keeper, joiner = [await there.join(name) for name in ("keeper", "joiner")]
        there.commit(1, keeper)
        await keeper.publish(model(1, 2), 1)
        thin(there.run, 10_000.0)
        fetching = asyncio.create_task(joiner.keeper.fetch(timeout_seconds=40.0))
        await asyncio.sleep(60.0)
        assert not fetching.done()
        shape(there.run, Conditions(is_silent=True))
        with pytest.raises(StateUnavailableError, match=r"nothing came for 40 s|nobody"):
            await asyncio.wait_for(fetching, 300.0)
