"""How fast bytes go to another peer and come back.

A newcomer has sent nothing yet, so nothing is measured; a few megabytes each way make a first figure. Tests are of
bounded size, and each asker gets only so many, so that nobody can be kept busy with them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from potluck.clock import Clock
from potluck.errors import DeadlineExceededError, ProtocolError, RetryableError
from potluck.hub.ratelimit import RateLimit
from potluck.link.links import Incoming, Links
from potluck.messages import Message

MAX_TEST_BYTES = 8 * 1024 * 1024
FIRST_TEST_BYTES = 256 * 1024
ENOUGH_SECONDS = 0.5
STALL_SECONDS = 5.0  # a busy machine may stand still for so long, and its line is not slow: tried once more
TESTS_AT_ONCE = 24  # of one asker; measuring both ways takes up to 17
TESTS_PER_SECOND = 0.5


class SpeedTest(Message, frozen=True, kw_only=True, tag="speed.test"):
    """Here are some bytes; send this many back."""

    return_bytes: int


class SpeedTestAnswer(Message, frozen=True, kw_only=True, tag="speed.answer"):
    """And here are the ones asked for."""

    received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What a test found."""

    upload_bytes_per_second: float
    download_bytes_per_second: float


class SpeedTester:
    """Answers other peers' tests, and makes our own."""

    def __init__(self, links: Links, clock: Clock) -> None:
        self._links = links
        self._clock = clock
        self._share = RateLimit(burst=TESTS_AT_ONCE, per_second=TESTS_PER_SECOND, clock=clock)
        links.handle(SpeedTest, self._answer)

    async def measure(self, peer: str, *, timeout_seconds: float) -> Speeds:
        """Measure both ways, with more bytes until a test takes long enough to be believed."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ask(peer, 0, timeout_seconds, up=True)  # opens the link, whose time is not the line's
                upload = await self._one_way(peer, timeout_seconds, up=True)
                download = await self._one_way(peer, timeout_seconds, up=False)
        except TimeoutError as error:
            raise DeadlineExceededError(f"the speed test with {peer} took longer than {timeout_seconds:g} s") from error
        return Speeds(upload_bytes_per_second=upload, download_bytes_per_second=download)

    async def _one_way(self, peer: str, timeout_seconds: float, *, up: bool) -> float:
        size = FIRST_TEST_BYTES
        while True:
            seconds = await self._ask(peer, size, timeout_seconds, up=up)
            if ENOUGH_SECONDS <= seconds < STALL_SECONDS:
                seconds = min(seconds, await self._ask(peer, size, timeout_seconds, up=up))
            if seconds >= ENOUGH_SECONDS or size == MAX_TEST_BYTES:
                return size / seconds
            size = min(MAX_TEST_BYTES, size * 4)

    async def _ask(self, peer: str, size: int, timeout_seconds: float, *, up: bool) -> float:
        """How many seconds so many bytes take."""
        started = self._clock.monotonic()
        await self._links.request(
            peer,
            SpeedTest(return_bytes=0 if up else size),
            [bytes(size)] if up and size else [],
            reply=SpeedTestAnswer,
            timeout_seconds=timeout_seconds,
            bulk=True,
        )
        return max(self._clock.monotonic() - started, 1e-6)

    async def _answer(self, incoming: Incoming[SpeedTest]) -> tuple[SpeedTestAnswer, list[bytes]]:
        received = sum(map(len, incoming.frames))
        if not 0 <= incoming.message.return_bytes <= MAX_TEST_BYTES or received > MAX_TEST_BYTES:
            raise ProtocolError(f"a speed test moves at most {MAX_TEST_BYTES} bytes each way")
        if not self._share.take(incoming.sender):
            raise RetryableError("asked for too many speed tests: try again in a minute")
        return SpeedTestAnswer(received_bytes=received), [bytes(incoming.message.return_bytes)]
