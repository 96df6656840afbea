"""The model of a round's time, and the shares that make the slowest member as fast as possible.

**The time of a round.** Let one contribution have V bytes as encoded, and let reducer i have the share w_i of it,
Σw = 1. Write s_i = 1 if member i sends a contribution of its own (trainers do, aux peers do not), r_i = 1 if it
receives the averages (all do, unless a peer only helps), S = Σs, R = Σr. Member i moves

    up      s_i·(1 − w_i)       its contribution, but for the part that it reduces itself, which stays where it is
          + w_i·(R − r_i)       the average of its part, to every other receiver
    down    w_i·(S − s_i)       the other senders' contributions to its part
          + r_i·(1 − w_i)       the averages of all other parts

times V. Both are lines in w_i alone: up s_i + (R − r_i − s_i)·w_i, down r_i + (S − s_i − r_i)·w_i. For n full peers
both are 1 + (n − 2)·w_i, the formula of DeDLOC. Links are full duplex and chunks stream, so that member i takes the
longer of up/upload speed and down/download speed, and the round takes as long as its slowest member.

**The smallest time.** Each line bounds w_i for a given time t: from above where its slope is positive, from below where
it is negative (only a lone sender's: what it reduces itself need not travel), and where the slope is zero it bounds t
itself. So t is feasible if and only if

    t ≥ the time of every line at its lowest,   Σ upper(t) ≥ 1,   lower(t) ≤ upper(t) for everybody

(Σ lower(t) ≤ 1 is implied: at most one member has a lower bound, and it is at most 1.) Upper bounds are piecewise
linear and grow with t, so that the smallest t lies between two neighbouring kinks, where it is found by interpolation.
This is the optimum of the linear program, exactly and without a solver; tests compare it with HiGHS.

Often the slowest member's time is its own upload, whatever the shares. Then many shares are optimal, and we take those
that let the *reducers* finish first, which leaves room where a measurement was wrong: the shares at the smallest t for
which Σ upper(t) = 1 alone. Where bounds leave a choice even then, shares are as equal as they allow.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from potluck.errors import ConfigurationError

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

DEFAULT_BYTES_PER_SECOND = 12.5e6  # 100 Mbit/s, where nobody's speed is known
SLOWEST_BYTES_PER_SECOND = 1e3
FASTEST_BYTES_PER_SECOND = 12.5e9  # 100 Gbit/s: nobody attracts work by claiming more
SAME_SPEED = 4 / 3  # measured speeds within such a factor of the median say nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberCapacity:
    """What the plan needs to know about one member."""

    peer: str
    sends: bool = True
    """Contributes values of its own; every sender also receives."""

    reduces: bool = True
    """May be given a part; client peers may not."""

    receives: bool = True
    """Gets the averages."""

    upload_bytes_per_second: float | None = None
    """As measured; None: not known."""

    download_bytes_per_second: float | None = None
    """As measured; None: not known."""

    def __post_init__(self) -> None:
        if self.sends and not self.receives:
            raise ConfigurationError(f"{self.peer} contributes and must receive the averages too")


class RoundModel:
    """Everybody's upload and download time as lines in its share: (offset + slope·w)/speed.

    Tables have a row for upload and one for download, and a column for each member.
    """

    def __init__(
        self,
        members: Sequence[MemberCapacity],
        *,
        contribution_bytes: int,
        default_bytes_per_second: float = DEFAULT_BYTES_PER_SECOND,
    ) -> None:
        sends = np.array([member.sends for member in members], dtype=np.float64)
        receives = np.array([member.receives for member in members], dtype=np.float64)
        self.num_senders = int(sends.sum())
        self.offset = np.stack([sends, receives])
        self.slope = np.stack([receives.sum() - receives - sends, sends.sum() - sends - receives])
        speeds = [
            known_speeds([member.upload_bytes_per_second for member in members], default_bytes_per_second),
            known_speeds([member.download_bytes_per_second for member in members], default_bytes_per_second),
        ]
        self.speed = np.array(speeds) / max(1, contribution_bytes)  # contributions per second

    def seconds(self, shares: Floats) -> Floats:
        """How long each member takes with these shares."""
        times: Floats = ((self.offset + self.slope * shares) / self.speed).max(axis=0)
        return times

    def upper(self, t: float, reducers: Mask) -> Floats:
        """The largest share of each member that rising lines allow within t; zero for those who reduce nothing."""
        bounds = np.ones_like(self.slope)
        np.divide(t * self.speed - self.offset, self.slope, out=bounds, where=self.slope > 0)
        result: Floats = np.clip(bounds.min(axis=0), 0.0, 1.0) * reducers
        return result

    def lower(self, t: float) -> Floats:
        """The smallest share of each member that falling lines need within t."""
        bounds = np.zeros_like(self.slope)
        np.divide(t * self.speed - self.offset, self.slope, out=bounds, where=self.slope < 0)
        result: Floats = np.clip(bounds.max(axis=0), 0.0, 1.0)
        return result

    def kinks(self, reducers: Mask, lower: Floats) -> Floats:
        """All times at which an upper bound that is at least `lower` changes its slope, in order."""
        offset, slope, speed = (table[:, reducers] for table in (self.offset, self.slope, self.speed))
        rising = slope > 0
        times = [((offset + slope * share) / speed)[rising] for share in (0.0, lower[reducers], 1.0)]
        with np.errstate(divide="ignore", invalid="ignore"):
            # Where the bounds by upload and by download cross: (t·v₀ − a₀)/b₀ = (t·v₁ − a₁)/b₁
            crossing = (offset[0] * slope[1] - offset[1] * slope[0]) / (speed[0] * slope[1] - speed[1] * slope[0])
        times.append(crossing[np.isfinite(crossing) & (crossing > 0.0)])
        return np.unique(np.concatenate([*times, [0.0]]))


class Optimum(NamedTuple):
    """The best shares of a set of reducers."""

    shares: Floats
    seconds: float
    """What the slowest member takes."""

    reducing_seconds: float
    """When the reducers could be done, were it not for members that are slow whatever they reduce."""


def optimal_shares(model: RoundModel, reducers: Mask) -> Optimum:
    """Shares that minimise the slowest member's time and, among those, let the reducers finish first."""
    t = smallest_seconds(model, reducers)
    # A hair more than t, so that rounding does not cut off the share that t was made for.
    lower = np.where(reducers, model.lower(t * (1 + 1e-12)), 0.0)
    level = _first_time(model, reducers, lower)
    shares = _level(lower, np.maximum(lower, model.upper(level, reducers)))
    return Optimum(shares, float(model.seconds(shares).max()), level)


