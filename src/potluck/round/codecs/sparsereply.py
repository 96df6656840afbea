"""What is not zero, in eight bits with a scale per block of 4,096; or all values so, where that is smaller.

    frame: how many there are (uint32), one float32 scale s per block, positions, one signed byte q a value
           all of them: the same without positions, in order:  x ≈ q·(s/127)

The error is that of blockwise8, s/254 + 2⁻²²·s + SMALLEST with s the largest magnitude of the block. It is made for
averages of sparse contributions, which are the less sparse the more there are: a frame never takes more than blockwise8
would, but for the four bytes of its head.
"""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from potluck.errors import ProtocolError
from potluck.round.codecs.base import Bytes, Varying, read_scales
from potluck.round.codecs.blockwise import Blocked
from potluck.round.codecs.memory import Buffer, num_bytes, scratch, tensor_over
from potluck.round.codecs.positions import best_low_bits, positions_bytes, read_positions, write_positions

_COUNT = struct.Struct("<I")


class Sparse8(Varying, Blocked):
    """Signed bytes with a scale per block, for those values that are not zero."""

    name = "sparse8"
    default_block = 4096

    @classmethod
    def bytes_of(cls, num_values: int, count: int) -> int:
        """The size of a frame with so many values that are not zero, in blocks of the default size."""
        scales = 4 * -(-count // cls.default_block)
        return _COUNT.size + scales + min(count, num_values + _where(num_values, count))

    def encoded_bytes(self, count: int) -> int:
        """The most: all values are there."""
        return _COUNT.size + 4 * self.num_blocks(count) + count if count else 0

    def _encode_varying(self, values: Tensor) -> list[Bytes]:
        count = values.numel()
        head = np.empty(4 * self.num_blocks(count), dtype=np.uint8)
        values, scales = self._write_scales(values, head.data)
        quantized = scratch("quantized", count, torch.int8)
        quantized.copy_(self._scaled(values, scales, 127.0).round_())
        positions = np.flatnonzero(quantized.numpy())
        num_values = len(positions)
        if num_values + _where(num_values, count) >= count:
            return [_head(count), head, quantized.numpy().view(np.uint8)]
        low_bits = best_low_bits(num_values, count)
        where = write_positions(positions, count, low_bits)
        return [_head(num_values), head, *where, quantized.numpy()[positions].view(np.uint8)]

    def _decode(self, frame: Buffer, out: Tensor) -> None:
        count = out.numel()
        if not count:
            return
        if num_bytes(frame) < _COUNT.size:
            raise ProtocolError(f"a {self.name} frame of {num_bytes(frame)} bytes has no head: dropped")
        num_values = _COUNT.unpack_from(frame)[0]
        at = _COUNT.size + 4 * self.num_blocks(count)
        where = 0 if num_values == count else _where(num_values, count)
        if num_values > count or num_bytes(frame) != at + where + num_values:
            raise ProtocolError(f"{num_bytes(frame)} bytes are no {self.name} frame of {num_values} values: dropped")
        scales = read_scales(memoryview(frame)[_COUNT.size :], self.num_blocks(count))
        values = tensor_over(frame, torch.int8, offset=at + where, count=num_values)
        if num_values == count:
            out.copy_(values)
        else:
            positions = read_positions(frame, at, num_values, count, best_low_bits(num_values, count))
            out.zero_()
            out[torch.from_numpy(positions)] = values.float()
        self._multiply(out, scales / 127.0)


def _where(num_values: int, count: int) -> int:
    return positions_bytes(num_values, count, best_low_bits(num_values, count))


def _head(num_values: int) -> Bytes:
    return np.frombuffer(_COUNT.pack(num_values), np.uint8)
