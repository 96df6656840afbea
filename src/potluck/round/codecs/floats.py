"""Floating-point codecs: float32, float16, bfloat16, and float16 around a mean with a scale.

With u = 2⁻²⁴ (half the spacing of float32), a value x comes back with an error of at most

    float32         0
    float16         max(2⁻¹¹·|x|, 2⁻²⁵) for |x| ≤ 65504; beyond that it comes back as ±65504
    bfloat16        max(2⁻⁸·|x|, 2⁻¹³⁴) up to its largest value, 3.39e38; beyond that it comes back as that
    scaled float16  2⁻¹¹·d + 2⁻³⁹·D + 2u·(d + |x| + |mean|) + 2⁻¹⁴⁰ for |x| ≤ LARGEST, with d = |x − mean| and D the
                    largest d of the chunk
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from potluck.errors import ProtocolError
from potluck.round.codecs.base import LARGEST, Fixed, require_finite, within_range
from potluck.round.codecs.memory import Buffer, scratch, tensor_over
from potluck.round.codecs.reductions import magnitude, tree_sum


class Float32(Fixed):
    """The values as they are; 4 bytes each."""

    name = "float32"

    def encoded_bytes(self, count: int) -> int:
        """Four bytes a value."""
        return 4 * count

    def _encode(self, values: Tensor, frame: Buffer) -> None:
        require_finite(values)
        tensor_over(frame, torch.float32, count=values.numel()).copy_(values)

    def _decode(self, frame: Buffer, out: Tensor) -> None:
        out.copy_(tensor_over(frame, torch.float32, count=out.numel()))
        require_finite(out)

    def add_decoded(self, frame: Buffer, weight: float, out: Tensor) -> None:
        """As every codec, but without a copy where the weight is one."""
        if weight != 1.0:
            super().add_decoded(frame, weight, out)
            return
        self._check_length(frame, out.numel())
        values = tensor_over(frame, torch.float32, count=out.numel())
        require_finite(values)
        out.add_(values)


class _HalfWidth(Fixed):
    """Sixteen bits that torch converts to and from float32 in one pass, rounding to nearest even."""

    dtype: torch.dtype
    infinity_bits: int
    """The bit pattern of +infinity; as an integer, every finite magnitude lies below it."""

    def encoded_bytes(self, count: int) -> int:
        """Two bytes a value."""
        return 2 * count

    def _encode(self, values: Tensor, frame: Buffer) -> None:
        encoded = tensor_over(frame, self.dtype, count=values.numel())
        encoded.copy_(values)
        if self._all_finite(encoded):
            return
        # Rare: either the values are not finite, or some are beyond this format and saturate.
        require_finite(values)
        limit = torch.finfo(self.dtype).max
        encoded.copy_(torch.clamp(values, -limit, limit, out=scratch("clipped", values.numel())))

    def _decode(self, frame: Buffer, out: Tensor) -> None:
        out.copy_(tensor_over(frame, self.dtype, count=out.numel()))
        require_finite(out)

    def _all_finite(self, encoded: Tensor) -> bool:
        if encoded.numel() == 0:
            return True
        bits = scratch("bits", encoded.numel(), torch.int16)
        torch.bitwise_and(encoded.view(torch.int16), 0x7FFF, out=bits)
        return int(bits.max().item()) < self.infinity_bits


class Float16(_HalfWidth):
    """IEEE half precision; saturates at ±65504."""

    name = "float16"
    dtype = torch.float16
    infinity_bits = 0x7C00


class BFloat16(_HalfWidth):
    """The upper half of a float32: its full range, 8 bits of precision."""

    name = "bfloat16"
    dtype = torch.bfloat16
    infinity_bits = 0x7F80


class ScaledFloat16(Fixed):
    """float16 of (x − mean)/scale, with mean and scale in a header of two float32.

    The scale is the power of two that brings the largest deviation D just below 2¹⁵: scaling then rounds nothing, the
    top of float16's range is used, and its subnormals begin only at 2⁻²⁹·D. So the error is that of float16 relative
    to the deviation, not to the value, and neither large nor tiny chunks leave the range. Where few values lie far from
    all others, small ones keep their distance to the mean, not their own relative precision: for the second moments of
    Adam, which span many decades and must stay positive, take bfloat16.
    """

    name = "scaled_float16"
    _header = struct.Struct("<ff")

    def encoded_bytes(self, count: int) -> int:
        """Two bytes a value and eight for the header; nothing for nothing."""
        return self._header.size + 2 * count if count else 0

    def _encode(self, values: Tensor, frame: Buffer) -> None:
        count = values.numel()
        if not count:
            return
        values = within_range(values)
        mean = self._mean(values)
        scaled = torch.sub(values, mean, out=scratch("scaled", count))
        # frexp: D < 2^exponent. The bound keeps the inverse of the scale a normal number.
        exponent = max(math.frexp(magnitude(scaled))[1], -100)
        self._header.pack_into(memoryview(frame), 0, mean, 2.0 ** (exponent - 15))
        scaled.mul_(2.0 ** (15 - exponent))
        tensor_over(frame, torch.float16, offset=self._header.size, count=count).copy_(scaled)

    @staticmethod
    def _mean(values: Tensor) -> float:
        # As float32, since that is what the header holds and what the decoder adds.
        mean: float = struct.unpack("<f", struct.pack("<f", tree_sum(values) / values.numel()))[0]
        return mean

    def _decode(self, frame: Buffer, out: Tensor) -> None:
        if not out.numel():
            return
        mean, scale = self._header.unpack_from(frame, 0)
        if not (abs(mean) <= LARGEST and 0.0 < scale <= LARGEST):  # NaN fails both
            raise ProtocolError(f"a mean of {mean} with a scale of {scale} is not of this codec: dropped")
        out.copy_(tensor_over(frame, torch.float16, offset=self._header.size, count=out.numel()))
        out.mul_(scale).add_(mean)
        require_finite(out)
