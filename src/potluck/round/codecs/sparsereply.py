"""What is not zero, in eight bits with a scale per block of 4,096; or all values so, where that is smaller.

    frame: how many there are (uint32), one float32 scale s per block, positions, one signed byte q a value
           all of them: the same without positions, in order:  x ≈ q·(s/127)

The error is that of blockwise8, s/254 + 2⁻²²·s + SMALLEST with s the largest magnitude of the block. It is made for
averages of sparse contributions, which are the less sparse the more there are: a frame never takes more than blockwise8
would, but for the four bytes of its head.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from potluck.round.codecs.base import Bytes, read_scales
from potluck.round.codecs.blockwise import Blocked
from potluck.round.codecs.memory import Buffer, num_bytes, scratch, tensor_over
from potluck.round.codecs.positions import best_low_bits, positions_bytes, read_positions, write_positions
from potluck.round.codecs.sparseframe import HEAD_BYTES, Sparse, write_head


class Sparse8(Sparse, Blocked):
    """Signed bytes with a scale per block, for those values that are not zero."""

    name = "sparse8"
    default_block = 4096

    @classmethod
    def bytes_of(cls, num_values: int, count: int) -> int:
        """The size of a frame with so many values that are not zero, in blocks of the default size."""
        scales = 4 * -(-count // cls.default_block)
        return HEAD_BYTES + scales + min(count, num_values + _where(num_values, count))

    def _most(self, count: int) -> int:
        return count

    def _frame_bytes(self, num_values: int, count: int) -> int:
        where = 0 if num_values == count else _where(num_values, count)
        return HEAD_BYTES + 4 * self.num_blocks(count) + where + num_values

    def _encode_varying(self, values: Tensor) -> list[Bytes]:
        count = values.numel()
        head = np.empty(4 * self.num_blocks(count), dtype=np.uint8)
        values, scales = self._write_scales(values, head.data)
        quantized = scratch("quantized", count, torch.int8)
        quantized.copy_(self._scaled(values, scales, 127.0).round_())
        positions = np.flatnonzero(quantized.numpy())
        num_values = len(positions)
        if num_values + _where(num_values, count) >= count:
            return [write_head(count), head, quantized.numpy().view(np.uint8)]
        low_bits = best_low_bits(num_values, count)
        where = write_positions(positions, count, low_bits)
        return [write_head(num_values), head, *where, quantized.numpy()[positions].view(np.uint8)]

    def _decode_values(self, frame: Buffer, num_values: int, out: Tensor) -> None:
        count = out.numel()
        at = HEAD_BYTES + 4 * self.num_blocks(count)
        scales = read_scales(memoryview(frame)[HEAD_BYTES:], self.num_blocks(count))
        values = tensor_over(frame, torch.int8, offset=num_bytes(frame) - num_values, count=num_values)
        if num_values == count:
            out.copy_(values)
        else:
            positions = read_positions(frame, at, num_values, count, best_low_bits(num_values, count))
            out.zero_()
            out[torch.from_numpy(positions)] = values.float()
        self._multiply(out, scales / 127.0)


def _where(num_values: int, count: int) -> int:
    return positions_bytes(num_values, count, best_low_bits(num_values, count))
