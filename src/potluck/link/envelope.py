"""What goes around a message on a link: what it is for, and to which request or stream it belongs."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from potluck.errors import ConfigurationError, ProtocolError
from potluck.link.carrier import Buffer
from potluck.link.channel.packet import MAX_BODY_BYTES, Urgency
from potluck.link.channel.sendreceipt import SendReceipt
from potluck.messages import MAX_MESSAGE_BYTES, Message, decode, encode, kind_name

MAX_REASON_CHARACTERS = 200
MAX_SECONDS = 86400.0  # no asker waits for longer


class MessageRole(enum.IntEnum):
    """What a message is for."""

    MESSAGE = 0
    REQUEST = 1  # `seconds`: how long the asker waits
    REPLY = 2
    FAILURE = 3  # instead of a reply: `kind` is an error's name, `text` what it says
    OPEN = 4  # a stream begins; `number_of_bytes` may be sent to the side that opened it
    ITEM = 5  # frames of a stream
    CLOSE = 6  # no more items this way
    CANCEL = 7  # the stream ends both ways: `text` says why
    CREDIT = 8  # `number_of_bytes` in all may be sent the other way
    STOP = 9  # no more items are read: the other side need not send any


class Envelope(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Every body on a link. Later versions may add fields at the end."""

    role: MessageRole
    kind: str = ""  # the message's tag, with the group that it is for: see `route`
    number: int = 0  # of the request or stream, counted by who began it
    body: bytes = b""
    by_sender: bool = True  # streams: whether the sender of this envelope opened it
    number_of_bytes: int = 0
    seconds: float = 0.0
    text: str = ""


class Post(Protocol):
    """Puts an envelope into a peer's queue, waiting for room until the deadline."""

    def __call__(
        self, peer: str, envelope: Envelope, frames: Sequence[memoryview], *, urgency: Urgency, timeout_seconds: float
    ) -> Awaitable[SendReceipt]:
        """As `Links.send`."""
        ...


# Puts an envelope without frames into a peer's queue at once; nothing happens if the peer is gone.
Tell = Callable[[str, Envelope, Urgency], None]


def tag_of(kind: type[Message]) -> str:
    """The name of a kind of message on the wire."""
    config = getattr(kind, "__struct_config__", None)
    tag = getattr(config, "tag", None)
    if not isinstance(tag, str):
        raise ConfigurationError(
            f'{kind_name(kind)} has no tag, so a receiver could not tell what it is: declare it with tag="…"'
        )
    return tag


def route(kind: type[Message], group: str = "") -> str:
    """What stands for a kind of message of one group on the wire; no group: the run as a whole."""
    return f"{tag_of(kind)}@{group}" if group else tag_of(kind)


def encode_message(message: Message, group: str = "") -> tuple[str, bytes]:
    """The route and the bytes of a message; ConfigurationError when it is too large to be sent."""
    tag = route(type(message), group)
    try:
        body = encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"a {tag} cannot be encoded: {error}") from error
    if len(body) > MAX_MESSAGE_BYTES:
        raise ConfigurationError(
            f"a {tag} of {len(body)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}: send large data as frames"
        )
    return tag, body


def encode_envelope(envelope: Envelope) -> bytes:
    """As bytes."""
    return encode(envelope)


def decode_envelope(body: memoryview) -> Envelope:
    """What arrived, or ProtocolError."""
    envelope = decode(Envelope, body, limit_bytes=MAX_BODY_BYTES)
    if envelope.number < 0 or envelope.number_of_bytes < 0 or not 0.0 <= envelope.seconds <= MAX_SECONDS:
        raise ProtocolError("an envelope with a number that cannot be")
    return envelope


def as_views(frames: Iterable[Buffer]) -> list[memoryview]:
    """Frames as flat views of bytes, without copying; ConfigurationError for what is not one piece of memory."""
    views = []
    for frame in frames:
        try:
            view = memoryview(frame)
        except TypeError as error:
            raise ConfigurationError(f"a frame must be bytes, or a view of some, not {type(frame).__name__}") from error
        if not view.c_contiguous:
            raise ConfigurationError("a frame is not one piece of memory: pass a contiguous copy of it")
        views.append(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
    return views
