"""What two relays say to each other through the hub, as bytes (pure).

    byte   0  magic, version, kind, flags                       one byte each
           4  sender's number of this path, receiver's          u32 each; 0: not known yet
          12  DATA: bytes of the link packet's header           u32
          16  the packet's number among those of its sender     u64
          24  HELLO: limit of bytes (u64), then its proof (greeting.py)
              DATA: the link packet's header, then its payload, sealed (sealing.py)
              others: bytes sent, limit of bytes (u64 each), a number (u32), sealed

Who sent it is not in here: it is the last token of the subject, which the hub checks. The hub itself is not believed:
from the greeting on, only what the peer sealed is taken for the peer's.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from potluck.errors import ProtocolError

MAGIC = 0xA7
VERSION = 2
# What a packet counts for beside its bytes: the hub's own line about it, and the objects that it becomes.
PACKET_OVERHEAD_BYTES = 256

_PREFIX = struct.Struct("<BBBBIIIQ")
_CONTROL = struct.Struct("<QQI")
_LIMIT = struct.Struct("<Q")
PREFIX_BYTES = _PREFIX.size
MAX_PROOF_BYTES = 64


class RelayKind(enum.IntEnum):
    """What a relay packet is for."""

    HELLO = 1  # this is my number of the path; `limit_bytes` is what may be sent at first
    DATA = 2  # a link packet
    CREDIT = 3  # bytes up to `limit_bytes` may be sent, counted from the beginning of the path; `number` counts credits
    WANT = 4  # a packet that counts for `number` bytes waits for credit
    YIELD = 5  # the sender gives back what it does not use: its limit after credit `number` is now `limit_bytes`


PLEASE_ANSWER = 1  # flag of HELLO
HAS_PAYLOAD = 2  # flag of DATA
IS_JOINED = 4  # flag of DATA: header and payload were sealed together
_FLAGS = {RelayKind.HELLO: PLEASE_ANSWER, RelayKind.DATA: HAS_PAYLOAD | IS_JOINED}
_KINDS = {int(kind): kind for kind in RelayKind}


class RelayPacket(NamedTuple):
    """A relay packet that arrived; the body is a view of the wire's, and sealed but for a HELLO's."""

    kind: RelayKind
    flags: int
    sender_epoch: int
    receiver_epoch: int
    header_bytes: int
    number: int
    prefix: bytes
    body: memoryview


class Control(NamedTuple):
    """What is not a link packet."""

    sent_bytes: int = 0
    limit_bytes: int = 0
    number: int = 0

    def pack(self) -> bytes:
        """As it is sealed."""
        return _CONTROL.pack(*self)

    @classmethod
    def parse(cls, data: bytes) -> Control:
        """Read it; ProtocolError when it is something else."""
        if len(data) != _CONTROL.size:
            raise ProtocolError("a relay packet whose sizes do not add up")
        return cls(*_CONTROL.unpack(data))


def encode_prefix(
    kind: RelayKind, sender_epoch: int, receiver_epoch: int, number: int, *, flags: int = 0, header_bytes: int = 0
) -> bytes:
    """What stands before every packet."""
    return _PREFIX.pack(MAGIC, VERSION, kind, flags, sender_epoch, receiver_epoch, header_bytes, number)


def encode_hello(prefix: bytes, limit_bytes: int, proof: bytes) -> bytes:
    """A greeting."""
    return prefix + _LIMIT.pack(limit_bytes) + proof


def read_hello(body: memoryview) -> tuple[int, bytes]:
    """A greeting's limit and proof."""
    return _LIMIT.unpack_from(body)[0], bytes(body[_LIMIT.size :])


def decode(data: memoryview) -> RelayPacket:
    """The packet in `data`, or ProtocolError."""
    if len(data) < PREFIX_BYTES:
        raise ProtocolError(f"a relay packet of {len(data)} bytes is cut off")
    magic, version, kind_number, flags, sender_epoch, receiver_epoch, header_bytes, number = _PREFIX.unpack_from(data)
    kind = _KINDS.get(kind_number)
    if magic != MAGIC or version != VERSION or kind is None or flags & ~_FLAGS.get(kind, 0):
        raise ProtocolError("not a relay packet of this version")
    if sender_epoch == 0:
        raise ProtocolError("a relay packet without its sender's number of the path")
    body = data[PREFIX_BYTES:]
    if kind is RelayKind.HELLO and not 0 <= len(body) - _LIMIT.size <= MAX_PROOF_BYTES:
        raise ProtocolError("a greeting whose sizes do not add up")
    return RelayPacket(
        kind, flags, sender_epoch, receiver_epoch, header_bytes, number, bytes(data[:PREFIX_BYTES]), body
    )
