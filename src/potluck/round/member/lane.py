"""What one member sends to one other in a round: averages first, contributions as far ahead as memory allows.

Each destination has a lane with a task of its own, so that one that takes its time keeps nobody else waiting. Three
limits keep memory bounded:

- contributions are encoded only shortly before they leave;
- only so many bytes are on their way to one destination, counted until it has acknowledged them; on a slow line no
  more than it takes in two seconds, so that averages, which others wait for, soon pass;
- only so many chunks may be ahead of the averages that come back: a reducer that still waits for a slow member must not
  be buried under the contributions of the fast ones. All members send a reducer's chunks in the same order, so that the
  first one it lacks can always be sent. Chunks that are done again (a higher generation) go first, without that limit.

What a broken channel may have lost is sent again; a peer that has it already ignores it. What waits to leave when the
lane is closed is withdrawn: on a slow line it would hold up the next round by as long as this one took.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from potluck import tasks
from potluck.errors import DeadlineExceededError, PeerUnreachableError
from potluck.link.carrier import Buffer
from potluck.link.channel.packet import Urgency
from potluck.link.grouplinks import GroupLinks
from potluck.link.links import SendReceipt
from potluck.round.plan.messages import Average, Contribution, RoundKey

logger = logging.getLogger(__name__)

# Encodes our values of a chunk in a worker; calls back on the loop, with None where they cannot be contributed.
Encode = Callable[[int, Callable[[Buffer | None], None]], None]

ENCODED_AHEAD = 2  # contributions
IN_FLIGHT_BYTES = 8 * 1024 * 1024
IN_FLIGHT_SECONDS = 2.0  # at the speed measured, if that is less; but two frames, for the line to stay busy
RETRY_SECONDS = 0.2
SEND_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Letter:
    """One frame on its way."""

    chunk: int
    generation: int
    frame: Buffer
    is_average: bool


class Lane:
    """The way to one member."""

    def __init__(
        self,
        links: GroupLinks,
        peer: str,
        key: RoundKey,
        *,
        encode: Encode,
        is_current: Callable[[int, int], bool],
        on_sent: Callable[[Letter], None],
        seal_of: Callable[[Letter], bytes],
        ahead_chunks: int,
    ) -> None:
        """`is_current` tells whether a chunk's generation still counts; `on_sent`, that a letter has arrived."""
        self.peer = peer
        self._links = links
        self._key = key
        self._encode = encode
        self._is_current = is_current
        self._on_sent = on_sent
        self._seal_of = seal_of
        self._ahead_chunks = ahead_chunks
        self._contributions: deque[tuple[int, int]] = deque()  # chunk and generation
        self._again: deque[tuple[int, int]] = deque()  # those of a higher generation
        self._averages: deque[Letter] = deque()
        self._letters: deque[Letter] = deque()  # contributions, encoded
        self._num_encoding = 0
        self._in_flight_bytes = 0
        self._frame_bytes = 0  # of the largest so far
        self._receipts: set[SendReceipt] = set()
        self._unanswered: set[int] = set()  # chunks contributed whose averages have not come back
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def contribute(self, chunk: int, generation: int) -> None:
        """Send our values of a chunk, in turn."""
        (self._again if generation else self._contributions).append((chunk, generation))
        self._stir()

    def send_average(self, chunk: int, generation: int, frame: Buffer) -> None:
        """Send an average, before any contribution that has not left."""
        self._averages.append(Letter(chunk, generation, frame, is_average=True))
        self._stir()

    def answered(self, chunk: int) -> None:
        """The average of a chunk has come from this member."""
        if chunk in self._unanswered:
            self._unanswered.discard(chunk)
            self._wake.set()

    async def close(self) -> None:
        """Send nothing more. Idempotent."""
        await close_lanes([self])

    def _shut(self) -> asyncio.Task[None] | None:
        """Send nothing more, from this moment on; returns the task that is about to end."""
        self._closed = True
        # A task that was cancelled holds on to us: without this, only the garbage collector would free the frames.
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self._averages.clear()
        self._letters.clear()
        self._contributions.clear()
        self._again.clear()
        closed = PeerUnreachableError("the round is over")
        for receipt in list(self._receipts):
            receipt.withdraw(closed)
        return task

    def _stir(self) -> None:
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._run(), name=f"round lane to {self.peer[:8]}")
        self._wake.set()

    async def _run(self) -> None:
        while not self._closed:
            self._wake.clear()
            self._encode_ahead()
            queue = self._averages or self._letters
            if queue and self._in_flight_bytes < self._most_in_flight_bytes():
                await self._send(queue.popleft())
            else:
                await self._wake.wait()

    def _most_in_flight_bytes(self) -> float:
        speed = self._links.upload_bytes_per_second(self.peer)
        if speed is None:
            return IN_FLIGHT_BYTES
        return min(IN_FLIGHT_BYTES, max(2 * self._frame_bytes, IN_FLIGHT_SECONDS * speed))

    def _encode_ahead(self) -> None:
        while self._num_encoding + len(self._letters) < ENCODED_AHEAD:
            if self._again:
                chunk, generation = self._again.popleft()
            elif self._contributions and len(self._unanswered) < self._ahead_chunks:
                chunk, generation = self._contributions.popleft()
            else:
                return
            if self._is_current(chunk, generation):
                self._unanswered.add(chunk)
                self._num_encoding += 1
                self._encode(chunk, lambda frame, c=chunk, g=generation: self._encoded(c, g, frame))  # type: ignore[misc]

    def _encoded(self, chunk: int, generation: int, frame: Buffer | None) -> None:
        self._num_encoding -= 1
        if frame is None:
            self._unanswered.discard(chunk)
        elif not self._closed:
            self._letters.append(Letter(chunk, generation, frame, is_average=False))
        self._wake.set()

    async def _send(self, letter: Letter) -> None:
        if not self._is_current(letter.chunk, letter.generation):
            return
        kind = Average if letter.is_average else Contribution
        seal = self._seal_of(letter)
        message = kind(key=self._key, chunk=letter.chunk, generation=letter.generation, seal=seal)
        size = len(letter.frame)
        try:
            receipt = await self._links.queue_to(self.peer).send(
                message,
                [letter.frame],
                group=self._links.group,
                urgency=Urgency.BULK,
                timeout_seconds=SEND_TIMEOUT_SECONDS,
            )
        except (PeerUnreachableError, DeadlineExceededError) as error:
            logger.debug("nothing can be sent to %s just now: %s", self.peer, error)
            self._put_back(letter)
            await asyncio.sleep(RETRY_SECONDS)
            return
        self._in_flight_bytes += size
        self._frame_bytes = max(self._frame_bytes, size)
        self._receipts.add(receipt)
        receipt.watch(lambda: self._settled(letter, size, receipt))

    def _settled(self, letter: Letter, size: int, receipt: SendReceipt) -> None:
        self._in_flight_bytes -= size
        self._receipts.discard(receipt)
        self._wake.set()
        if receipt.error is None:
            self._on_sent(letter)
        else:
            self._put_back(letter)

    def _put_back(self, letter: Letter) -> None:
        if not self._closed:
            (self._averages if letter.is_average else self._letters).append(letter)


async def close_lanes(lanes: Iterable[Lane]) -> None:
    """Close them all. A caller that is cancelled while it waits may go: all of them are about to end."""
    await tasks.end(*[lane._shut() for lane in lanes])
