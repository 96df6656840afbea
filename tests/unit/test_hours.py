"""Hours of the day at which a machine may train."""

from __future__ import annotations

from datetime import datetime, time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ConfigurationError
from potluck.training.trainer.hours import Hours


def at(clock: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-16T{clock}")


@pytest.mark.parametrize(
    ("hours", "clock", "opens", "closes"),
    [
        ("22:00-07:00", "21:59:00", 60.0, 0.0),
        ("22:00-07:00", "22:00:00", 0.0, 9 * 3600.0),
        ("22:00-07:00", "06:59:30", 0.0, 30.0),
        ("22:00-07:00", "07:00:00", 15 * 3600.0, 0.0),
        ("9:30 - 17:00", "09:29:59", 1.0, 0.0),
        ("9:30-17:00", "16:00:00", 0.0, 3600.0),
        ("18:00-24:00", "23:00:00", 0.0, 3600.0),
        ("18:00-24:00", "00:00:00", 18 * 3600.0, 0.0),
    ],
)
def test_when_it_is_open(hours: str, clock: str, opens: float, closes: float) -> None:
    found = Hours.parse(hours)
    assert (found.seconds_until_open(at(clock)), found.seconds_until_close(at(clock))) == (opens, closes)
    assert found.is_open(at(clock)) == (opens == 0.0)


@pytest.mark.parametrize("text", ["", "at night", "22:00", "25:00-07:00", "22:61-07:00", "07:00-07:00", "22-7"])
def test_hours_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--schedule"):
        Hours.parse(text)


@given(st.times(), st.times(), st.datetimes())
def test_it_is_either_open_or_not(begin: time, end: time, now: datetime) -> None:
    begin, end = begin.replace(second=0, microsecond=0), end.replace(second=0, microsecond=0)
    if begin != end:
        hours = Hours(begin, end)
        assert (hours.seconds_until_open(now) == 0.0) != (hours.seconds_until_close(now) == 0.0)
        assert Hours.parse(str(hours)) == hours
