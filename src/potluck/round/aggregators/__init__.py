"""How a reducer makes one chunk out of many: the weighted mean, and four that withstand poison, without weights.

    base.py       Aggregator and Accumulator, the interface
    mean.py       the weighted mean, added up as contributions arrive
    order.py      coordinate median and trimmed mean, by a sorting network
    clipping.py   centered clipping and median-norm clipping
    catalogue.py  from an AggregatorSpec to its Aggregator

The result is a function of who contributed what, never of when it arrived: contributions are taken in the order of
their senders' names. Only element-wise IEEE operations, maxima and sums in a fixed tree are used, each rounded on its
own. So an audit that recomputes a chunk from the same frames reaches the same bits, on any hardware.
"""

from __future__ import annotations

from potluck.round.aggregators.base import Accumulator, Aggregated, Aggregator
from potluck.round.aggregators.catalogue import aggregator_for
from potluck.round.plan.specs import AGGREGATOR_NAMES, AggregatorSpec

__all__ = [
    "AGGREGATOR_NAMES",
    "Accumulator",
    "Aggregated",
    "Aggregator",
    "AggregatorSpec",
    "aggregator_for",
]
