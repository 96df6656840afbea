"""The one thing that carriers move: a packet, as bytes.

    byte   0  magic, version, kind, flags                       one byte each
           4  generation of the channel                         u32
           8  tag of the sender's session, of the receiver's    u64 each
          24  sequence, next sequence expected (ack), credit    u64 each
          48  age of what is acknowledged, in microseconds      u32
          52  bytes that follow here, bytes of the payload      u32 each
          60  what follows: the start of a message, or the reason of a reset

A packet goes to a carrier in two pieces, so that nothing large is copied: this header, and at most one payload, which
is a slice of the caller's frame. The start of a message holds its body and its small frames in the header, and
announces the sizes of all frames:

    u32 body bytes, u16 frames, u64 per frame (bytes × 2 + 1 if it stands here), body, the small frames

Decoding is strict: any irregularity is a ProtocolError, and no memory is allocated for a stranger's claim.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.errors import ProtocolError
from potluck.messages import MAX_MESSAGE_BYTES

# One packet and its header must fit a hub's default largest payload (1 MiB), for the relay.
PACKET_BYTES = 512 * 1024
HUB_PAYLOAD_BYTES = 1024 * 1024
MAX_BODY_BYTES = MAX_MESSAGE_BYTES + 1024  # a message and the envelope around it
MAX_FRAMES = 1024
SMALL_FRAME_BYTES = 8 * 1024  # frames up to here travel in the header: copying them is cheaper than a packet each
SMALL_FRAMES_BYTES = 64 * 1024  # … while all of them together fit this
MAX_REASON_BYTES = 200

MAGIC = 0xB7
VERSION = 1
# What a packet costs in credit beside its bytes, so that tiny packets cannot fill memory with objects.
PACKET_OVERHEAD_BYTES = 256

_HEADER = struct.Struct("<BBBBIQQQQQIII")
_MANIFEST = struct.Struct("<IH")
HEADER_BYTES = _HEADER.size
MAX_INLINE_BYTES = _MANIFEST.size + 8 * MAX_FRAMES + MAX_BODY_BYTES + SMALL_FRAMES_BYTES
MAX_CHARGE_BYTES = MAX_INLINE_BYTES + PACKET_BYTES + PACKET_OVERHEAD_BYTES
MAX_GENERATION = 2**32 - 1

assert HEADER_BYTES + MAX_INLINE_BYTES + PACKET_BYTES <= HUB_PAYLOAD_BYTES - 4096


class Kind(enum.IntEnum):
    """What a packet is for. Only MESSAGE and FRAGMENT take up a sequence number."""

    MESSAGE = 1  # the start of a message
    FRAGMENT = 2  # more of the frames that were announced
    ACK = 3  # nothing but what every header says
    PROBE = 4  # is this path alive? `sequence` is a number to be echoed
    ECHO = 5  # the answer, on the same path
    RESET = 6  # the channel starts anew in this generation; the reason follows


class Urgency(enum.IntEnum):
    """What goes first when several messages wait, packet by packet."""

    FIRST = 0  # small messages, that somebody waits for
    BULK = 1  # what a round exchanges
    STREAM = 2  # states that are loaded: they have what rounds leave of the line, and never nothing (line.py)


ACK_NOW = 1  # flag: answer at once, the window is waiting for it
BULK = 2  # flag: the message's urgency …
STREAM = 16  # … is this one; with neither flag it is the first
LOADED = 4  # flag: much more is waiting behind this packet, so that the time until it arrives counts
GAP = 8  # flag: packets beyond `ack` have arrived, that one is missing
_ALL_FLAGS = ACK_NOW | BULK | STREAM | LOADED | GAP
_FLAG_BY_URGENCY = {Urgency.FIRST: 0, Urgency.BULK: BULK, Urgency.STREAM: STREAM}
_KINDS = frozenset(int(kind) for kind in Kind)
_EMPTY = memoryview(b"")


@dataclass(slots=True)
class Packet:
    """A packet that arrived; the views are the carrier's own buffers."""

    kind: int
    flags: int
    generation: int
    sender_tag: int
    receiver_tag: int
    sequence: int
    ack: int
    credit: int
    ack_age_seconds: float
    inline: memoryview
    payload: memoryview
    charge_bytes: int  # what this packet costs in credit


def urgency_flag(urgency: Urgency) -> int:
    """The flag that tells it."""
    return _FLAG_BY_URGENCY[urgency]


def urgency_of(flags: int) -> Urgency:
    """What the flags of a packet tell; both flags together are the less urgent one."""
    return Urgency.STREAM if flags & STREAM else Urgency.BULK if flags & BULK else Urgency.FIRST


def session_tag(peer: str, session: str) -> int:
    """The 64 bits by which packets of one life of a peer are told from those of another."""
    return int.from_bytes(hashlib.blake2b(f"{peer}\n{session}".encode(), digest_size=8).digest(), "little")


