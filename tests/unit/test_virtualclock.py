from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.clock import Clock
from potluck.sim.virtualclock import TimerSchedule, VirtualClock


def test_the_clock_stands_still_until_it_is_advanced() -> None:
    clock = VirtualClock()
    as_seen_by_product_code: Clock = clock
    before, wall_before = as_seen_by_product_code.monotonic(), as_seen_by_product_code.wall()
    assert clock.monotonic() == before
    clock.advance(2.5)
    assert clock.monotonic() == before + 2.5
    assert clock.wall() == wall_before + 2.5


def test_time_does_not_go_back() -> None:
    clock = VirtualClock()
    for seconds in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="cannot go back"):
            clock.advance(seconds)


def test_setting_the_wall_clock_leaves_monotonic_time_alone() -> None:
    clock = VirtualClock()
    before = clock.monotonic()
    clock.set_wall(5.0)
    assert clock.wall() == 5.0
    assert clock.monotonic() == before


def test_timers_run_at_their_own_time_in_order() -> None:
    clock = VirtualClock(monotonic_offset_seconds=100.0)
    seen: list[tuple[str, float]] = []
    clock.call_at(103.0, lambda: seen.append(("late", clock.monotonic())))
    clock.call_later(1.0, lambda: seen.append(("early", clock.monotonic())))
    clock.call_later(1.0, lambda: seen.append(("second", clock.monotonic())))
    assert clock.advance(2.0) == 2
    assert seen == [("early", 101.0), ("second", 101.0)]
    assert clock.advance(1.0) == 1
    assert seen[-1] == ("late", 103.0)


def test_a_timer_that_sets_another_one_is_followed_within_the_same_advance() -> None:
    clock = VirtualClock()
    ticks: list[float] = []

    def tick() -> None:
        ticks.append(clock.schedule.now())
        clock.call_later(1.0, tick)

    clock.call_later(1.0, tick)
    clock.advance(3.5)
    assert ticks == [1.0, 2.0, 3.0]


def test_a_cancelled_timer_does_not_run_and_is_not_next() -> None:
    schedule = TimerSchedule()
    ran: list[str] = []
    first = schedule.call_later(1.0, lambda: ran.append("first"))
    second = schedule.call_later(2.0, lambda: ran.append("second"))
    first.cancel()
    first.cancel()
    assert not first.pending
    assert schedule.next_at() == 2.0
    assert schedule.run_next()
    assert ran == ["second"]
    assert not second.pending
    assert not schedule.run_next()


def test_a_call_for_the_past_is_made_now() -> None:
    schedule = TimerSchedule(start=10.0)
    times: list[float] = []
    schedule.call_at(3.0, lambda: times.append(schedule.now()))
    schedule.run_until(10.0)
    assert times == [10.0]


def test_a_call_at_no_time_is_refused() -> None:
    for when in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="cannot be made"):
            TimerSchedule().call_at(when, list)


def test_an_error_comes_out_and_the_rest_can_go_on() -> None:
    schedule = TimerSchedule()
    ran: list[str] = []

    def fail() -> None:
        raise RuntimeError("as planned")

    schedule.call_later(1.0, fail)
    schedule.call_later(2.0, lambda: ran.append("after"))
    with pytest.raises(RuntimeError, match="as planned"):
        schedule.run_until(5.0)
    assert schedule.now() == 1.0
    schedule.run_until(5.0)
    assert ran == ["after"]


def test_a_call_cannot_move_the_time_it_runs_in() -> None:
    clock = VirtualClock()
    clock.call_later(1.0, lambda: clock.advance(1.0))
    clock.call_later(1.5, list)
    with pytest.raises(RuntimeError, match="move the time"):
        clock.advance(3.0)


def test_running_until_idle_counts_and_gives_up() -> None:
    schedule = TimerSchedule()
    schedule.call_later(1.0, lambda: schedule.call_later(1.0, list))
    assert schedule.run_until_idle() == 2
    assert schedule.now() == 2.0

    def again() -> None:
        schedule.call_later(1.0, again)

    again()
    with pytest.raises(RuntimeError, match="not idle after 100 calls"):
        schedule.run_until_idle(max_calls=100)


def test_two_clocks_on_one_schedule_disagree_about_the_hour_only() -> None:
    schedule = TimerSchedule()
    right, wrong = VirtualClock(schedule), VirtualClock(schedule, wall_offset_seconds=0.0)
    right.advance(7.0)
    assert wrong.wall() == 7.0
    assert wrong.monotonic() == right.monotonic()


@given(st.lists(st.floats(min_value=0, max_value=1e6), max_size=30), st.lists(st.floats(0, 1e5), max_size=10))
def test_every_call_is_made_once_in_order_and_never_early(delays: list[float], steps: list[float]) -> None:
    schedule = TimerSchedule()
    made: list[tuple[float, int]] = []
    for order, delay in enumerate(delays):
        schedule.call_later(delay, lambda due=delay, order=order: made.append((due, order)))
    for step in steps:
        schedule.run_until(schedule.now() + step)
        assert all(due <= schedule.now() for due, _ in made)
        assert len(made) == sum(delay <= schedule.now() for delay in delays)
    schedule.run_until_idle()
    assert made == sorted((delay, order) for order, delay in enumerate(delays))
