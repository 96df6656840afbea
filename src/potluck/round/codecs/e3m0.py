"""Four bits: a sign and three bits of exponent. ± powers of two with a scale per block, and zero.

    frame: one float32 scale s per block, then half a byte per value:  x ≈ ±s·2^(e − 7) for e = 1…7, and 0 for e = 0

So each block knows ±s, ±s/2, … ±s/64 and zero, where s is its largest magnitude. Rounding is to the nearest of these:
a value x comes back with an error of at most max(0.334·|x|, s/127) + SMALLEST. Halfway between 2ᵏ and 2ᵏ⁺¹, at 1.5·2ᵏ,
the error is a third of x; below s/64 it is half of s/64; both and a hair more, since x is first rounded to float16.

The exponent bits are those of a float16. A float16 whose mantissa is zero and whose exponent field is e is 2^(e − 15),
and zero for e = 0: exactly the values above, times 2⁻⁸/s. To round x, take it as float16 at that scale, add half a unit
of the exponent to its bits and drop the mantissa; float16's subnormals make this right below the smallest power too.
All of it is integer arithmetic on whole tensors: no table, no search.

The first half of the chunk lies in the lower halves of the bytes, the second in the upper ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.round.codecs.base import Fixed, read_scales
from potluck.round.codecs.blockwise import Blocked
from potluck.round.codecs.memory import Buffer, scratch, tensor_over

_TOP = 2.0**-8  # the float16 with exponent field 7: where the largest magnitude of a block is put
_HALF_EXPONENT = 1 << 9  # half a unit of float16's exponent field
_SIGN_AND_EXPONENT = 0x9C00 - 0x10000  # the sign and the lower three exponent bits of a float16, as int16


class E3M0(Blocked, Fixed):
    """Half a byte per value, one scale per block."""

    name = "e3m0"
    default_block = 512

    def encoded_bytes(self, count: int) -> int:
        """Half a byte a value and four bytes a block."""
        return 4 * self.num_blocks(count) + (count + 1) // 2

    def _encode(self, values: Tensor, frame: Buffer) -> None:
        count = values.numel()
        if not count:
            return
        values, scales = self._write_scales(values, frame)
        half = (count + 1) // 2
        bits = scratch("bits", 2 * half, torch.int16)
        bits[count:] = 0
        bits[:count].view(torch.float16).copy_(self._scaled(values, scales, _TOP))
        # s00eeemmmmmmmmmm becomes ss…ss00eee: the shift is arithmetic, so that the sign fills everything above.
        bits.add_(_HALF_EXPONENT).bitwise_right_shift_(10)
        codes = scratch("codes", 2 * half, torch.int8)
        codes.copy_(bits)
        signs = torch.bitwise_right_shift(codes, 2, out=scratch("signs", 2 * half, torch.int8)).bitwise_and_(8)
        codes.bitwise_and_(7).bitwise_or_(signs)
        packed = tensor_over(frame, torch.int8, offset=4 * scales.numel(), count=half)
        torch.bitwise_left_shift(codes[half:], 4, out=packed)
        packed.bitwise_or_(codes[:half])

    def _decode(self, frame: Buffer, out: Tensor) -> None:
        count = out.numel()
        scales = read_scales(frame, self.num_blocks(count))
        half = (count + 1) // 2
        packed = tensor_over(frame, torch.uint8, offset=4 * scales.numel(), count=half)
        bits = scratch("bits", 2 * half, torch.int16)
        bits[:half].copy_(packed).bitwise_left_shift_(12)
        bits[half:].copy_(packed).bitwise_left_shift_(8)
        # Both now begin with sign eee. An arithmetic shift by two leaves the sign on top and eee where float16 has the
        # lower bits of its exponent; the mask removes the rest.
        bits.bitwise_right_shift_(2).bitwise_and_(_SIGN_AND_EXPONENT)
        out.copy_(bits[:count].view(torch.float16))
        self._multiply(out, scales / _TOP)
