"""Shards on lease: the coordinator keeps the book (shardbook.py), a trainer asks it for the next one."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec

from potluck.errors import ConfigurationError, PotluckError, RetryableError, RevisionConflictError
from potluck.link.links import Incoming
from potluck.messages import Message, decode, encode
from potluck.peer.lease import Lease, LeaseView
from potluck.recipes.recipe import MAX_SHARDS
from potluck.round.averager import RoundPeer
from potluck.run.joined import Joined
from potluck.training.books.shardbook import ShardBook, allowances, check_same_data, reach, reader_key, take
from potluck.training.trainer.feed import RandomShards
from potluck.training.trainer.reading import Place, Reached

logger = logging.getLogger(__name__)

BOOK = "book"
ASK_SECONDS = 5.0
ATTEMPTS = 3
TELL_SECONDS = 10.0  # between two messages on how far a reader is
MAX_READERS = 64


class TakeShard(Message, frozen=True, kw_only=True, tag="shards.take"):
    """Which shard is next for me?"""

    num_shards: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARDS)]
    finished: int | None = None  # the one before
    reader: Annotated[int, msgspec.Meta(ge=0, lt=MAX_READERS)] = 0  # which of this peer's threads asks


class ShardTaken(Message, frozen=True, kw_only=True, tag="shards.taken"):
    """This one is yours until you ask again, or leave."""

    shard: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SHARDS)]
    pass_number: int
    skip: Annotated[int, msgspec.Meta(ge=0)] = 0  # samples that somebody else has trained on
    shared: bool = False  # there are more readers than shards: each takes its own order


class ShardReached(Message, frozen=True, kw_only=True, tag="shards.reached"):
    """So far am I in my shard."""

    shard: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SHARDS)]
    samples: Annotated[int, msgspec.Meta(ge=0)]
    reader: Annotated[int, msgspec.Meta(ge=0, lt=MAX_READERS)] = 0


class ShardDesk:
    """Gives out shards while this peer holds the coordinator's lease. Lives on the event loop."""

    def __init__(
        self, peer: RoundPeer, lease: Lease, measured: Callable[[Mapping[str, float]], None] = lambda _: None
    ) -> None:
        """`measured` is told how many times the median each trainer may give over time, by the shards it takes."""
        self.counts: Counter[str] = Counter()
        self._measured = measured
        self._session = peer.session
        self._store = peer.session.hub.store("shards")
        self._lease = lease
        self._turn = asyncio.Lock()
        peer.links.handle(TakeShard, self._asked)
        peer.links.handle(ShardReached, self._told)

    async def _asked(self, incoming: Incoming[TakeShard]) -> ShardTaken:
        if not self._lease.token:
            raise RetryableError("this peer does not coordinate (any more): ask the peer that does")
        async with self._turn:
            for _ in range(ATTEMPTS):
                try:
                    return await self._give(incoming.sender, incoming.message)
                except RevisionConflictError:
                    self.counts["conflicts"] += 1  # an earlier coordinator wrote last: its book counts
        raise RetryableError("the book of shards is being written by another coordinator: ask again")

    async def _give(self, peer: str, asked: TakeShard) -> ShardTaken:
        entry = await self._store.get(BOOK)
        if entry is None or entry.value is None:
            book, revision = ShardBook(num_shards=asked.num_shards), 0
        else:
            book, revision = decode(ShardBook, entry.value), entry.revision
        check_same_data(book, asked.num_shards)
        present = {presence.peer for presence in self._session.roster if presence.state in ("alive", "suspect")}
        now = self._session.now()
        book, shard = take(book, peer, finished=asked.finished, present=present, reader=asked.reader, now=now)
        await self._store.put(BOOK, encode(book), expected=revision)
        trainers = {presence.peer for presence in self._session.roster if presence.card.role == "trainer"}
        self._measured(allowances(book, trainers & present, now))
        self.counts["given"] += 1
        return ShardTaken(
            shard=shard,
            pass_number=book.pass_number,
            skip=book.skip(shard),
            shared=book.is_shared(shard, reader_key(peer, asked.reader)),
        )

    async def _told(self, incoming: Incoming[ShardReached]) -> None:
        """Write down how far a reader is. Where that fails it is told again in a while."""
        if not self._lease.token:
            return
        told = incoming.message
        async with self._turn:
            entry = await self._store.get(BOOK)
            if entry is None or entry.value is None:
                return
            book = decode(ShardBook, entry.value)
            after = reach(book, reader_key(incoming.sender, told.reader), told.shard, told.samples)
            if after is not book:
                try:
                    await self._store.put(BOOK, encode(after), expected=entry.revision)
                except RetryableError:  # another coordinator wrote, or the hub is slow
                    self.counts["not_reached"] += 1
                    return
                self.counts["reached"] += 1


class LeasedShards:
    """A trainer's shards, from the coordinator; chosen by chance while nobody answers. For one of its readers."""

    def __init__(self, run: Joined, coordinators: LeaseView, num_shards: int, seed: int, reader: int = 0) -> None:
        """`coordinators` tells who holds the lease."""
        self.counts: Counter[str] = Counter()
        self._reader = reader
        self._run = run
        self._coordinators = coordinators
        self._num_shards = num_shards
        self._by_chance = RandomShards(num_shards, seed)
        self._present: int | None = None  # on lease
        self._finished: int | None = None  # on lease before, and read to its end when the next is asked for
        self._is_shared: bool | None = None
        self._told_at = 0.0

    def take(self) -> Place:
        """The next shard; the one before is done. ConfigurationError when the run's data are cut otherwise."""
        self._present = self._is_shared = None
        try:
            taken = self._ask()
        except ConfigurationError:
            raise
        except PotluckError as error:
            logger.debug("no shard on lease just now, any will do: %s", error)
            self.counts["by_chance"] += 1
            self._finished = None
            return self._by_chance.take()
        self._present = self._finished = taken.shard
        self._is_shared = taken.shared
        self.counts["on_lease"] += 1
        if taken.shared:
            return Place(taken.shard)
        seed = zlib.crc32(b"%d %d" % (taken.pass_number, taken.shard))
        return Place(taken.shard, seed=seed, skip=taken.skip)

    def reach(self, reached: Reached) -> None:
        """Training is so far: now and then the coordinator is told, and nobody waits for that."""
        now = time.monotonic()
        if reached.shard != self._present or self._is_shared or now - self._told_at < TELL_SECONDS:
            return
        coordinator = self._coordinators.holder
        if coordinator is not None:
            self._told_at = now
            told = ShardReached(shard=reached.shard, samples=reached.samples, reader=self._reader)
            self._run.submit(self._tell(coordinator, told))

    async def _tell(self, coordinator: str, told: ShardReached) -> None:
        try:
            await self._run.peer.links.send(coordinator, told, timeout_seconds=ASK_SECONDS)
        except PotluckError as error:
            logger.debug("how far this reader is was not told, and will be in a while: %s", error)

    def _ask(self) -> ShardTaken:
        coordinator = self._coordinators.holder
        if coordinator is None:
            raise RetryableError("nobody coordinates just now")
        request = TakeShard(num_shards=self._num_shards, finished=self._finished, reader=self._reader)
        links = self._run.peer.links
        answer = self._run.call(
            links.request(coordinator, request, reply=ShardTaken, timeout_seconds=ASK_SECONDS)
        ).message
        if not 0 <= answer.shard < self._num_shards:
            raise RetryableError(f"the coordinator gave shard {answer.shard} of {self._num_shards}")
        return answer
