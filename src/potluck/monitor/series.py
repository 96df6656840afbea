"""A million points as a few hundred (pure).

The range of x is cut into equal buckets, and each bucket that has points tells their mean, lowest and highest. So a
line shows the course, the band around it every spike, and no point is without a trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from potluck.errors import ConfigurationError

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Series:
    """Some values over x, in the order of x."""

    x: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers

    def __len__(self) -> int:
        return len(self.x)


EMPTY = Series(*(np.empty(0) for _ in range(4)))


def downsample(x: NDArray[np.generic], values: NDArray[np.generic], num_buckets: int) -> Series:
    """At most `num_buckets` points instead of all; those whose x or value is not finite are left out."""
    if num_buckets < 1:
        raise ConfigurationError(f"num_buckets={num_buckets}: a series needs at least 1")
    xs, ys = x.astype(np.float64), values.astype(np.float64)
    finite = np.isfinite(xs) & np.isfinite(ys)
    if not finite.all():
        xs, ys = xs[finite], ys[finite]
    if (xs[1:] < xs[:-1]).any():
        order = np.argsort(xs, kind="stable")
        xs, ys = xs[order], ys[order]
    if len(xs) <= num_buckets:
        return Series(xs, ys, ys, ys)
    edges = np.linspace(xs[0], xs[-1], num_buckets + 1)[:-1]
    starts = np.unique(np.searchsorted(xs, edges, side="left"))  # of the buckets that are not empty
    counts = np.diff(np.append(starts, len(xs)))
    low, high = np.minimum.reduceat(ys, starts), np.maximum.reduceat(ys, starts)
    mean = np.clip(np.add.reduceat(ys, starts) / counts, low, high)  # rounding stays within
    middle = np.add.reduceat(xs, starts) / counts
    return Series(np.clip(middle, xs[starts], xs[starts + counts - 1]), mean, low, high)
