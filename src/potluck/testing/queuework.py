"""Putting, taking and finishing items without a pause, with an account of what became of each.

Some items are put under a name and some are not; every other taker finishes at once all that it took; one item in eight
is let go when it is first taken, so that its lease gives it back. Tests and the benchmark kill the hub meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import Any

from potluck import tasks
from potluck.errors import RetryableError
from potluck.fleet.queue import Item, Queue
from potluck.testing.polling import poll_until

NUM_PUTTERS = 8
NUM_TAKERS = 4
TAKEN_AT_ONCE = 16
PATIENCE_SECONDS = 120.0


class QueueWork:
    """Several putters and takers at one queue."""

    def __init__(self, putters: Queue[Any], takers: Queue[Any]) -> None:
        self.put: set[str] = set()
        self.taken: dict[str, int] = {}
        self.done: set[str] = set()
        self.again_after_done: list[str] = []
        self._putters, self._takers = putters, takers
        self._is_over = asyncio.Event()
        self._workers = [asyncio.create_task(self._put(number)) for number in range(NUM_PUTTERS)]
        self._workers += [asyncio.create_task(self._take(number)) for number in range(NUM_TAKERS)]

    async def until_more(self, number: int) -> None:
        """Wait until so many more items are put and done: the hub is there, and works."""
        put, done = len(self.put) + number, len(self.done) + number
        await poll_until(
            lambda: self._broken() or (len(self.put) >= put and len(self.done) >= done),
            PATIENCE_SECONDS,
            lambda: f"{put} items to be put and {done} done, not {len(self.put)} and {len(self.done)}",
        )

    async def finish(self) -> None:
        """Put no more, and wait until all is done, or nothing is done any more: then `lost` has the rest."""
        self._is_over.set()
        waiting, done = set(self._workers), -1
        while waiting and len(self.done) > done:
            done = len(self.done)
            _, waiting = await asyncio.wait(waiting, timeout=PATIENCE_SECONDS)
        await tasks.end(*waiting)
        for worker in self._workers:
            if not worker.cancelled():
                worker.result()

    @property
    def lost(self) -> set[str]:
        """Put, and never done."""
        return self.put - self.done

    @property
    def num_handed_again(self) -> int:
        """How often items were handed out again, as is right before they are done."""
        return sum(times - 1 for times in self.taken.values())

    def _broken(self) -> bool:
        for worker in self._workers:
            if worker.done() and not self._is_over.is_set():
                worker.result()
        return False

    async def _put(self, putter: int) -> None:
        number = 0
        while not self._is_over.is_set():
            name = f"{putter}-{number}"
            await self._putters.put({"name": name, "filling": bytes(1000)}, id=name if putter % 2 else "")
            self.put.add(name)
            number += 1

    async def _take(self, taker: int) -> None:
        while not (self._is_over.is_set() and self.done >= self.put):
            done_before = set(self.done)  # what another taker finishes meanwhile was handed out before it was done
            try:
                items = await self._takers.take(TAKEN_AT_ONCE, wait_seconds=1.0)
            except RetryableError:
                continue  # the hub is away
            self.again_after_done += [item.value["name"] for item in items if item.value["name"] in done_before]
            at_once = len(items) if taker % 2 else 1
            while items:
                await asyncio.gather(*(self._finish(items.pop()) for _ in range(min(at_once, len(items)))))

    async def _finish(self, item: Item[Any]) -> None:
        name = item.value["name"]
        self.taken[name] = self.taken.get(name, 0) + 1
        if self.taken[name] == 1 and hash(name) % 8 == 0:
            return
        await item.done()
        self.done.add(name)
