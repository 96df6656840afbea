"""What two relays say to each other through the hub, as bytes (pure).

    byte   0  magic, version, kind, flags                       one byte each
           4  sender's number of this path, receiver's          u32 each; 0: not known yet
          12  DATA: bytes of the link packet's header           u32
          16  DATA: the link packet's header, then its payload
              others: bytes sent, limit of bytes (u64 each), a number (u32)

Who sent it is not in here: it is the last token of the subject, which the hub checks.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from potluck.errors import ProtocolError

MAGIC = 0xA7
VERSION = 1
# What a packet counts for beside its bytes: the hub's own line about it, and the objects that it becomes.
PACKET_OVERHEAD_BYTES = 256

_PREFIX = struct.Struct("<BBBBIII")
_CONTROL = struct.Struct("<QQI")
PREFIX_BYTES = _PREFIX.size


class RelayKind(enum.IntEnum):
    """What a relay packet is for."""

    HELLO = 1  # this is my number of the path; `limit_bytes` is what may be sent at first
    DATA = 2  # a link packet
    CREDIT = 3  # bytes up to `limit_bytes` may be sent, counted from the beginning of the path; `number` counts credits
    WANT = 4  # a packet that counts for `number` bytes waits for credit
    YIELD = 5  # the sender gives back what it does not use: its limit after credit `number` is now `limit_bytes`


PLEASE_ANSWER = 1  # flag of HELLO
HAS_PAYLOAD = 2  # flag of DATA
_FLAGS = {RelayKind.HELLO: PLEASE_ANSWER, RelayKind.DATA: HAS_PAYLOAD}
_KINDS = {int(kind): kind for kind in RelayKind}


@dataclass(slots=True)
class RelayPacket:
    """A relay packet that arrived; the views are those of the wire."""

    kind: RelayKind
    flags: int
    sender_epoch: int
    receiver_epoch: int
    header: memoryview | None = None  # DATA
    payload: memoryview | None = None
    sent_bytes: int = 0  # the others
    limit_bytes: int = 0
    number: int = 0


def encode_prefix(sender_epoch: int, receiver_epoch: int, header_bytes: int, *, has_payload: bool) -> bytes:
    """What stands before a link packet."""
    flags = HAS_PAYLOAD if has_payload else 0
    return _PREFIX.pack(MAGIC, VERSION, RelayKind.DATA, flags, sender_epoch, receiver_epoch, header_bytes)


def encode_control(
    kind: RelayKind,
    sender_epoch: int,
    receiver_epoch: int,
    *,
    flags: int = 0,
    sent_bytes: int = 0,
    limit_bytes: int = 0,
    number: int = 0,
) -> bytes:
    """Everything that is not a link packet."""
    prefix = _PREFIX.pack(MAGIC, VERSION, kind, flags, sender_epoch, receiver_epoch, 0)
    return prefix + _CONTROL.pack(sent_bytes, limit_bytes, number)


def decode(data: memoryview) -> RelayPacket:
    """The packet in `data`, or ProtocolError."""
    if len(data) < PREFIX_BYTES:
        raise ProtocolError(f"a relay packet of {len(data)} bytes is cut off")
    magic, version, kind_number, flags, sender_epoch, receiver_epoch, header_bytes = _PREFIX.unpack_from(data)
    kind = _KINDS.get(kind_number)
    if magic != MAGIC or version != VERSION or kind is None or flags & ~_FLAGS.get(kind, 0):
        raise ProtocolError("not a relay packet of this version")
    if sender_epoch == 0:
        raise ProtocolError("a relay packet without its sender's number of the path")
    if kind is RelayKind.DATA:
        end = PREFIX_BYTES + header_bytes
        if end > len(data) or (not flags & HAS_PAYLOAD and end != len(data)):
            raise ProtocolError("a relay packet whose sizes do not add up")
        payload = data[end:] if flags & HAS_PAYLOAD else None
        return RelayPacket(kind, flags, sender_epoch, receiver_epoch, data[PREFIX_BYTES:end], payload)
    if len(data) != PREFIX_BYTES + _CONTROL.size or header_bytes:
        raise ProtocolError("a relay packet whose sizes do not add up")
    sent_bytes, limit_bytes, number = _CONTROL.unpack_from(data, PREFIX_BYTES)
    return RelayPacket(kind, flags, sender_epoch, receiver_epoch, None, None, sent_bytes, limit_bytes, number)
