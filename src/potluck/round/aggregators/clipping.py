"""Aggregators by length: centered clipping and median-norm clipping. Every contributor counts the same (order.py).

Both measure Euclidean lengths over one chunk, as BTARD does over one part: a reducer holds no more of a contribution
than its own part, and chunks are reduced as soon as they are complete. The bounds below hold for each chunk; for whole
vectors the squares of the chunks' errors add up. A poisoner may use its allowance in every chunk, but the allowance in
each is set by the honest lengths there, so that it cannot spend on one chunk what it saves on others.

Let δ < 1/2 be the poisoners' share of the contributors, x_i the contributions, μ the honest mean, avg_H the average
over the honest.

**Median-norm clipping**: with m the median of the norms |x_i|, the result is the mean of c_i·x_i,
c_i = min(1, m/|x_i|). The honest part misses μ by what clipping takes away, the poisoned part has length at most m:

    |result − μ| ≤ (1 − δ)·avg_H(|x_i| − m)⁺ + δ·(m + |μ|)

and m is at most the largest honest norm, since fewer than half are poisoned.

**Centered clipping** starts at v₀, the coordinate median (order.py: within the honest range in each coordinate), takes
τ = radius × the median of |x_i − v₀|, and moves a few times

    v ← v + the mean of clip(x_i − v, τ),    clip(d, τ) = d·min(1, τ/|d|)

With e the distance |v − μ|: the honest part moves v to μ but for what clipping takes away, and the poisoned part pulls
by at most τ, so that one move gives

    e' ≤ δ·e + δ·τ + (1 − δ)·avg_H(|x_i − v| − τ)⁺

Where no honest contribution is clipped (a radius of 1.5 gives them room), L moves end at most at
δᴸ·e₀ + τ·δ/(1 − δ). In any case no move is longer than τ: the error is at most e₀ + L·τ, and
τ ≤ radius·(e₀ + max_H|x_i − μ|), all of them honest quantities, whatever the poison.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low

import torch
from torch import Tensor

from potluck.round.aggregators.base import Accumulator, Aggregator, CollectingAccumulator
from potluck.round.aggregators.order import median_of
from potluck.round.codecs.reductions import norm
from potluck.round.plan.specs import AggregatorSpec


class MedianNormClipping(Aggregator):
    """The mean of contributions none of which is longer than the median one."""

    name = "median_norm_clipping"

    def begin(self, elements: int, weights: Mapping[str, float]) -> Accumulator:
        """Start on a chunk."""
        return _MedianNormAccumulator(elements, weights)


class CenteredClipping(Aggregator):
    """The mean of contributions none of which pulls harder than others from a center that settles among them."""

    name = "centered_clipping"

    def begin(self, elements: int, weights: Mapping[str, float]) -> Accumulator:
        """Start on a chunk."""
        return _CenteredAccumulator(elements, weights, self.spec)


class _MedianNormAccumulator(CollectingAccumulator):
    def _combine(self, rows: list[Tensor], out: Tensor) -> None:
        norms = [norm(row) for row in rows]
        limit = median_low(norms)
        out.zero_()
        for row, length in zip(rows, norms, strict=True):
            out.add_(row.mul_(_clip_factor(length, limit) / len(rows)))


class _CenteredAccumulator(CollectingAccumulator):
    def __init__(self, elements: int, weights: Mapping[str, float], spec: AggregatorSpec) -> None:
        super().__init__(elements, weights)
        self._radius = spec.radius
        self._iterations = spec.iterations

    def _combine(self, rows: list[Tensor], out: Tensor) -> None:
        median_of([row.clone() for row in rows], out)
        limit = self._radius * median_low([norm(torch.sub(row, out)) for row in rows])
        move, difference = torch.empty_like(out), torch.empty_like(out)
        for _ in range(self._iterations):
            move.zero_()
            for row in rows:
                factor = _clip_factor(norm(torch.sub(row, out, out=difference)), limit) / len(rows)
                if factor > 0.0:  # zero times an infinite difference would not be zero
                    move.add_(difference.mul_(factor))
            out.add_(move)


def _clip_factor(length: float, limit: float) -> float:
    """What to multiply by so that the length does not exceed the limit; 0 where the length itself overflowed."""
    return 1.0 if length <= limit else limit / length
