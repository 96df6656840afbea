"""What the guard does beside listening: begun soon, ended together, nothing left over."""

from __future__ import annotations

import asyncio

import pytest

from potluck.errors import DeadlineExceededError
from potluck.hub.guard.backgroundwork import BackgroundWork
from potluck.sim.virtualloop import in_virtual_time


@in_virtual_time
async def test_a_task_that_is_ended_before_it_began_leaves_no_coroutine_behind() -> None:
    background, begun = BackgroundWork(10), []

    async def work() -> None:
        begun.append(True)

    background.spawn(work())
    await background.close()  # in the same turn of the loop; a coroutine that is never awaited would be a warning
    assert (begun, len(background)) == ([], 0)


@in_virtual_time
async def test_what_is_too_much_is_dropped_and_counted() -> None:
    background, done = BackgroundWork(1), []

    async def work(number: int) -> None:
        done.append(number)

    background.spawn(work(1))
    background.spawn(work(2))
    await asyncio.sleep(1.0)
    await background.close()
    background.spawn(work(3))
    assert (done, background.counts["dropped_tasks"]) == ([1], 2)


@in_virtual_time
async def test_the_same_failure_is_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    background = BackgroundWork(10)

    async def work(store: str) -> None:
        raise DeadlineExceededError(f"no answer on {store} within 5 s")

    for _ in range(100):  # 95 s of a store that cannot be written
        background.spawn(work("lease"))
        background.spawn(work("lineage"))
        await asyncio.sleep(0.95)
    await background.close()
    assert background.counts["failed_answers"] == 200
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 4
