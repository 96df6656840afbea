"""The messages to one peer, and the senders that wait for room in its queue: first come, first served.

A sender's message waits here with everything that belongs to it, so that nobody can slip in between the moment room
appears and the moment its sender runs again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from potluck.errors import ConfigurationError, DeadlineExceededError, PeerUnreachableError
from potluck.link.carrier import Buffer
from potluck.link.channel.outbox import message_bytes
from potluck.link.channel.packet import Urgency
from potluck.link.channel.sendreceipt import SendReceipt
from potluck.link.envelope import Envelope, MessageRole, as_views, encode_envelope, encode_message
from potluck.link.limits import LinkConfig
from potluck.messages import Message


class OutgoingQueue(Protocol):
    """A link as its senders see it."""

    @property
    def peer(self) -> str:
        """Whose it is."""
        ...

    @property
    def queued_bytes(self) -> int:
        """What waits or is on its way."""
        ...

    def send(self, body: bytes, frames: Sequence[memoryview] = (), *, urgency: Urgency = Urgency.FIRST) -> SendReceipt:
        """Queue a message."""
        ...


class _Waiter:
    __slots__ = ("body", "frames", "receipt", "urgency")

    def __init__(
        self, body: bytes, frames: Sequence[memoryview], urgency: Urgency, receipt: asyncio.Future[SendReceipt]
    ) -> None:
        self.body = body
        self.frames = frames
        self.urgency = urgency
        self.receipt = receipt


class SendQueue:
    """The senders to one peer."""

    def __init__(self, link: OutgoingQueue, config: LinkConfig) -> None:
        self._link = link
        self._config = config
        self._waiters: deque[_Waiter] = deque()
        self._last: dict[Urgency, SendReceipt] = {}

    async def send(
        self, message: Message, frames: Sequence[Buffer], *, group: str, urgency: Urgency, timeout_seconds: float
    ) -> SendReceipt:
        """Queue a message as soon as there is room."""
        tag, body = encode_message(message, group)
        envelope = Envelope(role=MessageRole.MESSAGE, kind=tag, body=body)
        return await self.post(envelope, as_views(frames), urgency, timeout_seconds)

    async def post(
        self, envelope: Envelope, frames: Sequence[memoryview], urgency: Urgency, timeout_seconds: float
    ) -> SendReceipt:
        """Queue an envelope as soon as there is room; ConfigurationError when it is larger than links allow."""
        body = encode_envelope(envelope)
        self._check_size(body, frames)
        return await self.wait(body, frames, urgency, timeout_seconds)

    def _check_size(self, body: bytes, frames: Sequence[memoryview]) -> None:
        config = self._config
        if len(frames) > config.max_frames:
            raise ConfigurationError(
                f"{len(frames)} frames in a message exceed {config.max_frames}: join or split them"
            )
        largest = max(map(len, frames), default=0)
        total = len(body) + sum(map(len, frames))
        if largest > config.max_frame_bytes or total > config.max_message_bytes:
            raise ConfigurationError(
                f"a message of {total} bytes, its largest frame {largest}, exceeds the limits of "
                f"{config.max_message_bytes} and {config.max_frame_bytes}: split it, or use a stream"
            )

    def put(self, body: bytes, frames: Sequence[memoryview], urgency: Urgency) -> SendReceipt:
        """Queue a message at once, room or not."""
        receipt = self._last[urgency] = self._link.send(body, frames, urgency=urgency)
        return receipt

    def _has_room(self, body: bytes, frames: Sequence[memoryview]) -> bool:
        queued = self._link.queued_bytes
        return not queued or queued + message_bytes(body, frames) <= self._config.queue_bytes

    async def wait(
        self, body: bytes, frames: Sequence[memoryview], urgency: Urgency, timeout_seconds: float
    ) -> SendReceipt:
        """Queue a message as soon as there is room; DeadlineExceededError when there was none in time."""
        if not self._waiters and self._has_room(body, frames):
            return self.put(body, frames, urgency)
        waiter = _Waiter(body, frames, urgency, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            # Unlike asyncio.timeout this leaves no doubt whether the message was queued.
            await asyncio.wait([waiter.receipt], timeout=timeout_seconds)
        finally:
            if not waiter.receipt.done():
                self._waiters.remove(waiter)
                waiter.receipt.cancel()
                self.admit()
        if waiter.receipt.cancelled():
            raise DeadlineExceededError(
                f"the queue to peer {self._link.peer} had no room for {timeout_seconds:g} s: it takes data too slowly"
            )
        return waiter.receipt.result()

    def admit(self) -> None:
        """Queue the messages of those who wait, as far as there is room."""
        while self._waiters and self._has_room(self._waiters[0].body, self._waiters[0].frames):
            waiter = self._waiters.popleft()
            waiter.receipt.set_result(self.put(waiter.body, waiter.frames, waiter.urgency))

    def fail(self, error: PeerUnreachableError) -> None:
        """The peer is gone: nobody needs to wait any more."""
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            waiter.receipt.set_exception(error)

    async def flush(self, timeout_seconds: float) -> None:
        """Wait until all that was queued so far has arrived; PeerUnreachableError if something of it was lost."""
        last, self._last = self._last, {}
        try:
            async with asyncio.timeout(timeout_seconds):
                for receipt in last.values():
                    await receipt.wait(timeout_seconds=timeout_seconds)
        except TimeoutError as error:
            for urgency, receipt in last.items():
                self._last.setdefault(urgency, receipt)
            raise DeadlineExceededError(
                f"peer {self._link.peer} has not acknowledged everything within {timeout_seconds:g} s"
            ) from error
