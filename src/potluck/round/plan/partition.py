"""Who reduces how much: the best reducers, their shares, and whole chunks.

Shares come from the model in shares.py, which knows speeds but not that each reducer costs every member a link and its
messages. So reducers with the smallest shares are left out one by one, and the sets are compared with
`seconds_per_link` added for each reducer; sets in which a share is below the minimum do not count. Thus there are
members × reducers links, not members².

Where a slow uploader decides the time, many sets are about as fast. Of those within 5% of the fastest, and no slower
than all reducers together, we take the one whose reducers are done first, the work of adding up included: that spreads
the work, and leaves room where a measurement was wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from potluck.errors import ConfigurationError, RetryableError
from potluck.round.plan.shares import (
    DEFAULT_BYTES_PER_SECOND,
    Floats,
    Mask,
    MemberCapacity,
    Optimum,
    RoundModel,
    optimal_shares,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionConfig:
    """How parts are cut."""

    smallest_share_bytes: int = 64 * 1024
    """A reducer with less than this is not worth its links: its share moves to others."""

    seconds_per_link: float = 0.0005
    """What one more reducer costs every member, in messages and wake-ups."""

    reduced_bytes_per_second: float = 2e9
    """How fast a reducer decodes and adds up; about half of what one core does (benchmarks/bench_codecs.py)."""

    default_bytes_per_second: float = DEFAULT_BYTES_PER_SECOND
    """The speed of members when nobody's is known."""

    def __post_init__(self) -> None:
        if self.smallest_share_bytes < 0 or self.seconds_per_link < 0:
            raise ConfigurationError("smallest_share_bytes and seconds_per_link cannot be negative")
        if not (self.default_bytes_per_second > 0 and self.reduced_bytes_per_second > 0):
            raise ConfigurationError("default_bytes_per_second and reduced_bytes_per_second must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The outcome: shares, and how long the round should take."""

    shares: tuple[float, ...]
    """Of each member, in the order given; they add up to 1."""

    num_chunks: tuple[int, ...]
    """The shares in whole chunks; they add up to all chunks."""

    predicted_seconds: float
    """For the whole chunks, without the links' cost."""

    @property
    def num_reducers(self) -> int:
        """How many members have a part."""
        return sum(1 for count in self.num_chunks if count)


def partition(
    members: Sequence[MemberCapacity],
    *,
    contribution_bytes: int,
    num_chunks: int,
    config: PartitionConfig | None = None,
) -> Partition:
    """Share the chunks out among the members that may reduce."""
    config = config or PartitionConfig()
    reducers = _eligible(members)
    model = _model(members, contribution_bytes, config)
    shares = _best_shares(model, reducers, contribution_bytes, config)
    counts = round_shares(shares.tolist(), num_chunks)
    return Partition(
        shares=tuple(shares.tolist()),
        num_chunks=tuple(counts),
        predicted_seconds=_slowest_seconds(model, counts if num_chunks else shares.tolist()),
    )


def predicted_seconds(
    members: Sequence[MemberCapacity], num_chunks: Sequence[int], *, contribution_bytes: int, config: PartitionConfig
) -> float:
    """How long a round should take in which each member reduces so many chunks, without the links' cost."""
    return _slowest_seconds(_model(members, contribution_bytes, config), num_chunks)


def _model(members: Sequence[MemberCapacity], contribution_bytes: int, config: PartitionConfig) -> RoundModel:
    return RoundModel(
        members, contribution_bytes=contribution_bytes, default_bytes_per_second=config.default_bytes_per_second
    )


def _slowest_seconds(model: RoundModel, parts: Sequence[float]) -> float:
    total = math.fsum(parts)
    return float(model.seconds(np.array(parts) / total).max()) if total else 0.0  # a model without tensors


def round_shares(shares: Sequence[float], num_chunks: int) -> list[int]:
    """Whole numbers in proportion to the shares that add up to `num_chunks` (Hagenbach-Bischoff).

    Everybody first gets the whole chunks of its share; each chunk that is left goes to the reducer that then has the
    largest share per chunk. Ties go to the first, so that everybody who computes it gets the same.
    """
    total = math.fsum(shares)
    counts = [math.floor(share / total * num_chunks) for share in shares]
    while (left := num_chunks - sum(counts)) != 0:
        if left > 0:
            counts[max(range(len(shares)), key=lambda i: (shares[i] / (counts[i] + 1), -i))] += 1
        else:  # rounding up of the products above: take back from the reducer with the smallest share per chunk
            counts[min((i for i in range(len(shares)) if counts[i]), key=lambda i: (shares[i] / counts[i], i))] -= 1
    return counts


def _eligible(members: Sequence[MemberCapacity]) -> Mask:
    """Who may reduce."""
    if not any(member.sends for member in members):
        raise ConfigurationError(
            "nobody contributes to this round: it needs at least one trainer with values to average"
        )
    if sum(1 for member in members if member.receives) == 1:
        # Nothing has to travel to anybody else: a lone member reduces for itself, client peer or not.
        return np.array([member.sends or member.reduces for member in members])
    eligible = np.array([member.reduces for member in members])
    if not eligible.any():
        raise RetryableError(
            f"none of the {len(members)} members can reduce: all are client peers, which accept no connections. "
            "Start an aux peer on a machine that can be reached (potluck aux), or let one trainer accept connections"
        )
    return eligible


def _best_shares(model: RoundModel, eligible: Mask, contribution_bytes: int, config: PartitionConfig) -> Floats:
    """The optimal shares of the best set of reducers."""
    candidates = [
        _Candidate(optimum, config.seconds_per_link)
        for optimum in _ever_fewer(model, eligible)
        if optimum.shares[optimum.shares > 0.0].min() * contribution_bytes >= config.smallest_share_bytes
        or (optimum.shares > 0.0).sum() == 1
    ]
    limit = min(candidates[0].seconds, 1.05 * min(candidate.seconds for candidate in candidates))
    adding_seconds = model.num_senders * contribution_bytes / config.reduced_bytes_per_second

    def done(candidate: _Candidate) -> float:
        return candidate.reducing_seconds + adding_seconds * float(candidate.shares.max())

    return min((candidate for candidate in candidates if candidate.seconds <= limit), key=done).shares


class _Candidate:
    """A set of reducers with its shares, links counted."""

    def __init__(self, optimum: Optimum, seconds_per_link: float) -> None:
        self.shares = optimum.shares
        links_seconds = seconds_per_link * int((optimum.shares > 0.0).sum())
        self.seconds = optimum.seconds + links_seconds
        self.reducing_seconds = optimum.reducing_seconds + links_seconds


def _ever_fewer(model: RoundModel, eligible: Mask) -> Iterator[Optimum]:
    """The optimum of all reducers, and then of one less each time, down to one."""
    reducers = eligible
    while reducers.any():
        optimum = optimal_shares(model, reducers)
        yield optimum
        reducers = optimum.shares > 0.0
        reducers[np.where(reducers, optimum.shares, np.inf).argmin()] = False
