"""From the training thread to a snapshot: tensors are copied where they are, and hashed elsewhere.

At most one state is being hashed and one waits; if another comes meanwhile, the one that waits is passed over. So a
training loop that is faster than the hashing is never held up, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from potluck.errors import StateUnavailableError
from potluck.round.workers import Workers
from potluck.state.chunkpool import ChunkPool
from potluck.state.inventory import Metadata
from potluck.state.snapshot import Snapshot, Staged, stage

logger = logging.getLogger(__name__)

Taker = Callable[[int, Snapshot], Awaitable[None]]


@dataclass(slots=True)
class _Publication:
    staged: Staged
    epoch: int
    outcome: concurrent.futures.Future[str]

    def pass_over(self, reason: str) -> None:
        self.staged.discard()
        if self.outcome.set_running_or_notify_cancel():
            self.outcome.set_exception(StateUnavailableError(f"the state of epoch {self.epoch} is not kept: {reason}"))


class Publisher:
    """Makes snapshots of what is published, and hands them over one after the other."""

    def __init__(
        self, pool: ChunkPool, workers: Workers, *, newest: Callable[[], Snapshot | None], take: Taker
    ) -> None:
        """`newest` is the snapshot to share chunks with; `take` gets each new one, for as long as it runs."""
        self.counts: Counter[str] = Counter()
        self._pool = pool
        self._workers = workers
        self._newest = newest
        self._take = take
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: _Publication | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From now on states can be published."""
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Finish what was published, since it may be wanted as a backup. Calling it twice does no harm."""
        self._loop = None
        await self.until_idle()

    async def until_idle(self) -> None:
        """Until what was published is hashed and handed over."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    def publish(
        self, tensors: Mapping[str, Tensor], metadata: Metadata, epoch: int, *, own: Collection[str] = ()
    ) -> concurrent.futures.Future[str]:
        """Copy the tensors, from any thread, and have the rest done; the future holds the digest."""
        loop = self._loop
        if loop is None:
            raise StateUnavailableError("the keeper is not started, or closed: nothing can be published")
        outcome: concurrent.futures.Future[str] = concurrent.futures.Future()
        publication = _Publication(stage(tensors, metadata, self._pool, own=own), epoch, outcome)
        loop.call_soon_threadsafe(self._staged, publication)
        return outcome

    def _staged(self, publication: _Publication) -> None:
        if self._loop is None:
            publication.pass_over("the peer leaves")
            return
        if self._waiting is not None:
            self.counts["passed_over"] += 1
            self._waiting.pass_over(f"epoch {publication.epoch} came before it was hashed")
        self._waiting = publication
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._hash_all(), name="state: hashing")

    async def _hash_all(self) -> None:
        while (publication := self._waiting) is not None:
            self._waiting = None
            is_wanted = publication.outcome.set_running_or_notify_cancel()
            try:
                digest = await self._hash(publication)
            except Exception as error:  # whoever published is told; the next state may fare better
                self.counts["failed"] += 1
                logger.exception("the state of epoch %d could not be taken in", publication.epoch)
                if is_wanted:
                    publication.outcome.set_exception(error)
            else:
                self.counts["published"] += 1
                if is_wanted:
                    publication.outcome.set_result(digest)

    async def _hash(self, publication: _Publication) -> str:
        newest = self._newest()
        previous = newest.hold() if newest is not None else None
        try:
            snapshot = await self._workers.run(lambda: publication.staged.hashed(previous))
        finally:
            if previous is not None:
                previous.release()
        try:
            await self._take(publication.epoch, snapshot)
        finally:
            snapshot.release()
        return snapshot.digest
