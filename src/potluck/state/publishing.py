"""From the training thread to a snapshot: a worker copies the tensors (copying.py) and hashes them.

At most one state is being hashed and one waits; if another comes meanwhile, the one that waits is passed over. So a
training loop that is faster than the hashing is never held up, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping

from torch import Tensor

from potluck.errors import StateUnavailableError
from potluck.round.member.workers import Workers
from potluck.state.chunkpool import ChunkPool
from potluck.state.copying import Copying, TornError
from potluck.state.inventory import Metadata
from potluck.state.snapshot import Snapshot, outline_of

logger = logging.getLogger(__name__)

Taker = Callable[[int, Snapshot], Awaitable[None]]


class Publication(concurrent.futures.Future[str]):
    """A state that was published. The future holds its digest."""

    def __init__(self, epoch: int, copying: Copying) -> None:
        super().__init__()
        self.epoch = epoch
        self.copying = copying

    @property
    def is_copied(self) -> bool:
        """Whether the tensors are copied, or will never be."""
        return self.copying.is_copied

    def wait_until_copied(self) -> None:
        """To be called before steady tensors are changed; mostly there is nothing to wait for."""
        self.copying.before_change()

    def tensors(self) -> dict[str, Tensor] | None:
        """Of a state that is held: what it was, on the CPU; None where it could not be copied."""
        return self.copying.tensors()

    def release(self) -> None:
        """Of a state that is held: it is not any more."""
        self.copying.release()

    def pass_over(self, reason: str) -> None:
        """It will not become a snapshot."""
        self.copying.release()
        if self.set_running_or_notify_cancel():
            self.set_exception(StateUnavailableError(f"the state of epoch {self.epoch} is not kept: {reason}"))


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
        self._waiting: Publication | None = None
        self._task: asyncio.Task[None] | None = None
        self._copies_at_once = False  # since somebody changes tensors by hand

    def start(self) -> None:
        """From now on states can be published."""
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Finish what was published, since it may be wanted as a backup. Idempotent."""
        self._loop = None
        await self.until_idle()

    async def until_idle(self) -> None:
        """Until what was published is hashed and handed over."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        metadata: Metadata,
        epoch: int,
        *,
        own: Collection[str] = (),
        steady: Collection[str] = (),
        is_held: bool = False,
    ) -> Publication:
        """Copy the tensors, from any thread, those that are steady a little later; and have the rest done."""
        loop = self._loop
        if loop is None:
            raise StateUnavailableError("the keeper is not started, or closed: nothing can be published")
        copying = Copying(
            outline_of(tensors, metadata, own=own),
            tensors,
            self._pool,
            steady=() if self._copies_at_once else steady,
            num_holders=2 if is_held else 1,
        )
        publication = Publication(epoch, copying)
        loop.call_soon_threadsafe(self._came, publication)
        return publication

    def _came(self, publication: Publication) -> None:
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
            is_wanted = publication.set_running_or_notify_cancel()
            try:
                digest = await self._hash(publication)
            except Exception as error:  # noqa: BLE001 - the publisher is told; the next state may fare better
                self._failed(publication, error)
                if is_wanted:
                    publication.set_exception(error)
            else:
                self.counts["published"] += 1
                if is_wanted:
                    publication.set_result(digest)

    def _failed(self, publication: Publication, error: Exception) -> None:
        if isinstance(error, TornError):
            self.counts["torn"] += 1
            self._copies_at_once = True
            logger.warning(
                "epoch %d: %s. From now on each state is copied before training goes on, which takes longer",
                publication.epoch,
                error,
            )
            return
        self.counts["failed"] += 1
        logger.error("the state of epoch %d could not be taken in", publication.epoch, exc_info=error)

    async def _hash(self, publication: Publication) -> str:
        newest = self._newest()
        previous = newest.hold() if newest is not None else None
        try:
            snapshot = await self._workers.run(lambda: publication.copying.hashed(previous))
        finally:
            publication.copying.release()
            if previous is not None:
                previous.release()
        try:
            await self._take(publication.epoch, snapshot)
        finally:
            snapshot.release()
        return snapshot.digest
