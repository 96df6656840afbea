"""Eight bits, evenly spaced between the smallest and the largest value of the chunk.

    frame: center (float32), step (float32), then one signed byte q per value:  x ≈ center + q·step

With low and high the extremes, step = (high − low)/255 and center = low + 128·step, so that q runs from −128 to 127.
A value comes back with an error of at most step/2 + 2⁻²²·max(|low|, |high|) + 128·SMALLEST: half a step, the rounding
of center and step, and what is lost where all values are equal but for less than the smallest step. One outlier widens
the step of the whole chunk: block-wise encoding limits the harm to a block.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from potluck.errors import ProtocolError
from potluck.round.codecs.base import LARGEST, SMALLEST, Fixed, within_range
from potluck.round.codecs.memory import Buffer, scratch, tensor_over


class Uniform8(Fixed):
    """Signed bytes around a center, one step for the chunk."""

    name = "uniform8"
    _header = struct.Struct("<ff")

    def encoded_bytes(self, count: int) -> int:
        """One byte a value and eight for the header; nothing for nothing."""
        return self._header.size + count if count else 0

    def _encode(self, values: Tensor, frame: Buffer) -> None:
        count = values.numel()
        if not count:
            return
        values = within_range(values)
        low, high = (extreme.item() for extreme in torch.aminmax(values))
        step = (high - low) / 255
        if step < SMALLEST:
            step = 0.0
        self._header.pack_into(memoryview(frame), 0, low + 128 * step, step)
        center, step = self._header.unpack_from(frame, 0)  # as float32: what the decoder will use
        quantized = tensor_over(frame, torch.int8, offset=self._header.size, count=count)
        if step == 0.0:
            quantized.zero_()
            return
        scaled = torch.sub(values, center, out=scratch("scaled", count))
        quantized.copy_(scaled.div_(step).round_().clamp_(-128, 127))

    def _decode(self, frame: Buffer, out: Tensor) -> None:
        if not out.numel():
            return
        center, step = self._header.unpack_from(frame, 0)
        if not (abs(center) <= 2 * LARGEST and 0.0 <= step <= LARGEST):  # NaN fails both
            raise ProtocolError(f"a center of {center} with a step of {step} is not of this codec: dropped")
        out.copy_(tensor_over(frame, torch.int8, offset=self._header.size, count=out.numel()))
        out.mul_(step).add_(center)
