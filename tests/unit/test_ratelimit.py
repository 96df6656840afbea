"""How often somebody may try."""

from __future__ import annotations

import pytest

from potluck.hub.ratelimit import RateLimit
from potluck.sim.virtualclock import VirtualClock


def test_a_burst_and_then_as_time_passes():
    clock = VirtualClock()
    limit = RateLimit(burst=3, per_second=0.5, clock=clock)
    assert [limit.take("a") for _ in range(4)] == [True, True, True, False]
    assert limit.is_exhausted("a")
    assert limit.seconds_until_next("a") == pytest.approx(2.0)
    assert limit.take("b")
    clock.advance(2.0)
    assert [limit.take("a") for _ in range(2)] == [True, False]
    clock.advance(1000)
    assert [limit.take("a") for _ in range(4)] == [True, True, True, False]


def test_the_table_is_bounded():
    limit = RateLimit(burst=1, per_second=1, clock=VirtualClock(), max_keys=10)
    for number in range(100):
        limit.take(str(number))
    assert len(limit) == 10
    assert limit.is_exhausted("99")
    assert not limit.is_exhausted("0")
