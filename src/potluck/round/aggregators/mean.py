"""The weighted mean, added up as contributions arrive: one sum in memory, whatever the number of senders.

Floating-point addition depends on the order, and the order of arrival is nobody's to repeat. So contributions are added
in the order of their senders' names: each when its turn has come, and those that arrive before their turn wait, still
encoded. Once all have arrived nothing is left to do but one division. A reducer that hands in a chunk only when it is
complete pays nothing for this; one that streams holds back at most what arrived early.

    mean = (w₁x₁ + w₂x₂ + …)/(w₁ + w₂ + …), in float32

For n senders the error is at most (n + 4)·2⁻²⁴ of the weighted mean of magnitudes. With one sender the result is that
sender's values, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from potluck.round.aggregators.base import Accumulator, Aggregator, Contribution
from potluck.round.codecs.base import add_weighted
from potluck.round.codecs.memory import scratch


class Mean(Aggregator):
    """Exact and fast; one poisoned contribution moves it anywhere."""

    name = "mean"

    def begin(self, elements: int, weights: Mapping[str, float]) -> Accumulator:
        """Start on a chunk."""
        return _MeanAccumulator(elements, weights)


class _MeanAccumulator(Accumulator):
    """A sum, and what arrived before its turn."""

    def __init__(self, elements: int, weights: Mapping[str, float]) -> None:
        super().__init__(elements, weights)
        self._sum = torch.empty(elements)
        self._included: list[str] = []
        self._early: dict[str, Contribution] = {}
        self._turn = 0

    def _add(self, peer: str, contribution: Contribution) -> None:
        self._early[peer] = contribution
        self._advance()

    def _drop(self, peer: str) -> None:
        self._advance()

    def _advance(self) -> None:
        """Take all contributions that are next in order."""
        while self._turn < len(self.order) and self.order[self._turn] in self._seen:
            self._include(self.order[self._turn])
            self._turn += 1

    def _include(self, peer: str) -> None:
        contribution = self._early.pop(peer, None)
        if contribution is None:
            return
        weight = self.relative[peer]
        if not self._included:
            if not self._decode(peer, contribution, self._sum):
                return
            if weight != 1.0:
                self._sum.mul_(weight)
        else:
            values = scratch("contribution", self.elements)
            if not self._decode(peer, contribution, values):
                return
            add_weighted(values, weight, self._sum)
        self._included.append(peer)

    def _finish(self, out: Tensor) -> tuple[str, ...]:
        for peer in self.order[self._turn :]:
            self._include(peer)
        self._turn = len(self.order)
        if self._included:
            total = math.fsum(self.relative[peer] for peer in self._included)
            torch.div(self._sum, total, out=out)
        return tuple(self._included)
