"""Where a peer computes: in one thread, or on the event loop what takes less time than the way to the thread and back.

Two wake-ups and the interpreter's lock cost a good half of a millisecond on a busy machine, as much as a small block.
So work that is done again and again is timed, and stays on the event loop while it is short and the thread is idle.
Never are two pieces of work done at once: only the event loop hands out work, and it sees whether the thread is idle.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")

SHORT_SECONDS = 0.002  # the event loop may stand still for so long
NUM_TIMED = 8  # of the last times: the shortest is what the work itself takes
MAX_KINDS = 1024  # of work that is timed


class ComputeThread:
    """One peer's place to compute."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="potluck-stage")
        self._under_way: list[Future[Any]] = []
        self._seconds: dict[Hashable, deque[float]] = {}
        self.num_on_loop = 0

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], R]) -> R:
        """Do this in the thread."""
        self._under_way = [future for future in self._under_way if not future.done()]
        future = self._pool.submit(work)
        self._under_way.append(future)
        return await asyncio.wrap_future(future)

    async def run_often(self, kind: Hashable, work: Callable[[], R]) -> R:
        """Do this where it is done sooner; work of one kind takes about the same time, so shapes belong to the kind."""
        if kind not in self._seconds and len(self._seconds) >= MAX_KINDS:
            self._seconds.clear()
        known = self._seconds.setdefault(kind, deque(maxlen=NUM_TIMED))

        def timed() -> R:
            began = time.perf_counter()
            try:
                return work()
            finally:
                known.append(time.perf_counter() - began)

        is_idle = all(future.done() for future in self._under_way)
        if not is_idle or len(known) < NUM_TIMED or min(known) >= SHORT_SECONDS:
            return await self.run(timed)
        self.num_on_loop += 1
        try:
            return timed()
        finally:
            await asyncio.sleep(0)  # let others have their turn before the next one

    def forget(self) -> None:
        """What is computed from now on is something else."""
        self._seconds.clear()
