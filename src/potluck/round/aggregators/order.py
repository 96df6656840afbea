"""Aggregators by rank: the coordinate median and the trimmed mean. Every contributor counts the same.

For each coordinate sort the n values x₁ ≤ x₂ ≤ …, each one unit wide, so that they fill the interval from 0 to n:

    median          the value at n/2 (between two values: the middle of them)
    trimmed mean    the mean over the interval from trim·n to (1 − trim)·n

Bound: let a share δ of the contributors be poisoners. With δ < 1/2 for the median, and δ ≤ trim for the trimmed mean,
each coordinate of the result lies between the smallest and the largest honest value of that coordinate, however large
the poison. For values below all honest ones fill at most δ·n at the left end, and those above at most δ·n at the right
end; what is looked at lies inside. So the error against the honest mean is, in every coordinate, at most the spread of
the honest values.

Weights are left out on purpose. A weight is what its sender says; with weights, δ would be a share of the weight, and
a peer that claims more than half of it decides the result alone. Honest counts do the same harm: in a synchronous epoch
one peer may have done eight batches and the others one each.

Sorting thousands of short columns one by one is slow. A sorting network compares whole rows instead: a fixed sequence
of element-wise minima and maxima (Batcher's merge exchange; Knuth, The Art of Computer Programming 5.2.2, algorithm M),
some ten times faster than torch.sort for ten rows. Comparisons that cannot reach a wanted rank are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from potluck.round.aggregators.base import Accumulator, Aggregator, CollectingAccumulator

SLICE = 1 << 16  # elements sorted together: rows of ten peers and more stay in the cache


class CoordinateMedian(Aggregator):
    """The median of each coordinate."""

    name = "median"

    def begin(self, elements: int, weights: Mapping[str, float]) -> Accumulator:
        """Start on a chunk."""
        return _MedianAccumulator(elements, weights)


class TrimmedMean(Aggregator):
    """The mean of what is left of each coordinate after cutting off both ends."""

    name = "trimmed_mean"

    def begin(self, elements: int, weights: Mapping[str, float]) -> Accumulator:
        """Start on a chunk."""
        return _TrimmedAccumulator(elements, weights, self.spec.trim)


class _MedianAccumulator(CollectingAccumulator):
    def _combine(self, rows: list[Tensor], out: Tensor) -> None:
        median_of(rows, out)


class _TrimmedAccumulator(CollectingAccumulator):
    def __init__(self, elements: int, weights: Mapping[str, float], trim: float) -> None:
        super().__init__(elements, weights)
        self._trim = trim

    def _combine(self, rows: list[Tensor], out: Tensor) -> None:
        low, high = _snap(self._trim * len(rows)), _snap((1 - self._trim) * len(rows))
        for columns in _slices(out.numel()):
            _mean_of_ranks([row[columns] for row in rows], low, high, out[columns])


def median_of(rows: list[Tensor], out: Tensor) -> None:
    """The median of each coordinate; spoils the rows."""
    for columns in _slices(out.numel()):
        _middle_rank([row[columns] for row in rows], out[columns])


def _middle_rank(rows: list[Tensor], out: Tensor) -> None:
    lower, upper = (len(rows) - 1) // 2, len(rows) // 2
    _sort(rows, wanted=(lower, upper))
    if lower == upper:
        out.copy_(rows[lower])
    else:  # halved before they are added: the sum of two large values would overflow
        torch.add(rows[lower].mul_(0.5), rows[upper].mul_(0.5), out=out)


def _mean_of_ranks(rows: list[Tensor], low: float, high: float, out: Tensor) -> None:
    """The mean over ranks low … high, where row i fills i … i + 1."""
    shares = [max(0.0, min(high, rank + 1) - max(low, rank)) for rank in range(len(rows))]
    wanted = tuple(rank for rank, share in enumerate(shares) if share > 0.0)
    _sort(rows, wanted=wanted)
    out.zero_()
    for rank in wanted:
        out.add_(rows[rank].mul_(shares[rank] / (high - low)))


@lru_cache(maxsize=1024)
def _network(count: int, wanted: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The comparisons that bring the wanted ranks of `count` rows into place."""
    needed, kept = set(wanted), []
    for low, high in reversed(list(_merge_exchange(count))):
        if low in needed or high in needed:
            needed |= {low, high}
            kept.append((low, high))
    return tuple(reversed(kept))


def _merge_exchange(count: int) -> Iterator[tuple[int, int]]:
    if count < 2:
        return
    top = 1 << ((count - 1).bit_length() - 1)
    stride = top
    while stride:
        partner, phase, distance = top, 0, stride
        while True:
            for row in range(count - distance):
                if row & stride == phase:
                    yield row, row + distance
            if partner == stride:
                break
            distance, partner, phase = partner - stride, partner // 2, stride
        stride //= 2


def _sort(rows: list[Tensor], wanted: tuple[int, ...]) -> None:
    """Sort each column over the rows, as far as the wanted ranks need it; spoils the rows and reorders the list."""
    spare = torch.empty_like(rows[0])
    for low, high in _network(len(rows), wanted):
        torch.minimum(rows[low], rows[high], out=spare)
        torch.maximum(rows[low], rows[high], out=rows[high])
        rows[low], spare = spare, rows[low]


def _slices(elements: int) -> Iterator[slice]:
    for start in range(0, elements, SLICE):
        yield slice(start, min(start + SLICE, elements))


def _snap(rank: float) -> float:
    """A bound that is whole but for rounding is whole: otherwise a sliver of what is cut off would stay in."""
    return float(round(rank)) if abs(rank - round(rank)) < 1e-9 else rank
