"""From an aggregator's name in a plan to the aggregator."""

from __future__ import annotations

from functools import lru_cache

from potluck.errors import ConfigurationError
from potluck.round.aggregators.base import Aggregator, AggregatorSpec
from potluck.round.aggregators.clipping import CenteredClipping, MedianNormClipping
from potluck.round.aggregators.mean import Mean
from potluck.round.aggregators.order import CoordinateMedian, TrimmedMean

_AGGREGATORS: dict[str, type[Aggregator]] = {
    kind.name: kind for kind in (Mean, CoordinateMedian, TrimmedMean, CenteredClipping, MedianNormClipping)
}
AGGREGATOR_NAMES = tuple(_AGGREGATORS)


@lru_cache(maxsize=64)
def aggregator_for(spec: AggregatorSpec) -> Aggregator:
    """The aggregator that the spec names; ConfigurationError for one that this version does not have."""
    kind = _AGGREGATORS.get(spec.name)
    if kind is None:
        raise ConfigurationError(f"there is no aggregator {spec.name!r}: choose one of {', '.join(AGGREGATOR_NAMES)}")
    return kind(spec)
