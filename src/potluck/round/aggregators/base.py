"""What an aggregator is: contributions to one chunk in, one chunk out.

    accumulator = aggregator.begin(elements, weights)    weights of all senders that may contribute
    accumulator.add(peer, contribution)                  in any order, encoded or as values
    outcome = accumulator.result(out)                    who is in it, and who was refused and why

A contribution that is not finite, or does not decode, is left out and named in the outcome. A sender that never adds
is simply not in it. The unit is a chunk: an aggregator that looks at norms (clipping.py) looks at each chunk's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from potluck.errors import ConfigurationError, PeerError
from potluck.round.codecs import EncodedChunk
from potluck.round.codecs.base import require_finite
from potluck.round.codecs.reductions import MAX_FLOAT32, is_finite
from potluck.round.plan.specs import AggregatorSpec

Contribution = Tensor | EncodedChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregated:
    """What went into a result."""

    contributors: tuple[str, ...]
    weight: float
    """The sum of the contributors' weights."""

    rejected: Mapping[str, str] = field(default_factory=dict)
    """The contribution that was left out, and why."""


class Aggregator(ABC):
    """One way to aggregate. Instances hold no state and may be used by many threads at once."""

    name: str

    def __init__(self, spec: AggregatorSpec) -> None:
        self.spec = spec

    @abstractmethod
    def begin(self, elements: int, weights: Mapping[str, float]) -> Accumulator:
        """Start on a chunk; `weights` names everybody who may contribute, each with a positive weight."""

    def aggregate(
        self, contributions: Mapping[str, Contribution], weights: Mapping[str, float], out: Tensor
    ) -> Aggregated:
        """All at once."""
        accumulator = self.begin(out.numel(), weights)
        for peer in sorted(contributions):
            accumulator.add(peer, contributions[peer])
        return accumulator.result(out)


class Accumulator(ABC):
    """One chunk in the making. Used by one thread at a time."""

    def __init__(self, elements: int, weights: Mapping[str, float]) -> None:
        for peer, weight in weights.items():
            if not 0.0 < weight < math.inf:
                raise ConfigurationError(f"{peer} has a weight of {weight}: only positive weights can contribute")
        self.elements = elements
        self.weights = dict(weights)
        self.order = sorted(weights)
        # Relative to the heaviest, so that equal weights are exactly one and cost no multiplication.
        heaviest = max(weights.values(), default=1.0)
        self.relative = {peer: weight / heaviest for peer, weight in weights.items()}
        self._seen: set[str] = set()
        self._rejected: dict[str, str] = {}

    def add(self, peer: str, contribution: Contribution) -> None:
        """One sender's values. They must stay unchanged until `result` has returned."""
        if peer not in self.weights:
            raise ValueError(f"{peer} is not among the senders of this chunk")
        if peer in self._seen:
            raise ValueError(f"{peer} has already contributed to this chunk")
        self._seen.add(peer)
        self._add(peer, contribution)

    def drop(self, peer: str) -> None:
        """Do not wait for this sender any more; what it has contributed already stays in."""
        if peer not in self._seen:
            self._seen.add(peer)
            self._drop(peer)

    def result(self, out: Tensor) -> Aggregated:
        """Put the aggregate into `out`. Senders that did not contribute are not in it. Ends the accumulator's use."""
        contributors = self._finish(out)
        if not contributors:
            refused = "; ".join(f"{peer}: {why}" for peer, why in sorted(self._rejected.items()))
            raise PeerError(f"nobody's values can be used for this chunk ({refused or 'none came'}): do it again")
        if not is_finite(out):  # all values were, but sums of the largest float32 overflowed: saturate
            out.nan_to_num_(nan=0.0, posinf=MAX_FLOAT32, neginf=-MAX_FLOAT32)
        return Aggregated(
            contributors=contributors,
            weight=math.fsum(self.weights[peer] for peer in contributors),
            rejected=self._rejected,
        )

    @abstractmethod
    def _add(self, peer: str, contribution: Contribution) -> None: ...

    @abstractmethod
    def _drop(self, peer: str) -> None: ...

    @abstractmethod
    def _finish(self, out: Tensor) -> tuple[str, ...]:
        """Fill `out`; return the members with values in it, in order."""

    def _decode(self, peer: str, contribution: Contribution, out: Tensor) -> bool:
        """The contribution's values into `out`; False where it is refused."""
        try:
            if isinstance(contribution, EncodedChunk):
                contribution.decode_into(out)
            else:
                require_finite(contribution)
                out.copy_(contribution)
        except PeerError as error:
            self._rejected[peer] = str(error)
            return False
        return True


class CollectingAccumulator(Accumulator):
    """For aggregators that must see all contributions at once: holds them as float32, 4 bytes × senders a value.

    These are the robust ones, and none of them looks at weights: what a sender says of itself buys no influence.
    """

    def __init__(self, elements: int, weights: Mapping[str, float]) -> None:
        super().__init__(elements, weights)
        self._rows: dict[str, Tensor] = {}

    def _add(self, peer: str, contribution: Contribution) -> None:
        row = torch.empty(self.elements)
        if self._decode(peer, contribution, row):
            self._rows[peer] = row

    def _drop(self, peer: str) -> None:
        pass  # nothing waits for anybody before the end

    def _finish(self, out: Tensor) -> tuple[str, ...]:
        contributors = tuple(peer for peer in self.order if peer in self._rows)
        if contributors:
            self._combine([self._rows[peer] for peer in contributors], out)
        return contributors

    @abstractmethod
    def _combine(self, rows: list[Tensor], out: Tensor) -> None:
        """The aggregate of the rows, at least one, which may be spoilt."""
