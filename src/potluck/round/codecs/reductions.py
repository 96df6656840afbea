"""Reductions over a chunk that come out the same on every machine, whatever its threads and vector units.

Torch's own sums add in an order that depends on the number of threads and on the width of the vector unit. Where a
result ends up in bytes (a mean in a header, a norm that decides a clipping factor), two machines must agree on it,
or an audit that recomputes would accuse the innocent. Maxima do not depend on the order; sums here are taken in a
fixed tree of element-wise additions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from potluck.round.codecs.memory import scratch

MAX_FLOAT32 = torch.finfo(torch.float32).max


def is_finite(values: Tensor) -> bool:
    """Whether a tensor of any dtype holds neither NaN nor infinity.

    NaN and infinity survive every addition, so that a finite sum proves all values finite; it is the cheapest pass
    there is. A sum that is not finite may also have overflowed: then the extremes decide.
    """
    if not values.is_floating_point() or values.numel() == 0:
        return True
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    if math.isfinite(values.detach().sum(dtype=wide).item()):
        return True
    low, high = torch.aminmax(values.detach())
    return math.isfinite(low.item()) and math.isfinite(high.item())


def magnitude(values: Tensor) -> float:
    """The largest absolute value; NaN where there is one."""
    if values.numel() == 0:
        return 0.0
    low, high = torch.aminmax(values)
    return math.nan if math.isnan(low.item()) else max(-low.item(), high.item())


def tree_sum(values: Tensor) -> float:
    """The sum of float32 values in a fixed order: the second half is added to the first until one value is left.

    The relative error is at most log2(n)·2⁻²⁴ of the sum of magnitudes, far better than adding in a row.
    """
    count = values.numel()
    if count == 0:
        return 0.0
    if count == 1:
        return float(values.item())
    half = (count + 1) // 2
    partial = scratch("tree_sum", half)
    torch.add(values[: count - half], values[half:], out=partial[: count - half])
    if count - half < half:
        partial[half - 1 :].copy_(values[half - 1 : half])
    count = half
    while count > 1:
        half = (count + 1) // 2
        partial[: count - half].add_(partial[half:count])
        count = half
    return float(partial[0].item())


def row_sums(rows: Tensor) -> Tensor:
    """The sum of each row of a matrix, in the same fixed order; a new tensor."""
    while rows.shape[1] > 1:
        half = (rows.shape[1] + 1) // 2
        folded = rows[:, :half].clone()
        folded[:, : rows.shape[1] - half] += rows[:, half:]
        rows = folded
    return rows[:, 0].clone()


def norm(values: Tensor) -> float:
    """The Euclidean norm of finite float32 values. It neither overflows nor underflows."""
    largest = magnitude(values)
    if largest == 0.0:
        return 0.0
    # A power of two scales without rounding, and brings every square into range. The clamp keeps it and its
    # inverse normal numbers.
    exponent = max(-100, min(100, math.frexp(largest)[1]))
    squares = scratch("norm", values.numel())
    torch.mul(values, 2.0**-exponent, out=squares)
    squares.mul_(squares)
    return math.sqrt(tree_sum(squares)) * 2.0**exponent
