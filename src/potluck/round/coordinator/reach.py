"""Which members of a round reach each other, and who should reduce then (pure).

Bytes move only between a reducer and everybody else: two members that do not reach each other do no harm unless one of
them reduces. So a broken link takes parts away from reducers rather than members out of the round. Only where no
reducer reaches everybody somebody has to go, and then as few as possible.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """The possible reducers, and the members that must be left out for them."""

    reducers: frozenset[int]
    lost: frozenset[int]


class Reach:
    """The links of a round that are known to be broken."""

    def __init__(self) -> None:
        self._broken: set[frozenset[int]] = set()

    def broke(self, one: int, other: int) -> bool:
        """Nothing gets through between these two; whether that is news."""
        pair = frozenset((one, other))
        is_news = pair not in self._broken
        self._broken.add(pair)
        return is_news

    def partners(self, member: int, among: Collection[int]) -> frozenset[int]:
        """Those of these members that do not reach that one."""
        return frozenset(other for pair in self._broken if member in pair for other in pair - {member}) & set(among)

    def choose(self, candidates: Collection[int], weights: Mapping[int, float]) -> Choice:
        """The reducers that lose fewest members; among equals, those with the smallest weight.

        `weights` are those of all who want the averages; the candidates are some of them.
        """
        partners = {index: self.partners(index, weights) for index in candidates}

        def cost(index: int) -> tuple[int, float, int]:
            lost = partners[index]
            return len(lost), sum(weights[other] for other in lost), index

        best = min(candidates, key=cost, default=None)
        lost = partners[best] if best is not None else frozenset()
        return Choice(frozenset(index for index in candidates if index not in lost and partners[index] <= lost), lost)
