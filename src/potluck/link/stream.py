"""One stream: many items one after the other, both ways, each way with its own credit.

Each side sends items (lists of frames) until it closes its way; the other side's iteration then ends. `cancel` ends
both ways at once and tells the other side why.

An item that arrives moves from the channel's memory to the stream's, which was set aside when the stream began. Its
credit goes back as the reader takes items, so that a reader who stops stops its own sender and nobody else. Items are
the least urgent of all messages (Urgency.STREAM): they never hold up others for longer than a packet takes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType

from potluck.errors import ConfigurationError, DeadlineExceededError, PeerError, ProtocolError
from potluck.link.carrier import Buffer
from potluck.link.channel.packet import Urgency
from potluck.link.channel.sendreceipt import SendReceipt
from potluck.link.envelope import MAX_REASON_CHARACTERS, Envelope, MessageRole, Post, Tell, as_views
from potluck.link.limits import STREAM_ITEM_BYTES, LinkConfig
from potluck.messages import Message

ITEM_OVERHEAD_BYTES = 256


def item_bytes(frames: Sequence[memoryview]) -> int:
    """What an item costs in credit."""
    return ITEM_OVERHEAD_BYTES + sum(map(len, frames))


class Stream:
    """One stream, seen from one side. `message` and `frames` are what it was opened with."""

    def __init__(
        self,
        peer: str,
        number: int,
        *,
        opened_here: bool,
        message: Message,
        frames: list[memoryview],
        send_limit_bytes: int,
        config: LinkConfig,
        post: Post,
        tell: Tell,
        still_seconds: Callable[[str], float],
        ended: Callable[[Stream], None],
    ) -> None:
        """`still_seconds` tells for how long nothing of streams with a peer has moved, either way."""
        self.peer = peer
        self.number = number
        self.opened_here = opened_here
        self.message = message
        self.frames = frames
        self._idle_seconds = config.stream_idle_seconds
        self._window_bytes = config.stream_window_bytes
        self._post = post
        self._tell_peer = tell
        self._still_seconds = still_seconds
        self._ended: Callable[[Stream], None] | None = ended
        self._items: deque[list[memoryview]] = deque()
        self._changed = asyncio.Event()  # something happened that a waiting reader or sender may want to know
        self._sending = asyncio.Lock()
        self._send_limit_bytes = send_limit_bytes
        self._sent_bytes = 0
        self._granted_bytes = config.stream_window_bytes
        self._received_bytes = 0
        self._taken_bytes = 0
        self._closed_here = False  # no more items will be sent
        self._closed_there = False  # no more items will come, or be wanted
        self._error: PeerError | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be sent or come."""
        return self._error is not None or (self._closed_here and self._closed_there)

    async def send(self, frames: Sequence[Buffer], *, timeout_seconds: float) -> SendReceipt:
        """Send one item, once the reader has room for it. The frames stay unchanged until the receipt is settled.

        DeadlineExceededError when nothing has moved for so long, and there is no room.
        """
        views = as_views(frames)
        cost = item_bytes(views)
        if cost > STREAM_ITEM_BYTES:
            raise ConfigurationError(f"an item of {cost} bytes exceeds {STREAM_ITEM_BYTES}: send it in smaller ones")
        async with self._sending:
            while self._is_sendable() and self._sent_bytes + cost > self._send_limit_bytes:
                await self._wait_for_change(timeout_seconds, "its reader took nothing")
            envelope = self._envelope(MessageRole.ITEM)
            try:
                receipt = await self._post(
                    self.peer, envelope, views, urgency=Urgency.STREAM, timeout_seconds=timeout_seconds
                )
            except asyncio.CancelledError:
                await self.cancel("its sender was interrupted")  # nobody knows whether the item is queued
                raise
            self._sent_bytes += cost
            return receipt

    def _is_sendable(self) -> bool:
        if self._error is not None:
            raise self._error
        if self._closed_here:
            raise ConfigurationError(f"the stream to {self.peer} is closed this way: nothing more can be sent")
        return True

    async def close(self) -> None:
        """Say that no more items come this way; the other way stays open. Idempotent."""
        async with self._sending:  # behind an item that is being sent
            if not self._closed_here and self._error is None:
                self._closed_here = True
                self._tell(MessageRole.CLOSE)
        self._end_if_done()

    async def finish(self) -> None:
        """Close this way, and read no more: the other side need not send the rest."""
        await self.close()
        if not self._closed_there and self._error is None:
            self._closed_there = True
            self._tell(MessageRole.STOP)
        self._items.clear()
        self._end_if_done()

    async def cancel(self, reason: str) -> None:
        """End both ways now; the other side's next use of the stream raises PeerError with the reason."""
        if not self.is_over:
            self.fail(PeerError(f"the stream with {self.peer} was cancelled here: {reason}"))
            self._tell(MessageRole.CANCEL, text=reason[:MAX_REASON_CHARACTERS])

    async def receive(self, *, timeout_seconds: float | None = None) -> list[memoryview] | None:
        """The next item; None when the other side has closed its way.

        DeadlineExceededError when nothing has moved for so long: on a slow line an item takes as long as it takes.
        """
        seconds = self._idle_seconds if timeout_seconds is None else timeout_seconds
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._closed_there:
                return None
            await self._wait_for_change(seconds, "it brought nothing")
        frames = self._items.popleft()
        self._taken_bytes += item_bytes(frames)
        limit = self._taken_bytes + self._window_bytes
        # Credit is told in large steps, and not any more when nothing more will come.
        if limit - self._granted_bytes >= self._window_bytes // 4 and not self._closed_there:
            self._granted_bytes = limit
            self._tell(MessageRole.CREDIT, number_of_bytes=limit)
        self._end_if_done()
        return frames

    async def __aiter__(self) -> AsyncIterator[list[memoryview]]:
        while (frames := await self.receive()) is not None:
            yield frames

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.finish()
        else:
            await self.cancel("the other side gave up")

    def take(self, envelope: Envelope, frames: list[memoryview]) -> None:
        """Something of this stream has come. ProtocolError when its sender ignored its credit."""
        if envelope.role == MessageRole.ITEM:
            self._take_item(frames)
        elif envelope.role == MessageRole.CLOSE:
            self._closed_there = True
        elif envelope.role == MessageRole.STOP:
            self._closed_here = True
        elif envelope.role == MessageRole.CREDIT:
            self._send_limit_bytes = max(self._send_limit_bytes, envelope.number_of_bytes)
        else:
            reason = envelope.text[:MAX_REASON_CHARACTERS]
            self.fail(PeerError(f"peer {self.peer} cancelled the stream: {reason}"))
        self._changed.set()
        self._end_if_done()

    def _take_item(self, frames: list[memoryview]) -> None:
        self._received_bytes += item_bytes(frames)
        if self._received_bytes > self._granted_bytes:
            raise ProtocolError(f"peer {self.peer} sent more on a stream than it had credit for")
        if not self._closed_there:
            self._items.append(frames)

    def fail(self, error: PeerError) -> None:
        """The stream is over: the peer is gone, or broke a rule."""
        if not self.is_over:
            self._error = error
            self._items.clear()
            self._changed.set()
            self._end_if_done()

    def _end_if_done(self) -> None:
        # Items that are still to be read keep the stream's memory.
        if self.is_over and not self._items and self._ended is not None:
            ended, self._ended = self._ended, None
            ended(self)

    async def _wait_for_change(self, seconds: float, trouble: str) -> None:
        self._changed.clear()
        left = seconds
        while True:
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                left = seconds - self._still_seconds(self.peer)
                if left <= 0:
                    raise DeadlineExceededError(
                        f"nothing moved on the stream with {self.peer} for {seconds:g} s: {trouble}"
                    ) from None
            else:
                return

    def _tell(self, role: MessageRole, *, number_of_bytes: int = 0, text: str = "") -> None:
        # What is about this side's items stays behind them, with the items' urgency.
        urgency = Urgency.FIRST if role in (MessageRole.CREDIT, MessageRole.STOP) else Urgency.STREAM
        self._tell_peer(self.peer, self._envelope(role, number_of_bytes=number_of_bytes, text=text), urgency)

    def _envelope(self, role: MessageRole, *, number_of_bytes: int = 0, text: str = "") -> Envelope:
        return Envelope(
            role=role, number=self.number, by_sender=self.opened_here, number_of_bytes=number_of_bytes, text=text
        )
