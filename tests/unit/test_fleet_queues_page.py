"""What the dashboard's pages of queues and the value network are made of."""

from __future__ import annotations

import pytest

from potluck.hub.queues import QueueDefinition, QueueDepth
from potluck.monitor.fleetqueues import QueueSeries, ValueSeries


def depth(num_put: int, items: int) -> QueueDepth:
    return QueueDepth(definition=QueueDefinition(name="jobs"), num_put=num_put, items=items)


def test_rates_are_those_of_the_last_seconds() -> None:
    series = QueueSeries(depth(0, 0))
    assert series.rates == (0.0, 0.0)
    series.add(0.0, depth(0, 0))
    series.add(100.0, depth(1000, 1000))  # long ago
    series.add(105.0, depth(1100, 1050))
    series.add(110.0, depth(1150, 1010))
    assert series.rates == pytest.approx((15.0, 14.0))
    series.add(111.0, depth(5, 5))  # removed and made anew
    assert series.rates[0] == 0.0


def test_a_value_network_is_followed_by_head() -> None:
    series = ValueSeries("value")
    heads = {"anna/cartpole/mlp": {"num_fragments": 3}, "bert/\x1bacrobot/gru": {"num_fragments": 1}}
    statistics = {
        "error/anna/cartpole/mlp": 0.5,
        "fragments/learnt": 3,
        "fragments/too_old": 1,
        "fragments/staleness": 6,
    }
    series.add(1.0, {"number": 4, "heads": heads, "statistics": statistics})
    assert (series.number, series.staleness) == (4, 1.5)
    assert [*series.heads["anna/cartpole/mlp"].points] == [(1.0, 0.5)]
    assert not any("\x1b" in name for name in series.heads)
    with pytest.raises((KeyError, TypeError)):
        series.add(2.0, {"number": 5, "heads": {"a": 1}, "statistics": {}})
