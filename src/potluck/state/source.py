"""One keeper as seen by a joiner: a stream that numbers of chunks go out on, and chunks come in.

On a slow way chunks are asked for packed: that takes 4 ms of the keeper's core for each and 1.5 of ours, and saves a
sixth of the bytes (`scripts/bench packing`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Literal, Protocol

from potluck import tasks
from potluck.clock import Clock
from potluck.errors import PotluckError, ProtocolError
from potluck.link.grouplinks import GroupLinks
from potluck.link.links import Stream
from potluck.state.inventory import MIB, Inventory
from potluck.state.serving import NUMBER, PACKED, FetchChunks

logger = logging.getLogger(__name__)

SLOW_BYTES_PER_SECOND = 10e6  # packing takes less time than it saves below 30e6, if nobody else wants the cores
JUDGED_BYTES = 2 * MIB  # after so much a way is called slow, or is not

Packing = Literal["auto", "always", "never"]
"""Whether chunks are packed for the way. Auto: on slow ones."""


class SourceOwner(Protocol):
    """Who is told what a keeper does."""

    def chunk_came(self, source: Source, number: int, data: memoryview, *, is_packed: bool) -> asyncio.Future[None]:
        """A chunk that was asked for; the next one is read when the future is done."""
        ...

    def lied(self, keeper: str, what: str) -> None:
        """It sent what no keeper of ours would."""
        ...

    def broke_off(self, keeper: str, reason: str) -> None:
        """Nothing more will come of what it was asked for."""
        ...


class Source:
    """One stream from one keeper; another one is made after a failure."""

    def __init__(
        self,
        keeper: str,
        inventory: Inventory,
        links: GroupLinks,
        owner: SourceOwner,
        clock: Clock,
        *,
        answer_seconds: float,
        packing: Packing,
    ) -> None:
        self.keeper = keeper
        self.inventory = inventory
        self.is_over = False
        self._links = links
        self._owner = owner
        self._clock = clock
        self._packing = packing
        self._asked_at: float | None = None  # for the first time
        self._num_bytes = 0  # that came
        self._answer_seconds = answer_seconds
        self._asks: asyncio.Queue[int] = asyncio.Queue()  # no more than the schedule has open
        self._asked: set[int] = set()
        self._reason = "it closed the stream"
        self.task = asyncio.create_task(self._run(), name=f"state: fetch from {keeper}")

    def ask(self, chunk: int) -> None:
        """Ask for a chunk."""
        if self._asked_at is None:
            self._asked_at = self._clock.monotonic()
        self._asked.add(chunk)
        self._asks.put_nowait(chunk)

    def give_up(self, reason: str) -> None:
        """Break the stream off."""
        self.is_over = True
        self._reason = reason
        self.task.cancel()

    async def _run(self) -> None:
        try:
            opened = await self._links.open_stream(
                self.keeper, FetchChunks(digest=self.inventory.digest), timeout_seconds=self._answer_seconds
            )
            async with opened as stream:
                writer = asyncio.create_task(self._write(stream), name=f"state: asks to {self.keeper}")
                try:
                    await self._read(stream)
                finally:
                    await tasks.end(writer)
        except ProtocolError as error:
            self._owner.lied(self.keeper, str(error))
        except PotluckError as error:
            self._reason = str(error)
        finally:
            self.is_over = True
            self._owner.broke_off(self.keeper, self._reason)

    async def _write(self, stream: Stream) -> None:
        with contextlib.suppress(PotluckError):  # the reader gets the same error, or the keeper is overdue soon
            while True:
                numbers = [await self._asks.get()]
                while not self._asks.empty():
                    numbers.append(self._asks.get_nowait())
                frame = b"".join(NUMBER.pack(number) for number in numbers)
                frames = [frame, PACKED] if self._is_packing() else [frame]
                await stream.send(frames, timeout_seconds=self._answer_seconds)

    def _is_packing(self) -> bool:
        if self._packing != "auto" or self._asked_at is None:
            return self._packing == "always"
        seconds = self._clock.monotonic() - self._asked_at
        return self._num_bytes >= JUDGED_BYTES and self._num_bytes < seconds * SLOW_BYTES_PER_SECOND

    async def _read(self, stream: Stream) -> None:
        # Whether an answer is overdue is the schedule's business, which knows what is owed.
        while (frames := await stream.receive()) is not None:
            is_packed = frames[2:] == [PACKED]
            if len(frames) != 2 + is_packed or len(frames[0]) != NUMBER.size:
                raise ProtocolError("it sent something that is not a chunk")
            (number,) = NUMBER.unpack(frames[0])
            if number not in self._asked:
                raise ProtocolError(f"it sent chunk {number}, which it was not asked for")
            self._asked.discard(number)
            self._num_bytes += len(frames[1])
            await self._owner.chunk_came(self, number, frames[1], is_packed=is_packed)
