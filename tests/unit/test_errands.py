"""What the guard does beside listening: begun soon, ended together, nothing left over."""

from __future__ import annotations

import asyncio

import pytest

from potluck.errors import DeadlineExceededError
from potluck.hub.guard.errands import Errands
from potluck.testing.virtualloop import in_virtual_time


@in_virtual_time
async def test_an_errand_that_is_ended_before_it_began_leaves_no_coroutine_behind() -> None:
    errands, begun = Errands(10), []

    async def work() -> None:
        begun.append(True)

    errands.spawn(work())
    await errands.close()  # in the same turn of the loop; a coroutine that is never awaited would be a warning
    assert (begun, len(errands)) == ([], 0)


@in_virtual_time
async def test_what_is_too_much_is_dropped_and_counted() -> None:
    errands, done = Errands(1), []

    async def work(number: int) -> None:
        done.append(number)

    errands.spawn(work(1))
    errands.spawn(work(2))
    await asyncio.sleep(1.0)
    await errands.close()
    errands.spawn(work(3))
    assert (done, errands.counts["dropped_tasks"]) == ([1], 2)


@in_virtual_time
async def test_the_same_failure_is_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    errands = Errands(10)

    async def work(store: str) -> None:
        raise DeadlineExceededError(f"no answer on {store} within 5 s")

    for _ in range(100):  # 95 s of a store that cannot be written
        errands.spawn(work("lease"))
        errands.spawn(work("lineage"))
        await asyncio.sleep(0.95)
    await errands.close()
    assert errands.counts["failed_answers"] == 200
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 4