def encode_header(
    kind: int,
    flags: int,
    generation: int,
    sender_tag: int,
    receiver_tag: int,
    sequence: int,
    ack: int,
    credit: int,
    ack_age_seconds: float,
    inline: bytes,
    payload_bytes: int,
) -> bytes:
    """The header piece of a packet. Positional, since this is the hottest call of all."""
    fixed = _HEADER.pack(
        MAGIC,
        VERSION,
        kind,
        flags,
        generation,
        sender_tag,
        receiver_tag,
        sequence,
        ack,
        credit,
        min(int(ack_age_seconds * 1e6), 0xFFFFFFFF),
        len(inline),
        payload_bytes,
    )
    return fixed + inline if inline else fixed


def decode(header: memoryview, payload: memoryview | None) -> Packet:
    """The packet, or ProtocolError."""
    if len(header) < HEADER_BYTES:
        raise ProtocolError(f"a packet's header of {len(header)} bytes is cut off: it has at least {HEADER_BYTES}")
    (
        magic,
        version,
        kind,
        flags,
        generation,
        sender_tag,
        receiver_tag,
        sequence,
        ack,
        credit,
        ack_age_microseconds,
        inline_bytes,
        payload_bytes,
    ) = _HEADER.unpack_from(header)
    if magic != MAGIC:
        raise ProtocolError(f"a packet starts with {magic:#04x}, not {MAGIC:#04x}: it is not ours")
    if version != VERSION:
        raise ProtocolError(f"a packet of version {version}; we speak {VERSION}: update the older of the two peers")
    inline = header[HEADER_BYTES:]
    body = payload if payload is not None else _EMPTY
    if len(inline) != inline_bytes or len(body) != payload_bytes:
        raise ProtocolError(
            f"a packet announces {inline_bytes} + {payload_bytes} bytes and has {len(inline)} + {len(body)}"
        )
    if inline_bytes > MAX_INLINE_BYTES or payload_bytes > PACKET_BYTES:
        raise ProtocolError(f"a packet of {inline_bytes} + {payload_bytes} bytes exceeds the limit of one packet")
    if kind not in _KINDS or flags & ~_ALL_FLAGS or generation == 0:
        raise ProtocolError(f"a packet of unknown kind {kind}, flags {flags:#x} or generation {generation}")
    if kind == Kind.FRAGMENT:
        shape_is_right = payload_bytes > 0 and inline_bytes == 0
    elif kind == Kind.MESSAGE:
        shape_is_right = inline_bytes >= _MANIFEST.size
    elif kind == Kind.RESET:
        shape_is_right = payload_bytes == 0 and inline_bytes <= MAX_REASON_BYTES
    else:
        shape_is_right = payload_bytes == 0 and inline_bytes == 0
    if not shape_is_right:
        raise ProtocolError(f"a {Kind(kind).name} packet cannot have {inline_bytes} + {payload_bytes} bytes")
    return Packet(
        kind,
        flags,
        generation,
        sender_tag,
        receiver_tag,
        sequence,
        ack,
        credit,
        ack_age_microseconds / 1e6,
        inline,
        body,
        inline_bytes + payload_bytes + PACKET_OVERHEAD_BYTES,
    )


@dataclass(slots=True)
class MessageStart:
    """The start of a message: its body, the frames that came with it, and the sizes of those that follow."""

    body: memoryview
    frames: list[memoryview | None]  # None: follows as payload
    sizes: list[int]

    @property
    def total_bytes(self) -> int:
        """Body and all frames."""
        return len(self.body) + sum(self.sizes)


def encode_manifest(body: bytes, frames: Sequence[memoryview]) -> tuple[bytes, list[memoryview]]:
    """What stands in the header of a message's first packet, and the frames that must follow as payload."""
    entries: list[int] = []
    small: list[memoryview] = []
    large: list[memoryview] = []
    room = SMALL_FRAMES_BYTES
    for frame in frames:
        size = len(frame)
        if size <= SMALL_FRAME_BYTES and size <= room:
            room -= size
            small.append(frame)
            entries.append(size << 1 | 1)
        else:
            large.append(frame)
            entries.append(size << 1)
    start = _MANIFEST.pack(len(body), len(entries)) + struct.pack(f"<{len(entries)}Q", *entries)
    return b"".join((start, body, *small)), large


def decode_manifest(inline: memoryview) -> MessageStart:
    """The start of a message, or ProtocolError. Sizes of frames that follow are only claims until checked."""
    body_bytes, num_frames = _MANIFEST.unpack_from(inline)
    if num_frames > MAX_FRAMES or body_bytes > MAX_BODY_BYTES:
        raise ProtocolError(f"a message with {num_frames} frames and a body of {body_bytes} bytes exceeds the limits")
    table_end = _MANIFEST.size + 8 * num_frames
    if len(inline) < table_end + body_bytes:
        raise ProtocolError("a message's start is cut off")
    position = table_end + body_bytes
    body = inline[table_end:position]
    frames: list[memoryview | None] = []
    sizes: list[int] = []
    for entry in struct.unpack_from(f"<{num_frames}Q", inline, _MANIFEST.size):
        size = entry >> 1
        sizes.append(size)
        if entry & 1:
            frames.append(inline[position : position + size])
            position += size
        elif size == 0:
            raise ProtocolError("a message announces an empty frame that should follow")
        else:
            frames.append(None)
    if position != len(inline):
        raise ProtocolError(f"a message's start has {len(inline)} bytes where its sizes add up to {position}")
    return MessageStart(body, frames, sizes)
