"""A few threads for tensor work, so that the event loop never waits for it.

Torch's kernels release the interpreter lock, so threads do run side by side. Each kernel here uses one core: the work
comes in chunks, and chunks are what is spread over cores. Torch keeps its number of threads per thread, with a default
for new ones; the workers set theirs to one and put the default back, so that nobody's training is slowed down.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

from potluck.errors import ConfigurationError
from potluck.hub.subjects import MAIN

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_THREADS = 4


class Workers:
    """Runs work in threads, and tells its outcome on the event loop that started it."""

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is not None and num_threads < 1:
            raise ConfigurationError(f"num_threads={num_threads}: at least 1 is needed")
        self.num_errors = 0
        self.num_threads = num_threads or min(MOST_THREADS, os.cpu_count() or 1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: SimpleQueue[Callable[[], Callable[[], None]] | None] = SimpleQueue()
        self._outcomes: deque[Callable[[], None]] = deque()
        self._is_told = False  # that there are outcomes
        self._threads: list[threading.Thread] = []
        self._ended = asyncio.Semaphore(0)

    def start(self) -> None:
        """Start the threads."""
        self._loop = asyncio.get_running_loop()
        before = torch.get_num_threads()
        started = threading.Barrier(self.num_threads + 1)
        for number in range(self.num_threads):
            thread = threading.Thread(target=self._run, args=(started,), name=f"potluck-tensors-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        started.wait()
        torch.set_num_threads(before)

    async def close(self) -> None:
        """Finish what was submitted and end the threads. Idempotent."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)
        for _ in threads:
            await self._ended.acquire()
        for thread in threads:
            thread.join()

    def submit(self, work: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]) -> None:
        """Do the work in a thread, then call `done` with its result, or `failed` with its error, on the loop."""

        def run() -> Callable[[], None]:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - the thread goes on; the caller that submitted the work judges
                caught = error
                return lambda: failed(caught)
            return lambda: done(result)

        self._queue.put(run)

    async def run(self, work: Callable[[], T]) -> T:
        """Do the work in a thread and return its result."""
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.submit(
            work,
            lambda result: None if outcome.done() else outcome.set_result(result),
            lambda error: None if outcome.done() else outcome.set_exception(error),
        )
        return await outcome

    def _run(self, started: threading.Barrier) -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # the first look at it in a thread copies the default, which must still be ours
        started.wait()
        assert self._loop is not None
        while (job := self._queue.get()) is not None:
            self._outcomes.append(job())
            if not self._is_told:  # one wake-up of the loop serves all outcomes that it finds
                self._is_told = True
                self._loop.call_soon_threadsafe(self._tell)
        self._loop.call_soon_threadsafe(self._ended.release)

    def _tell(self) -> None:
        self._is_told = False
        while self._outcomes:
            outcome = self._outcomes.popleft()
            try:
                outcome()
            except Exception:  # one taker's error must not keep the outcomes of others; logged and counted
                self.num_errors += 1
                logger.exception("taking in the result of tensor work failed")


class SharedWorkers(Workers):
    """Threads for several users: they start with the first and end with the last. Each user starts and closes once."""

    def __init__(self, num_threads: int | None = None) -> None:
        super().__init__(num_threads)
        self._num_users = 0

    def start(self) -> None:
        """One more user; the first has the threads started."""
        self._num_users += 1
        if self._num_users == 1:
            super().start()

    async def close(self) -> None:
        """One user less; the last has the threads end."""
        self._num_users -= 1
        if self._num_users == 0:
            await super().close()


_SHARED: WeakKeyDictionary[object, dict[str, SharedWorkers]] = WeakKeyDictionary()


def workers_for(peer: object, group: str, purpose: str, num_threads: int | None) -> Workers:
    """Threads of their own for `main`; the named groups of one peer share, for each purpose, those of the first."""
    if group == MAIN:
        return Workers(num_threads)
    return _SHARED.setdefault(peer, {}).setdefault(purpose, SharedWorkers(num_threads))
