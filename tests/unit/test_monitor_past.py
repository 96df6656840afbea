"""The history of a run in memory: downsampling keeps what matters, pages may come in any order."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ConfigurationError, ProtocolError
from potluck.monitor.past import Past
from potluck.monitor.series import downsample
from potluck.training.books.history import KEPT_ROUNDS, PAGE_POINTS, POINT, HistoryLog, Points, RoundRecord, read_points

finite = st.floats(-1e6, 1e6, width=32)


def points(count: int, start: int = 0) -> Points:
    made = np.zeros(count, POINT)
    made["at"] = 1_000_000.0 + np.arange(start, start + count)
    made["epoch"] = np.arange(start, start + count)
    made["loss"] = 1.0 / (1 + np.arange(start, start + count))
    return made


@given(st.lists(st.tuples(finite, finite | st.just(float("nan"))), max_size=300), st.integers(1, 40))
def test_a_downsampled_series_shows_the_course_and_every_spike(pairs: list[tuple[float, float]], buckets: int) -> None:
    x = np.array([one for one, _ in pairs], np.float64)
    y = np.array([other for _, other in pairs], np.float64)
    series = downsample(x, y, buckets)
    known = y[np.isfinite(y)]
    assert len(series) <= buckets or len(known) <= buckets
    assert (np.diff(series.x) >= 0).all()
    assert (series.low <= series.mean).all()
    assert (series.mean <= series.high).all()
    if len(known):
        assert series.high.max() == known.max()
        assert series.low.min() == known.min()
        assert series.x.min() >= x.min()
        assert series.x.max() <= x.max()
    else:
        assert not len(series)


@given(st.lists(finite, min_size=1, max_size=30))
def test_few_points_are_shown_as_they_are(values: list[float]) -> None:
    series = downsample(np.arange(len(values)), np.array(values), 30)
    assert series.mean.tolist() == values


def test_all_points_at_one_place() -> None:
    series = downsample(np.full(100, 7.0), np.arange(100.0), 10)
    assert (series.x.tolist(), series.low.tolist(), series.high.tolist()) == ([7.0], [0.0], [99.0])
    with pytest.raises(ConfigurationError):
        downsample(np.zeros(1), np.zeros(1), 0)


@given(st.integers(0, 3 * PAGE_POINTS), st.randoms(use_true_random=False))
def test_pages_come_in_any_order(count: int, random) -> None:  # type: ignore[no-untyped-def]
    every = points(count)
    past = Past()
    pages = [(number, every[number * PAGE_POINTS : (number + 1) * PAGE_POINTS]) for number in range(4)]
    random.shuffle(pages)
    for number, page in pages:
        if len(page):
            past.put(number, page)
    assert past.points["epoch"].tolist() == list(range(count))


def test_a_page_that_is_missing_leaves_a_gap() -> None:
    past = Past()
    past.put(2, points(3, 2 * PAGE_POINTS))
    assert past.points["epoch"].tolist() == [512, 513, 514]
    past.put(0, points(PAGE_POINTS))
    assert len(past.points) == PAGE_POINTS + 3
    past.put(1, points(PAGE_POINTS, PAGE_POINTS))
    assert len(past.points) == 2 * PAGE_POINTS + 3
    past.put(-1, points(1))
    past.put(1 << 40, points(1))
    assert len(past.points) == 2 * PAGE_POINTS + 3


def test_the_tail_is_replaced_as_it_grows() -> None:
    past = Past()
    for count in (1, 2, 5):
        past.put(0, points(count))
    assert len(past) == 5
    assert past.series("loss", "epoch").mean[0] == 1.0
    assert past.loss_at(1) == 0.5
    assert past.loss_at(-1) is None
    assert past.total("sent_bytes") == 0.0
    assert past.started_at() == 1_000_000.0


def test_a_million_points() -> None:
    past = Past()
    every = points(1_000_000)
    for number in range(-(-len(every) // PAGE_POINTS)):
        past.put(number, every[number * PAGE_POINTS : (number + 1) * PAGE_POINTS])
    started = time.monotonic()
    series = past.series("loss", "epoch", 500)
    seconds = time.monotonic() - started
    assert len(series) == 500
    assert series.high.max() == 1.0
    assert past.series("loss", "epoch", 500) is series  # nobody computes it again for the next page
    print(f"a million points as 500: {seconds:.3f} s")


def test_only_the_newest_rounds_are_kept() -> None:
    past = Past()
    for epoch in range(1, KEPT_ROUNDS + 11):
        past.put_round(RoundRecord(epoch=epoch, committed_at=float(epoch), seconds=1.0))
    rounds = past.rounds()
    assert (rounds[0].epoch, rounds[-1].epoch, len(rounds)) == (11, KEPT_ROUNDS + 10, KEPT_ROUNDS)
    assert [record.epoch for record in past.rounds(2)] == [KEPT_ROUNDS + 9, KEPT_ROUNDS + 10]


def test_a_log_turns_its_pages_and_another_goes_on_with_it() -> None:
    log, written = HistoryLog(), {}
    figures = dict.fromkeys(POINT.names or (), 0.0)
    for number in range(2 * PAGE_POINTS + 5):
        log.append(**{**figures, "at": 1.0 + number})
        if (page := log.complete_page()) is not None:
            written[page[0]] = page[1]
            log.turn_page()
        log = HistoryLog.of(log.tail())
    assert sorted(written) == ["page.0", "page.1"]
    assert read_points(written["page.1"])["at"].tolist() == [1.0 + PAGE_POINTS + n for n in range(PAGE_POINTS)]
    assert (log.page, len(log.points)) == (2, 5)
    with pytest.raises(ProtocolError):
        read_points(b"x")