def smallest_seconds(model: RoundModel, reducers: Mask) -> float:
    """The smallest time in which a round is possible: the optimum of the linear program."""
    at_lowest = np.where((model.slope < 0) & reducers, model.offset + model.slope, model.offset) / model.speed
    t = max(float(at_lowest.max()), _first_time(model, reducers, np.zeros(len(reducers))))
    for member in np.flatnonzero(reducers & (model.slope < 0).any(axis=0)):
        t = max(t, _meeting(model, int(member)))
    return t


def _meeting(model: RoundModel, member: int) -> float:
    """When a member's falling lower bound meets its rising upper bounds: it has no share before."""
    offset, slope, speed = (table[:, member] for table in (model.offset, model.slope, model.speed))
    falling, rising = np.flatnonzero(slope < 0), np.flatnonzero(slope > 0)
    # (a₋ − t·v₋)/|b₋| = (t·v₊ − a₊)/b₊
    return max(
        (
            float((offset[i] / -slope[i] + offset[j] / slope[j]) / (speed[i] / -slope[i] + speed[j] / slope[j]))
            for i in falling
            for j in rising
        ),
        default=0.0,
    )


def _first_time(model: RoundModel, reducers: Mask, lower: Floats) -> float:
    """The first time at which the upper bounds, none below `lower`, add up to 1."""
    times = model.kinks(reducers, lower)

    def total(index: int) -> float:
        return float(np.maximum(lower, model.upper(times[index], reducers)).sum())

    # At the last kink every reducer could take all. A hair below 1 is 1: else rounding makes the kink at which a share
    # becomes whole look too early, and a later one, where nothing changes any more, is taken for it.
    reached = bisect_left(range(len(times) - 1), 1.0 - 1e-12, key=total)
    if reached == 0:
        return float(times[0])
    before, after = total(reached - 1), total(reached)
    part = (1.0 - before) / (after - before) if after > 1.0 else 1.0
    return float(times[reached - 1] + part * (times[reached] - times[reached - 1]))


def _level(lower: Floats, upper: Floats) -> Floats:
    """Shares within the bounds that add up to 1 and are as equal as the bounds allow."""
    if upper.sum() <= 1.0:  # the usual case, but for rounding: every reducer is at its bound
        return _normalized(upper)
    # Raise a common level until the shares add up; it lies between two neighbouring bounds.
    levels = np.unique(np.concatenate([lower, upper]))
    sums = np.clip(levels[:, None], lower, upper).sum(axis=1)
    above = int(np.argmax(sums >= 1.0))
    if above == 0:
        return _normalized(lower)
    part = (1.0 - sums[above - 1]) / (sums[above] - sums[above - 1])
    return _normalized(np.clip(levels[above - 1] + part * (levels[above] - levels[above - 1]), lower, upper))


def _normalized(shares: Floats) -> Floats:
    """The same without the last rounding error of their sum."""
    normalized: Floats = shares / shares.sum()
    return normalized


def levelled(speeds: Sequence[float | None]) -> list[float | None]:
    """Speeds as measured, but those that differ little from the median are the same.

    What is measured varies by that much from round to round, and shares that follow it make every round as slow as the
    peer that seemed to be fast.
    """
    known = _known(speeds)
    if not known:
        return list(speeds)
    typical = median(known)
    return [typical if speed and 1 / SAME_SPEED <= speed / typical <= SAME_SPEED else speed for speed in speeds]


def known_speeds(speeds: Sequence[float | None], default: float) -> list[float]:
    """Speeds that can be calculated with: the median for those not known or not sensible, within wide limits."""
    known = _known(speeds)
    typical = median(known) if known else default
    usable = [speed if speed is not None and math.isfinite(speed) and speed > 0 else typical for speed in speeds]
    return [min(max(speed, SLOWEST_BYTES_PER_SECOND), FASTEST_BYTES_PER_SECOND) for speed in usable]


def _known(speeds: Sequence[float | None]) -> list[float]:
    return [speed for speed in speeds if speed is not None and math.isfinite(speed) and speed > 0]
