"""What becomes of a packet on its way through one connection: sealed, or as it is.

A packet is a frame (a mark and a header) and at most one payload. On the wire it is a record: a head of eight bytes
that says how large both are, and one or two parts:

    u32 bytes of the frame, u32 bytes of the payload + 1 (0: there is none)
    frame and payload together, where they are small; else the frame, and then the payload

Sealed, each part is encrypted and authenticated by AES-256-GCM under the key of its direction, and has a tag of 16
bytes more. The number of a part among all parts of its direction is its nonce and is never sent: TCP keeps the order,
so a part that was lost, repeated, changed or moved does not open, and nothing behind it would. The head is
authenticated along with each of its parts.

What is large is touched once: it is sealed into a buffer that the socket sends from, and opened in the buffer that it
was received in. Fresh memory of this size costs half as much again as sealing does, page by page, so buffers are used
again once nobody has them any more.
"""

from __future__ import annotations

import struct
import weakref
from functools import partial
from typing import Any, Protocol

import numpy
from cryptography.exceptions import InvalidTag

from potluck.errors import ProtocolError
from potluck.link.carrier import Buffer
from potluck.link.direct.noise import TAG_BYTES, Cipher

Opened = tuple[memoryview, memoryview | None]

HEAD = struct.Struct(">II")
HEAD_BYTES = HEAD.size
JOINED_BYTES = 16 * 1024  # frame and payload are one part up to here: copying them costs less than a second seal


class Wrapping(Protocol):
    """One connection's way of wrapping packets."""

    tag_bytes: int
    """How much longer a part is on the wire."""

    def wrap(self, frame: bytes, payload: memoryview | None) -> list[Buffer]:
        """The packet's record, to be sent before that of any later packet, and unchanged until then."""
        ...

    def open(self, part: memoryview, head: bytes) -> memoryview:
        """What stands in the next part, in memory of its own. ProtocolError: the connection must end."""
        ...

    def open_in_place(self, part: memoryview, head: bytes) -> memoryview:
        """The same, in the part's own memory."""
        ...


class Clear:
    """Packets as they are, for a trusted LAN."""

    tag_bytes = 0

    def wrap(self, frame: bytes, payload: memoryview | None) -> list[Buffer]:
        """The packet itself."""
        if payload is None:
            return [HEAD.pack(len(frame), 0) + frame]
        head = HEAD.pack(len(frame), len(payload) + 1)
        if len(frame) + len(payload) <= JOINED_BYTES:
            return [b"".join((head, frame, payload))]
        return [head + frame, payload]

    def open(self, part: memoryview, head: bytes) -> memoryview:
        """A copy."""
        return memoryview(bytes(part))

    def open_in_place(self, part: memoryview, head: bytes) -> memoryview:
        """The part itself."""
        return part


class Sealed:
    """Packets that only the other end can read and nobody can change."""

    __slots__ = ("_incoming", "_outgoing", "_slabs")

    tag_bytes = TAG_BYTES

    def __init__(self, outgoing: Cipher, incoming: Cipher, slabs: Slabs) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._slabs = slabs

    def wrap(self, frame: bytes, payload: memoryview | None) -> list[Buffer]:
        """The packet, sealed with the next numbers."""
        cipher = self._outgoing
        if payload is None:
            head = HEAD.pack(len(frame), 0)
            return [head + cipher.seal(frame, head)]
        head = HEAD.pack(len(frame), len(payload) + 1)
        if len(frame) + len(payload) <= JOINED_BYTES:
            return [head + cipher.seal(b"".join((frame, payload)), head)]
        sealed_frame = head + cipher.seal(frame, head)
        sealed = self._slabs.take(len(payload) + TAG_BYTES)
        cipher.aead.encrypt_into(cipher.nonce(), payload, head, sealed)
        return [sealed_frame, sealed]

    def open(self, part: memoryview, head: bytes) -> memoryview:
        """What the other end has sealed next."""
        return memoryview(self._incoming.open(part, head))

    def open_in_place(self, part: memoryview, head: bytes) -> memoryview:
        """The same, as OpenSSL allows. Where the tag is wrong, what stands there is thrown away unread."""
        opened = part[:-TAG_BYTES]
        try:
            self._incoming.aead.decrypt_into(self._incoming.nonce(), part, head, opened)
        except InvalidTag:
            raise ProtocolError("a part does not open: it was changed, or is not the next one") from None
        return opened


class Slabs:
    """Buffers for large parts, used again and again."""

    def __init__(self, *, slab_bytes: int, most_kept: int) -> None:
        """So many of this size are kept when not in use."""
        self._slab_bytes = slab_bytes
        self._most_kept = most_kept
        self._free: list[Any] = []
        self._in_use: dict[int, weakref.ref[Any]] = {}
        self._last_number = 0

    def take(self, size_bytes: int) -> memoryview:
        """A buffer of this size. It is used again once nobody has a view of it any more, nor a slice of one.

        What is much smaller than a slab gets memory of its own: its keeper must not keep much more than it knows.
        """
        if not self._slab_bytes // 2 < size_bytes <= self._slab_bytes:
            return numpy.empty(size_bytes, numpy.uint8).data
        try:
            slab = self._free.pop()
        except IndexError:
            slab = numpy.empty(self._slab_bytes, numpy.uint8)
        user = slab[:size_bytes]  # every view of its memory keeps this array alive; a view itself is not kept by slices
        self._last_number += 1
        # Views may be let go of in any thread, which runs the callback. Each step of it is one that no other thread can
        # come in between; a lock could be asked for by the thread that holds it.
        self._in_use[self._last_number] = weakref.ref(user, partial(self._give_back, self._last_number, slab))
        view: memoryview = user.data
        return view

    def _give_back(self, number: int, slab: Any, _: object) -> None:
        del self._in_use[number]
        if len(self._free) < self._most_kept:
            self._free.append(slab)
