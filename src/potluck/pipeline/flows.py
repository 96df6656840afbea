"""How many micro-batches go from each server to each other: rates out of counts that peers tell now and then. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

LEAST_SECONDS = 1.0  # between two counts that give a rate
FORGET_SECONDS = 15.0  # a peer that says nothing for so long sends nothing

Way = tuple[str, str, int]
"""From a peer to a peer, into a stage."""


@dataclass
class FlowMeter:
    """What the conductor knows of the ways that micro-batches take."""

    _counts: dict[str, tuple[float, dict[tuple[str, int], int]]] = field(default_factory=dict)
    _rates: dict[str, dict[tuple[str, int], float]] = field(default_factory=dict)

    def heard(self, source: str, counts: Mapping[tuple[str, int], int], now: float) -> None:
        """A peer says how many it has sent so far, by target and stage. Counts may begin anew."""
        since, before = self._counts.get(source, (now, {}))
        if source in self._counts and now - since < LEAST_SECONDS:
            return
        self._counts[source] = (now, dict(counts))
        if now > since:
            self._rates[source] = {
                way: (count - before.get(way, 0) if count >= before.get(way, 0) else count) / (now - since)
                for way, count in counts.items()
            }

    def gone(self, peer: str) -> None:
        """A peer is gone."""
        self._counts.pop(peer, None)
        self._rates.pop(peer, None)

    def per_second(self, now: float, present: Iterable[str]) -> dict[Way, float]:
        """Micro-batches per second on every way between those who are here."""
        there = set(present)
        return {
            (source, target, stage): rate
            for source, ways in self._rates.items()
            if source in there and now - self._counts[source][0] < FORGET_SECONDS
            for (target, stage), rate in ways.items()
            if rate > 0 and target in there
        }
