"""What the guard does beside listening: begun soon, ended together, nothing left over."""

from __future__ import annotations

import asyncio

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
