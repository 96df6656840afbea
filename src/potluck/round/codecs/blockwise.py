"""Eight bits, evenly spaced in blocks: each block of 4,096 values has the scale of its largest magnitude.

    frame: one float32 scale s per block, then one signed byte q per value:  x ≈ q·(s/127)

A value comes back with an error of at most s/254 + 2⁻²²·s + SMALLEST, where s is the largest magnitude of its own
block: half a step, the rounding of the step, and blocks too small for a scale, which are sent as zeros. Zero comes
back as zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from potluck.round.codecs.base import LARGEST, SMALLEST, Codec, Fixed, not_finite, read_scales, within_range
from potluck.round.codecs.memory import Buffer, scratch, tensor_over
from potluck.round.codecs.reductions import MAX_FLOAT32
from potluck.round.plan.specs import CodecSpec


class Blocked(Codec):
    """What codecs with a scale per block share: the blocks, their scales, and the header that holds them."""

    default_block: int

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self.block = spec.block or self.default_block
        self.granularity = self.block

    def num_blocks(self, count: int) -> int:
        """Blocks of `count` values, the last one perhaps partial."""
        return -(-count // self.block)

    def _rows(self, values: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The blocks as rows of a matrix, and then the partial block: each with the slice of scales it belongs to."""
        whole = values.numel() // self.block
        if whole:
            yield slice(0, whole), values[: whole * self.block].view(whole, self.block)
        if whole * self.block < values.numel():
            yield slice(whole, whole + 1), values[whole * self.block :].view(1, -1)

    def _write_scales(self, values: Tensor, frame: Buffer) -> tuple[Tensor, Tensor]:
        """Put each block's largest magnitude into the header; return the values within range, and the scales."""
        scales = tensor_over(frame, torch.float32, count=self.num_blocks(values.numel()))
        self._measure(values, scales)
        largest = float(scales.max().item())
        if not largest <= LARGEST:
            if not largest <= MAX_FLOAT32:
                raise not_finite(values.numel())
            values = within_range(values)
            scales.clamp_(max=LARGEST)
        scales.masked_fill_(scales < SMALLEST, 0.0)
        return values, scales

    def _measure(self, values: Tensor, scales: Tensor) -> None:
        magnitudes = torch.abs(values, out=scratch("scaled", values.numel()))
        for blocks, rows in self._rows(magnitudes):
            scales[blocks] = rows.amax(dim=1)

    def _scaled(self, values: Tensor, scales: Tensor, unit: float) -> Tensor:
        """In scratch, each value times unit/scale of its block; zero where the scale is zero."""
        factors = torch.where(scales > 0.0, unit / scales, 0.0).unsqueeze(1)
        scaled = scratch("scaled", values.numel())
        for (blocks, rows), (_, target) in zip(self._rows(values), self._rows(scaled), strict=True):
            torch.mul(rows, factors[blocks], out=target)
        return scaled

    def _multiply(self, out: Tensor, factors: Tensor) -> None:
        """Multiply each block by its factor, in place."""
        for blocks, rows in self._rows(out):
            rows.mul_(factors[blocks].unsqueeze(1))


class Blockwise8(Blocked, Fixed):
    """Signed bytes, one scale per block."""

    name = "blockwise8"
    default_block = 4096

    def encoded_bytes(self, count: int) -> int:
        """One byte a value and four a block."""
        return 4 * self.num_blocks(count) + count

    def _encode(self, values: Tensor, frame: Buffer) -> None:
        if not values.numel():
            return
        values, scales = self._write_scales(values, frame)
        quantized = tensor_over(frame, torch.int8, offset=4 * scales.numel(), count=values.numel())
        quantized.copy_(self._scaled(values, scales, 127.0).round_())

    def _decode(self, frame: Buffer, out: Tensor) -> None:
        scales = read_scales(frame, self.num_blocks(out.numel()))
        out.copy_(tensor_over(frame, torch.int8, offset=4 * scales.numel(), count=out.numel()))
        self._multiply(out, scales / 127.0)
