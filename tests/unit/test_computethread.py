"""Where a peer computes: short work on the event loop, and never two pieces at once."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from potluck.pipeline import computethread
from potluck.pipeline.computethread import NUM_TIMED, ComputeThread


@pytest.fixture
async def thread() -> AsyncIterator[ComputeThread]:
    made = ComputeThread()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def everything_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computethread, "SHORT_SECONDS", float("inf"))  # however busy this machine is


async def test_work_moves_to_the_event_loop_once_it_is_known_to_be_short(thread: ComputeThread) -> None:
    where = [await thread.run_often("short", threading.get_ident) for _ in range(NUM_TIMED + 2)]
    assert threading.get_ident() not in where[:NUM_TIMED]
    assert where[NUM_TIMED:] == [threading.get_ident()] * 2
    assert await thread.run_often("another", threading.get_ident) != threading.get_ident()
    thread.forget()
    assert await thread.run_often("short", threading.get_ident) != threading.get_ident()


async def test_long_work_stays_in_the_thread(thread: ComputeThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computethread, "SHORT_SECONDS", 0.0)
    where = [await thread.run_often("long", threading.get_ident) for _ in range(NUM_TIMED + 2)]
    assert threading.get_ident() not in where


async def test_short_work_waits_for_what_the_thread_does(thread: ComputeThread) -> None:
    for _ in range(NUM_TIMED):
        await thread.run_often("short", threading.get_ident)
    done: list[str] = []
    may_end = threading.Event()
    has_begun = threading.Event()

    def long() -> None:
        has_begun.set()
        may_end.wait()
        done.append("long")

    def short() -> int:
        done.append("short")
        return threading.get_ident()

    under_way = asyncio.ensure_future(thread.run(long))
    await asyncio.to_thread(has_begun.wait)
    under_way.cancel()  # whoever waits may be gone: the thread is busy all the same
    following = asyncio.ensure_future(thread.run_often("short", short))
    await asyncio.sleep(0)
    assert done == []
    may_end.set()
    assert await following != threading.get_ident()
    assert done == ["long", "short"]


async def test_work_of_ever_new_kinds_is_not_remembered_for_ever(
    thread: ComputeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computethread, "MAX_KINDS", 4)
    for kind in range(6):
        await thread.run_often(kind, threading.get_ident)
    assert len(thread._seconds) == 2


async def test_an_error_is_the_callers_wherever_it_happens(thread: ComputeThread) -> None:
    def fail() -> None:
        raise LookupError("as wanted")

    for _ in range(NUM_TIMED + 1):
        with pytest.raises(LookupError, match="as wanted"):
            await thread.run_often("failing", fail)
    assert thread.num_on_loop == 1
