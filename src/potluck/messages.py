"""Typed messages at the boundary: what comes from the network is hostile until decoded here.

Every message on the wire is a msgspec Struct in msgpack. `decode` checks the size before it looks at a byte,
then the types; whatever is wrong surfaces as one error, ProtocolError. Structs are tagged by their kind and may
gain fields with defaults; PROTOCOL_VERSION changes when an old peer could misread a new one.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from potluck.errors import ProtocolError

PROTOCOL_VERSION = 2  # 1: cards were not signed, relayed packets not sealed
MAX_MESSAGE_BYTES = 256 * 1024  # a control message; tensors travel as raw frames beside it


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages: immutable, built by keyword."""


M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(message: Any) -> bytes:
    """One message as msgpack bytes."""
    return _encoder.encode(message)


def decode(kind: type[M], data: bytes | bytearray | memoryview, *, limit_bytes: int = MAX_MESSAGE_BYTES) -> M:
    """The message in `data`, or ProtocolError when it is too large or is not a valid `kind`."""
    if len(data) > limit_bytes:
        raise ProtocolError(f"a {kind_name(kind)} of {len(data)} bytes exceeds the limit of {limit_bytes}: dropped")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        message: M = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a valid {kind_name(kind)}: {error}") from error
    return message


def kind_name(kind: Any) -> str:
    """How a message type is called in errors and statistics."""
    return getattr(kind, "__name__", str(kind))
