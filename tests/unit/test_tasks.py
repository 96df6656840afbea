from __future__ import annotations

import asyncio
import logging

import pytest

from potluck import tasks
from potluck.sim.virtualloop import in_virtual_time


async def stubborn(num_swallowed: int, seen: list[int]) -> str:
    """A task that loses so many cancellations, as a library's `except` may make it."""
    for number in range(num_swallowed):
        try:
            await asyncio.sleep(10**6)
        except asyncio.CancelledError:
            seen.append(number)
    await asyncio.sleep(10**6)
    return "never"


@in_virtual_time
async def test_a_task_that_swallows_cancellations_ends_all_the_same() -> None:
    seen: list[int] = []
    task = asyncio.create_task(stubborn(5, seen))
    await asyncio.sleep(0)
    await tasks.end(task)
    assert task.cancelled()
    assert seen == [0, 1, 2, 3, 4]


@in_virtual_time
async def test_what_is_to_be_finished_is_so_before_a_caller_that_is_cancelled_goes_on() -> None:
    done: list[float] = []

    async def work(seconds: float) -> None:
        await asyncio.sleep(seconds)
        done.append(seconds)

    caller = asyncio.create_task(tasks.finish([work(1.0), work(3.0)]))
    for _ in range(2):  # as often as it likes
        await asyncio.sleep(0.5)
        caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done == [1.0, 3.0]


@in_virtual_time
async def test_an_error_of_what_is_to_be_finished_is_raised_when_all_is_done(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    async def fail() -> None:
        raise ValueError("no")

    async def work() -> None:
        await asyncio.sleep(1.0)
        done.append("work")

    with pytest.raises(ValueError, match="no"):
        await tasks.finish([fail(), work()])
    assert done == ["work"]
    caller = asyncio.create_task(tasks.finish([fail(), work()]))
    await asyncio.sleep(0.5)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert "ValueError" in caplog.text
    assert len(done) == 2


@in_virtual_time
async def test_all_of_several_end_and_none_is_no_task() -> None:
    seen: list[int] = []
    several = [asyncio.create_task(stubborn(count, seen)) for count in (0, 1, 3)]
    await asyncio.sleep(0)
    await tasks.end(None, *several, None)
    assert all(task.cancelled() for task in several)
    await tasks.end()


@in_virtual_time
async def test_a_task_that_has_not_started_yet_ends() -> None:
    task = asyncio.create_task(asyncio.sleep(10))
    await tasks.end(task)
    assert task.cancelled()


@in_virtual_time
async def test_a_task_that_finishes_is_left_with_its_result(caplog: pytest.LogCaptureFixture) -> None:
    task = asyncio.create_task(asyncio.sleep(0, "result"))
    await asyncio.sleep(0.1)
    await tasks.end(task)
    assert task.result() == "result"
    assert not caplog.records


@in_virtual_time
async def test_a_task_may_end_others_but_not_itself() -> None:
    other = asyncio.create_task(asyncio.sleep(10**6))

    async def ender() -> str:
        await tasks.end(asyncio.current_task(), other)
        return "still here"

    assert await asyncio.create_task(ender()) == "still here"
    assert other.cancelled()


@in_virtual_time
async def test_errors_are_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    async def fails_when_cancelled() -> None:
        try:
            await asyncio.sleep(10**6)
        finally:
            raise LookupError("broken on the way out")

    async def fails_at_once() -> None:
        raise ValueError("broken before")

    out = asyncio.create_task(fails_when_cancelled(), name="the first")
    before = asyncio.create_task(fails_at_once(), name="the second")
    await asyncio.sleep(0.1)
    with caplog.at_level(logging.ERROR, logger="potluck.tasks"):
        await tasks.end(out, before)
    text = caplog.text
    assert "the first" in text
    assert "broken on the way out" in text
    assert "the second" in text
    assert "broken before" in text


@in_virtual_time
async def test_whoever_waits_for_the_end_can_be_cancelled() -> None:
    seen: list[int] = []
    task = asyncio.create_task(stubborn(1000, seen))
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await tasks.end(task)
    assert 3 <= len(seen) <= 7
    await tasks.end(task, every_seconds=0.001)
