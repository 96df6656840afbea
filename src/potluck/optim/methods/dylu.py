"""Local steps by speed (DyLU): a slow peer takes fewer of them, so that all are done at the same time (pure).

Where the fast peers take H steps, a peer at half of their speed takes H/2, and is ready together with them. Their speed
is the upper quartile of what all say, in steps per second, and at most eight times the median. So no single claim
decides among four and more peers, and among fewer it cuts half of them to no less than an eighth of H.

Steps and not samples are compared, since H counts steps: a peer with larger batches takes longer for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from potluck.errors import ConfigurationError

MOST_OVER_MEDIAN = 8.0  # how far the rate of the fast ones may be above that of half of the peers
ALIKE_SHARE = 0.8  # of the fast ones' rate: a peer with so much of it takes all steps, whatever is measured
LONGEST_STEPS = 1_000_000


def fast_rate(rates: Iterable[float]) -> float:
    """The rate that peers are compared with: the upper quartile, capped; 0 where there are not two to compare."""
    known = sorted(rate for rate in rates if rate > 0 and math.isfinite(rate))
    if len(known) < 2:
        return 0.0
    quartile = known[math.ceil(0.75 * len(known)) - 1]
    median = known[(len(known) - 1) // 2]  # the lower one of two: who says more than it does is among the higher
    return min(quartile, MOST_OVER_MEDIAN * median)


def inner_steps(most_steps: int, rate: float, fast: float) -> int:
    """The local steps of a peer with this rate: ⌊H·rate/fast⌋, at least 1, and all H where it is about as fast."""
    if most_steps < 1:
        raise ConfigurationError(f"{most_steps} inner steps: take 1 or more")
    if not (rate > 0 and fast > 0) or rate >= ALIKE_SHARE * fast:
        return most_steps
    return max(1, math.floor(most_steps * rate / fast))


def steps_within(seconds: float, step_seconds: float) -> int:
    """How many whole steps fit into this time; none while it is not known how long one takes."""
    if not (seconds > 0 and step_seconds > 0):
        return 0
    return min(LONGEST_STEPS, math.floor(seconds / step_seconds))
