"""What frames of sparse codecs have in common: a head that says how many values there are, and so how long it is.

    frame: how many there are (uint32), then what the codec makes of them

The head comes from a stranger: it counts only if the frame is exactly as long as it says.
"""

from __future__ import annotations

import struct
from abc import abstractmethod

import numpy as np
from torch import Tensor

from potluck.errors import ProtocolError
from potluck.round.codecs.base import Bytes, Varying
from potluck.round.codecs.memory import Buffer, num_bytes

_HEAD = struct.Struct("<I")
HEAD_BYTES = _HEAD.size


class Sparse(Varying):
    """A codec that sends some values, and says how many."""

    @abstractmethod
    def _most(self, count: int) -> int:
        """The most values that are sent of `count`."""

    @abstractmethod
    def _frame_bytes(self, num_values: int, count: int) -> int:
        """The size of a frame with so many of `count` values."""

    @abstractmethod
    def _decode_values(self, frame: Buffer, num_values: int, out: Tensor) -> None:
        """Fill `out`, which is not empty, from a frame that has the size of so many values."""

    def encoded_bytes(self, count: int) -> int:
        """The most: all are sent that can be."""
        return self._frame_bytes(self._most(count), count) if count else 0

    def _decode(self, frame: Buffer, out: Tensor) -> None:
        if count := out.numel():
            self._decode_values(frame, self._read_head(frame, count), out)

    def _read_head(self, frame: Buffer, count: int) -> int:
        """How many values a frame has; ProtocolError unless that fits its size."""
        if num_bytes(frame) < HEAD_BYTES:
            raise ProtocolError(f"a {self.name} frame of {num_bytes(frame)} bytes has no head: dropped")
        num_values: int = _HEAD.unpack_from(frame)[0]
        if num_values > self._most(count) or self._frame_bytes(num_values, count) != num_bytes(frame):
            raise ProtocolError(f"{num_bytes(frame)} bytes are no {self.name} frame of {num_values} values: dropped")
        return num_values


def write_head(num_values: int) -> Bytes:
    """The head of a frame with so many values."""
    return np.frombuffer(_HEAD.pack(num_values), np.uint8)
