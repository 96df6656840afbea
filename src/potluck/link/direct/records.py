"""Packets out of a stream of bytes (pure); sealing.py says how they stand there.

Every length is checked before memory is taken for it. Small parts are opened out of the bytes as they come; a large one
gets a buffer of its own, which the socket then fills directly.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.errors import ProtocolError
from potluck.link.direct.sealing import HEAD, HEAD_BYTES, JOINED_BYTES, Opened, Slabs, Wrapping

NOTHING = memoryview(b"")


class OversizedError(ProtocolError):
    """A record announces more than may come."""


class RecordReader:
    """What one connection has received so far of the record that is on its way."""

    __slots__ = (
        "_filled_bytes",
        "_frame",
        "_head",
        "_max_frame_bytes",
        "_max_payload_bytes",
        "_payload_bytes",
        "_slabs",
        "_target",
        "_wrapping",
        "position",
    )

    def __init__(self, wrapping: Wrapping, slabs: Slabs, *, max_frame_bytes: int, max_payload_bytes: int) -> None:
        self.position = 0  # how far `packets` has come in what it was given
        self._wrapping = wrapping
        self._slabs = slabs
        self._max_frame_bytes = max_frame_bytes
        self._max_payload_bytes = max_payload_bytes
        self._head = b""  # of the record on its way, once memory was taken for one of its parts
        self._frame: memoryview | None = None  # its first part, opened
        self._payload_bytes: int | None = None  # of its second part, if it has one
        self._target: memoryview | None = None  # for the part on its way, if that is large
        self._filled_bytes = 0

    @property
    def largest_rest_bytes(self) -> int:
        """The most that can be left of what `packets` was given, when it has yielded all it can."""
        return HEAD_BYTES + JOINED_BYTES + self._wrapping.tag_bytes

    @property
    def target(self) -> memoryview | None:
        """Where the next bytes belong, if they belong to a large part; tell `filled`, then go on with `packets`."""
        return None if self._target is None else self._target[self._filled_bytes :]

    def filled(self, num_bytes: int) -> None:
        """So many bytes were put there."""
        self._filled_bytes += num_bytes

    def packets(self, data: memoryview) -> Iterator[Opened]:
        """The packets that are complete; of `data`, what is behind `position` must be given again, with more.

        ProtocolError: it cannot be read any further.
        """
        wrapping, unpack, tag_bytes, end = self._wrapping, HEAD.unpack_from, self._wrapping.tag_bytes, len(data)
        self.position = at = 0
        while True:
            if self._target is not None:
                self.position = at = at + self._fill(data[at:])
                if self._filled_bytes < len(self._target):
                    return
                packet = self._complete(self._target)
                if packet is not None:
                    yield packet
                continue
            start = at + HEAD_BYTES
            if start > end:
                return
            frame_bytes, loaded = unpack(data, at)
            if frame_bytes > self._max_frame_bytes or loaded > self._max_payload_bytes + 1:
                raise OversizedError(f"a packet of {frame_bytes} and {max(0, loaded - 1)} bytes exceeds the limits")
            is_joined = frame_bytes + loaded <= JOINED_BYTES + 1 if loaded else True
            first_bytes = tag_bytes + (frame_bytes + loaded - 1 if loaded and is_joined else frame_bytes)
            if first_bytes > JOINED_BYTES + tag_bytes:
                self._begin(bytes(data[at:start]), None, first_bytes, loaded - 1 if loaded else None)
                self.position = at = start
                continue
            if end - start < first_bytes:
                return
            head = bytes(data[at:start])
            at = start + first_bytes
            part = wrapping.open(data[start:at], head)
            self.position = at
            if not loaded:
                yield part, None
            elif is_joined:
                yield part[:frame_bytes], part[frame_bytes:]
            else:
                self._begin(head, part, loaded - 1 + tag_bytes, None)

    def _begin(self, head: bytes, frame: memoryview | None, part_bytes: int, payload_bytes: int | None) -> None:
        """Take memory for a part on its way, of a record of which `frame` has come and a payload is still to come."""
        self._head, self._frame, self._payload_bytes = head, frame, payload_bytes
        self._target, self._filled_bytes = self._slabs.take(part_bytes), 0

    def _fill(self, data: memoryview) -> int:
        assert self._target is not None
        num_bytes = min(len(data), len(self._target) - self._filled_bytes)
        self._target[self._filled_bytes : self._filled_bytes + num_bytes] = data[:num_bytes]
        self._filled_bytes += num_bytes
        return num_bytes

    def _complete(self, target: memoryview) -> Opened | None:
        """The large part has come; the packet, if that was the last of it."""
        frame, payload_bytes = self._frame, self._payload_bytes
        self._target = self._frame = self._payload_bytes = None
        part = self._wrapping.open_in_place(target, self._head)
        if frame is not None:
            return frame, part
        if payload_bytes is None:
            return part, None
        self._begin(self._head, part, payload_bytes + self._wrapping.tag_bytes, None)
        return None
