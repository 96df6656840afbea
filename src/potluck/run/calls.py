"""Work that one thread waits for and another does: what comes of it, and an end to it.

Ctrl-C comes as an exception between any two steps of the main thread. If that is inside of a condition's own code, as
when waiting for a `concurrent.futures.Future`, the condition's lock stays taken, and the thread that does the work
waits for it for ever when it ends. So the two meet at a bare lock here, which only the one who does the work lets go:
no exception in the waiting thread can make that one wait. And a signal that comes in the moment before a thread begins
to wait does not wake it, in any wait of Python's: so the thread looks up from time to time, or Ctrl-C would be lost.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")

LOOK_UP_SECONDS = 0.2  # within so long Ctrl-C is noticed


class ThreadResult(Generic[T]):
    """What comes of work that another thread does. Any number of threads may wait for it."""

    def __init__(self) -> None:
        self._value: T | None = None
        self._error: BaseException | None = None
        self._is_known = False
        self._is_going_on = threading.Lock()
        self._is_going_on.acquire()

    @property
    def is_known(self) -> bool:
        """Whether the work has ended."""
        return self._is_known

    @property
    def error(self) -> BaseException | None:
        """What went wrong with work that has ended; None if nothing did."""
        return self._error

    def settle(self, value: T | None = None, error: BaseException | None = None) -> None:
        """Say what came of it: once, by who does the work."""
        self._value, self._error = value, error
        self._is_known = True
        self._is_going_on.release()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the end, for so long; whether it has come, or never will."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self._is_known and not self._is_lost():
            left = LOOK_UP_SECONDS if deadline is None else min(LOOK_UP_SECONDS, deadline - time.monotonic())
            if left <= 0:
                return False
            if self._is_going_on.acquire(timeout=left):  # between two of these Python sees to signals
                self._is_going_on.release()  # if Ctrl-C comes before that, others who wait look up
        return True

    def result(self) -> T:
        """Wait for the end, and return or raise what came of it."""
        self.wait()
        if not self._is_known:
            raise concurrent.futures.CancelledError("the event loop has ended")
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def _is_lost(self) -> bool:
        """Whether nobody is left who could settle it."""
        return False


class Call(ThreadResult[T]):
    """A coroutine on a loop that runs in another thread."""

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._work = work
        self._loop = loop
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """Have it run."""
        self._loop.call_soon_threadsafe(self._start)

    def end(self, timeout_seconds: float) -> None:
        """Cancel the work if it still goes on, and wait for its end for so long."""
        if not self._is_known and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel)
            self.wait(timeout_seconds)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._ended)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self._is_known:  # interrupted before it could begin
            self._work.close()
            self.settle(error=_cancelled())

    def _ended(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.settle(error=_cancelled())
        elif (error := task.exception()) is not None:
            self.settle(error=error)
        else:
            self.settle(task.result())

    def _is_lost(self) -> bool:
        return self._loop.is_closed()


def _cancelled() -> BaseException:
    return concurrent.futures.CancelledError("the event loop has ended, or the work was broken off")
