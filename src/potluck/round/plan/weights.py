"""How much of a claimed weight counts (pure): the coordinator's cap on what peers say of themselves.

A weight is the number of samples that a sender says it has; nobody can recount them. So a claim counts up to

    min(cap, allowance) × the median of what the other contributors usually give to an epoch

What somebody *usually* gives is the moving mean of what counted of it in the epochs that it took part in, as commits
say: so every peer that may coordinate has the same book, and one epoch that was cut short changes little. Newcomers are
measured against those who were there before; only where there are none, against each other. In a run's very first
epoch that says little, for somebody may have begun a moment ago: there a claim also counts up to twice the batch that
all are to make together, where the run has one.

The *allowance* is for runs whose shards are on lease. How many shards a peer has taken per second, against the others,
says how fast it is; over time no more counts than twice that, and twice the median of all
(training/books/shardbook.py). It fills a bucket by epochs, which holds one capped claim: honest counts
differ eightfold from one epoch to the next. Without a ledger the bucket is always full.

Peers that the organisers trust are exempt, and a run may turn the cap off. While fewer than half of the others lie,
their median lies within what honest peers give, so that one liar's share of n contributors of equal speed is at most
cap/(cap + n − 1). That is much; what may not be bought at all needs a robust aggregator.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from statistics import median

from potluck.errors import ConfigurationError
from potluck.round.plan.messages import Commit

DEFAULT_CAP = 16.0  # honest peers of speed 1 : 10 are not cut
NEWEST = 0.2  # the weight of the newest epoch in what somebody usually gives
KEPT_PEERS = 512
FIRST_BATCHES = 2.0  # who made an epoch alone has its batch, and what it added while others were waited for


def check_cap(cap: float | None) -> None:
    """ConfigurationError where a cap would cut ordinary peers."""
    if cap is not None and not cap >= 1.0:
        raise ConfigurationError(f"a weight cap of {cap} medians would cut ordinary peers: take 1 or more")


class WeightBook:
    """What peers usually give to an epoch, and how much of the next claims counts."""

    def __init__(self) -> None:
        self.allowances: Mapping[str, float] = {}
        """How many medians a peer may give to an epoch over time, by its measured speed; who is missing: the cap."""
        self._usual: dict[str, float] = {}  # by peer; who took part last stands last
        self._spent: dict[str, float] = {}  # of the bucket, in medians

    def committed(self, commit: Commit, cap: float | None) -> None:
        """An epoch is final: what counted in it is what its members give."""
        given = {member.peer: member.weight for member in commit.members if member.weight > 0}
        typical = self._typical(given)
        for peer in {*self._spent, *given}:
            medians = given.get(peer, 0.0) / (typical(peer) or math.inf)
            self._spent[peer] = self._spent.get(peer, 0.0) + medians - self._refill(peer, cap)
        self._spent = {peer: min(spent, cap or 0.0) for peer, spent in self._spent.items() if spent > 0.0}
        for peer, weight in given.items():
            before = self._usual.pop(peer, weight)
            self._usual[peer] = before + NEWEST * (weight - before)
        while len(self._usual) > KEPT_PEERS:
            del self._usual[next(iter(self._usual))]

    def counted(
        self, claims: Mapping[str, float], *, cap: float | None, exempt: Collection[str], batch: float = 0.0
    ) -> dict[str, float]:
        """How much of each claim counts; `exempt` peers are believed. `batch` is an epoch's samples of all; 0: open."""
        if cap is None:
            return dict(claims)
        typical = self._typical(claims)
        least = 0.0 if self._usual else FIRST_BATCHES * batch

        def limit(peer: str) -> float:
            others_give = typical(peer)
            if others_give is None:
                return math.inf  # nobody to measure it by
            return max(others_give * max(cap - self._spent.get(peer, 0.0), 1.0), least)

        return {peer: claim if peer in exempt else min(claim, limit(peer)) for peer, claim in claims.items()}

    def _typical(self, claims: Mapping[str, float]) -> Callable[[str], float | None]:
        """What the others than a peer give: those who did before, or else who else is here, or else who was."""
        known = Medians({peer: max(claim, self._usual[peer]) for peer, claim in claims.items() if peer in self._usual})
        here, once = Medians(claims), Medians(self._usual)

        def typical(peer: str) -> float | None:
            if (found := known.without(peer)) is not None:
                return found
            if (found := here.without(peer)) is not None:
                # An earlier member is not cut because newcomers have just begun.
                return max(found, self._usual.get(peer, 0.0))
            return once.without(peer)

        return typical

    def _refill(self, peer: str, cap: float | None) -> float:
        """How many medians come into a peer's bucket with each epoch."""
        if cap is None or peer not in self.allowances:
            return math.inf
        return min(max(self.allowances[peer], 1.0), cap)


class Medians:
    """What several peers give, and the median of all but one."""

    def __init__(self, given: Mapping[str, float]) -> None:
        self._given = given
        self._sorted = sorted(given.values())

    def __len__(self) -> int:
        return len(self._sorted)

    def without(self, peer: str) -> float | None:
        """None where nobody is left."""
        values = self._sorted
        if peer in self._given:
            position = bisect_left(values, self._given[peer])
            values = values[:position] + values[position + 1 :]
        return median(values) if values else None
