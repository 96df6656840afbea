"""What becomes of a packet on its way through one connection: sealed, or as it is.

A packet is a frame (a mark and a header) and at most one payload. Sealed, each of the two is encrypted and
authenticated by AES-256-GCM under the key of its direction. The number of a part among all parts of its direction is
its nonce and is never sent: TCP keeps the order, so a part that was lost, repeated, changed or moved does not open, and
nothing behind it would. Whether a part stands alone or is one of two is authenticated along with it.

A sealed part has to be sent, as it is and before any other: sealing it again would give one nonce to two parts.

What is large is touched once. It is sealed into a buffer that ZeroMQ sends from and opened in the buffer that ZeroMQ
has received it in. Fresh memory of this size costs half as much again as sealing does, page by page, so buffers are
used again once ZeroMQ has let go of them.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Protocol

import numpy
import zmq
from cryptography.exceptions import InvalidTag

from potluck.errors import ProtocolError
from potluck.link.direct.loopsocket import Outgoing, Parts
from potluck.link.direct.noise import TAG_BYTES, Cipher

# ZeroMQ reads small parts into one buffer of 8 KiB that lives until the last of them is gone: whoever keeps one keeps
# all. So parts of up to that size are copied out; larger ones have memory of their own.
SHARED_BUFFER_BYTES = 8192
LARGE_BYTES = 64 * 1024  # from here on a buffer of our own is worth its trouble
OF_TWO = b"\x02"  # authenticated with each part of a packet that has two

Opened = tuple[memoryview, memoryview | None]
_EMPTY = memoryview(b"")


class Wrapping(Protocol):
    """One connection's way of wrapping packets."""

    def wrap(self, frame: bytes, payload: memoryview | None) -> list[Outgoing]:
        """The parts to be sent, before those of any later packet."""
        ...

    def unwrap(self, parts: Parts, surplus_parts: int) -> Opened:
        """The packet in a message, its bytes kept alive by nothing else. ProtocolError: the connection must end."""
        ...


class Clear:
    """Packets as they are, for a trusted LAN."""

    def wrap(self, frame: bytes, payload: memoryview | None) -> list[Outgoing]:
        """The packet itself."""
        return [frame] if payload is None else [frame, payload]

    def unwrap(self, parts: Parts, surplus_parts: int) -> Opened:
        """The packet itself; an empty frame, which is no packet, for a message of too many parts."""
        if surplus_parts or not parts:
            return _EMPTY, None
        return _unpinned(parts[0]), _unpinned(parts[1]) if len(parts) == 2 else None


class Sealed:
    """Packets that only the other end can read and nobody can change."""

    __slots__ = ("_incoming", "_outgoing", "_slabs")

    def __init__(self, outgoing: Cipher, incoming: Cipher, slabs: Slabs) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._slabs = slabs

    def wrap(self, frame: bytes, payload: memoryview | None) -> list[Outgoing]:
        """The packet, sealed with the next numbers."""
        cipher = self._outgoing
        if payload is None:
            return [cipher.seal(frame)]
        sealed_frame = cipher.seal(frame, OF_TWO)
        if len(payload) < LARGE_BYTES:
            return [sealed_frame, cipher.seal(payload, OF_TWO)]
        sealed = self._slabs.take(len(payload) + TAG_BYTES)
        cipher.aead.encrypt_into(cipher.nonce(), payload, OF_TWO, sealed)
        return [sealed_frame, sealed]

    def unwrap(self, parts: Parts, surplus_parts: int) -> Opened:
        """The packet, if it is the next one that the other end has sealed."""
        if surplus_parts or not parts:
            raise ProtocolError(f"a message of {len(parts) + surplus_parts} parts: nobody seals such")
        if len(parts) == 1:
            return self._open(parts[0], None), None
        return self._open(parts[0], OF_TWO), self._open(parts[1], OF_TWO)

    def _open(self, part: zmq.Frame, associated: bytes | None) -> memoryview:
        cipher = self._incoming
        if len(part) <= SHARED_BUFFER_BYTES:
            return memoryview(cipher.open(part.buffer, associated))
        sealed = part.buffer
        opened = sealed[:-TAG_BYTES]
        try:
            # In its own place, as OpenSSL allows. Where the tag is wrong, what stands there is thrown away unread.
            cipher.aead.decrypt_into(cipher.nonce(), sealed, associated, opened)
        except InvalidTag:
            raise ProtocolError("a part does not open: it was changed, or is not the next one") from None
        return opened


class Slabs:
    """Buffers for sealed payloads, used again and again."""

    def __init__(self, *, slab_bytes: int, most_kept: int) -> None:
        """So many of this size are kept when not in use."""
        self._slab_bytes = slab_bytes
        self._most_kept = most_kept
        self._free: list[memoryview] = []
        self._in_use: dict[int, weakref.ref[memoryview]] = {}
        self._last_number = 0

    def take(self, size_bytes: int) -> memoryview:
        """A buffer of this size. It may be used again once nobody has the view any more."""
        if size_bytes > self._slab_bytes:
            return numpy.empty(size_bytes, numpy.uint8).data
        try:
            slab = self._free.pop()
        except IndexError:
            slab = numpy.empty(self._slab_bytes, numpy.uint8).data
        view = slab[:size_bytes]
        self._last_number += 1
        # pyzmq's collector thread lets go of the view, and so runs the callback, at any time. Each step of it is one
        # that no other thread can come in between; a lock could be asked for by the thread that holds it.
        self._in_use[self._last_number] = weakref.ref(view, partial(self._give_back, self._last_number, slab))
        return view

    def _give_back(self, number: int, slab: memoryview, _: object) -> None:
        del self._in_use[number]
        if len(self._free) < self._most_kept:
            self._free.append(slab)


def _unpinned(part: zmq.Frame) -> memoryview:
    """The bytes of a part, such that keeping them keeps nothing else alive."""
    return memoryview(part.bytes) if len(part) <= SHARED_BUFFER_BYTES else part.buffer
