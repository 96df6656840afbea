"""From an aggregator's name in a plan to the aggregator."""

from __future__ import annotations

from functools import lru_cache

from potluck.round.aggregators.base import Aggregator
from potluck.round.aggregators.clipping import CenteredClipping, MedianNormClipping
from potluck.round.aggregators.mean import Mean
from potluck.round.aggregators.order import CoordinateMedian, TrimmedMean
from potluck.round.plan.specs import AggregatorSpec

_AGGREGATORS: dict[str, type[Aggregator]] = {
    kind.name: kind for kind in (Mean, CoordinateMedian, TrimmedMean, CenteredClipping, MedianNormClipping)
}


@lru_cache(maxsize=64)
def aggregator_for(spec: AggregatorSpec) -> Aggregator:
    """The aggregator that the spec names."""
    return _AGGREGATORS[spec.name](spec)
