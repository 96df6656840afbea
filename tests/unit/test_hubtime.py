from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.peer.hubtime import HubTime

legs = st.floats(0.0001, 2.0)


def test_unknown_before_the_first_answer() -> None:
    assert not HubTime().is_known
    with pytest.raises(RuntimeError, match="not known"):
        HubTime().at(0.0)


@given(st.lists(st.tuples(legs, legs), min_size=1, max_size=20), st.floats(-1e6, 1e6))
def test_the_estimate_is_within_its_stated_uncertainty(trips: list[tuple[float, float]], ahead: float) -> None:
    time, now = HubTime(), 1000.0
    for there, back in trips:
        hub_wall = now + there + ahead
        time.observe(sent_monotonic=now, received_monotonic=now + there + back, hub_wall=hub_wall)
        now += there + back + 1.0
    assert abs(time.at(now) - (now + ahead)) <= time.uncertainty_seconds + 1e-6


def test_a_wrong_clock_is_told() -> None:
    time = HubTime()
    time.observe(sent_monotonic=10.0, received_monotonic=10.2, hub_wall=5_000.0)
    assert time.clock_error_seconds(monotonic=10.1, wall=5_600.0) == pytest.approx(600.0)


def test_after_doubt_the_next_answer_alone_counts() -> None:
    time = HubTime()
    time.observe(sent_monotonic=10.0, received_monotonic=10.001, hub_wall=5_000.0)
    time.doubt()
    assert time.at(11.0) == pytest.approx(5_001.0, abs=0.01)  # the old estimate, while there is no other
    time.observe(sent_monotonic=20.0, received_monotonic=22.0, hub_wall=9_000.0)
    assert time.at(21.0) == pytest.approx(9_000.0)
    time.observe(sent_monotonic=30.0, received_monotonic=30.5, hub_wall=9_009.25)
    assert time.at(31.0) == pytest.approx(9_010.0)
    assert time.uncertainty_seconds == pytest.approx(0.25)
