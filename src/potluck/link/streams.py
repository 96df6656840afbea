"""The streams of this process: opening, accepting, finding the one that an envelope belongs to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from potluck.errors import ConfigurationError, PeerError, PeerUnreachableError, ProtocolError, RetryableError
from potluck.link.carrier import Buffer
from potluck.link.channel.budget import ReceiveBudget
from potluck.link.channel.packet import Urgency
from potluck.link.dispatch import Arrived
from potluck.link.envelope import Envelope, MessageRole, Post, Tell, as_views, encode_message, route
from potluck.link.limits import STREAM_ITEM_BYTES, LinkConfig
from potluck.link.stream import Stream
from potluck.messages import Message, decode
from potluck.tasks import end

logger = logging.getLogger(__name__)

StreamHandler = Callable[[Stream], Awaitable[None]]
Key = tuple[str, bool, int]  # peer, opened here, number


class Streams:
    """All streams that are open."""

    def __init__(
        self,
        config: LinkConfig,
        budget: ReceiveBudget,
        post: Post,
        tell: Tell,
        still_seconds: Callable[[str], float],
    ) -> None:
        """`still_seconds` tells for how long nothing of streams with a peer has moved, either way."""
        self._config = config
        self._still_seconds = still_seconds
        self._budget = budget
        self._post = post
        self._tell = tell
        self._handlers: dict[str, tuple[type[Message], StreamHandler]] = {}
        self._streams: dict[Key, Stream] = {}
        self._next_number = 1
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._streams)

    def register(self, kind: type[Message], handler: StreamHandler, group: str = "") -> None:
        """Have streams that open with a message of that kind and group handled so."""
        tag = route(kind, group)
        if tag in self._handlers:
            raise ConfigurationError(f"streams of kind {tag} have a handler already: give the new kind another tag")
        self._handlers[tag] = (kind, handler)

    def unregister(self, kind: type[Message], group: str = "") -> None:
        """Accept no more streams of that kind and group; those that are open go on."""
        self._handlers.pop(route(kind, group), None)

    async def open(
        self, peer: str, message: Message, frames: Sequence[Buffer], *, timeout_seconds: float, group: str = ""
    ) -> Stream:
        """Begin a stream; the other side's handler gets it when the message arrives."""
        tag, body = encode_message(message, group)
        views = as_views(frames)
        number, self._next_number = self._next_number, self._next_number + 1
        stream = self._add(peer, number, True, message, views, STREAM_ITEM_BYTES)
        if stream is None:
            raise RetryableError(f"too many streams are open with {peer}, or too much memory is in use: close some")
        envelope = Envelope(
            role=MessageRole.OPEN, kind=tag, number=number, body=body, number_of_bytes=self._config.stream_window_bytes
        )
        try:
            await self._post(peer, envelope, views, urgency=Urgency.STREAM, timeout_seconds=timeout_seconds)
        except BaseException:
            stream.fail(PeerError("the stream could not be opened"))
            raise
        return stream

    def _add(
        self,
        peer: str,
        number: int,
        opened_here: bool,
        message: Message,
        frames: list[memoryview],
        send_limit_bytes: int,
    ) -> Stream | None:
        num_open = sum(key[0] == peer for key in self._streams) + 1
        window = self._config.stream_window_bytes
        if num_open > self._config.max_streams or num_open * window > max(self._budget.peer_bytes, window):
            return None
        if not self._budget.try_reserve(window):
            return None
        stream = Stream(
            peer,
            number,
            opened_here=opened_here,
            message=message,
            frames=frames,
            send_limit_bytes=send_limit_bytes,
            config=self._config,
            post=self._post,
            tell=self._tell,
            still_seconds=self._still_seconds,
            ended=self._remove,
        )
        self._streams[peer, opened_here, number] = stream
        return stream

    def _remove(self, stream: Stream) -> None:
        del self._streams[stream.peer, stream.opened_here, stream.number]
        self._budget.release(self._config.stream_window_bytes)

    def take(self, arrived: Arrived) -> None:
        """Something of a stream has come; it moves into the stream's memory, so its channel's credit goes back."""
        arrived.release()
        envelope = arrived.envelope
        if envelope.role == MessageRole.OPEN:
            self._accept(arrived)
            return
        stream = self._streams.get((arrived.sender, not envelope.by_sender, envelope.number))
        if stream is None:
            return  # it is over on this side, and the other did not know yet
        try:
            stream.take(envelope, arrived.frames)
        except ProtocolError as error:
            arrived.counters.refused += 1
            stream.fail(error)
            self._cancel(arrived, "more was sent than there was credit for")

    def _accept(self, arrived: Arrived) -> None:
        envelope = arrived.envelope
        kind, handler = self._handlers.get(envelope.kind, (None, None))
        if kind is None or handler is None:
            arrived.counters.unknown_kinds += 1
            self._cancel(arrived, "nobody handles streams of this kind here")
            return
        try:
            message = decode(kind, envelope.body)
        except ProtocolError:
            arrived.counters.malformed += 1
            self._cancel(arrived, "its first message does not decode")
            return
        if (arrived.sender, False, envelope.number) in self._streams:
            arrived.counters.malformed += 1
            return
        limit = max(envelope.number_of_bytes, STREAM_ITEM_BYTES)
        stream = self._add(arrived.sender, envelope.number, False, message, arrived.frames, limit)
        if stream is None:
            arrived.counters.refused += 1
            self._cancel(arrived, "too many streams are open")
            return
        window = self._config.stream_window_bytes
        credit = Envelope(role=MessageRole.CREDIT, number=envelope.number, by_sender=False, number_of_bytes=window)
        self._tell(arrived.sender, credit, Urgency.FIRST)
        task = asyncio.ensure_future(self._run(handler, stream, arrived))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, handler: StreamHandler, stream: Stream, arrived: Arrived) -> None:
        try:
            await handler(stream)
            await stream.finish()
        except PeerUnreachableError:
            logger.info("the stream of %s with %s ended: the peer is gone", arrived.envelope.kind, stream.peer)
        except Exception:  # the handler is the application's: its errors must not stop the link
            arrived.counters.handler_errors += 1
            logger.exception("the stream handler of %s from %s failed", arrived.envelope.kind, stream.peer)
        finally:
            await stream.cancel("its handler failed")  # does nothing if it has finished

    def _cancel(self, arrived: Arrived, reason: str) -> None:
        envelope = arrived.envelope
        answer = Envelope(
            role=MessageRole.CANCEL, number=envelope.number, by_sender=not envelope.by_sender, text=reason
        )
        self._tell(arrived.sender, answer, Urgency.STREAM)

    def fail(self, peer: str, error: PeerUnreachableError) -> None:
        """The peer's channel is gone, and its streams with it."""
        for stream in [stream for key, stream in self._streams.items() if key[0] == peer]:
            stream.fail(error)

    async def close(self) -> None:
        """End all handlers and streams."""
        await end(*self._tasks)
        for stream in list(self._streams.values()):
            stream.fail(PeerUnreachableError("the links of this process are closed"))
