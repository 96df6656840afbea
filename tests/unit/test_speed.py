"""The meter is fed by a simulated link: what it says must be the link's rate, however slow, fast or idle."""

from __future__ import annotations

import pytest

from potluck.link.limits import KIB, MIB
from potluck.link.speed import SpeedMeter, Transfer

MBIT = 125_000.0


def transfer(
    meter: SpeedMeter, *, start: float, rate: float, total: int, piece: int, latency: float = 0.0, told: float = 0.0
) -> float:
    """Move `total` bytes in pieces, each seen a latency after it went through; return when it ended."""
    meter.begin(start, latency_seconds=told)
    now = start
    for index in range(total // piece):
        now = start + (index + 1) * piece / rate + latency
        meter.moved(piece, now)
    meter.end()
    return now


@pytest.mark.parametrize(
    ("rate", "piece"), [(1 * MBIT, 512 * KIB), (1 * MBIT, 16 * KIB), (100 * MBIT, 512 * KIB), (1e9, 512 * KIB)]
)
def test_one_transfer_shows_the_rate(rate: float, piece: int) -> None:
    meter = SpeedMeter()
    end = transfer(meter, start=5.0, rate=rate, total=16 * MIB, piece=piece)
    assert meter.bytes_per_second(end) == pytest.approx(rate)
    assert meter.total_bytes == 16 * MIB


@pytest.mark.parametrize(("rate", "burst"), [(1 * MBIT, 1 * MIB), (100 * MBIT, 4 * MIB), (1e9, 64 * MIB)])
def test_pauses_between_transfers_do_not_count(rate: float, burst: int) -> None:
    meter = SpeedMeter()
    now = 0.0
    for _ in range(10):
        now = transfer(meter, start=now, rate=rate, total=burst, piece=512 * KIB) + 100.0
        assert meter.bytes_per_second(now) == pytest.approx(rate)


def test_a_long_wait_for_a_piece_on_a_slow_link_is_not_a_pause() -> None:
    """At 1 Mbit/s half a megabyte takes more than four seconds: whenever one looks, the answer is the same."""
    meter = SpeedMeter()
    meter.begin(0.0)
    seconds = 512 * KIB / MBIT
    for index in range(6):
        for share in (0.1, 0.5, 0.999):
            seen = meter.bytes_per_second((index + share) * seconds)
            assert seen is None if index == 0 else seen == pytest.approx(MBIT)
        meter.moved(512 * KIB, (index + 1) * seconds)


def test_a_piece_that_is_overdue_lowers_the_speed() -> None:
    meter = SpeedMeter()
    meter.begin(0.0)
    for index in range(8):
        meter.moved(512 * KIB, (index + 1) * 1.0)
    assert meter.bytes_per_second(9.0) == pytest.approx(512 * KIB)
    slowing = [meter.bytes_per_second(8.0 + waited) or 0.0 for waited in (1.0, 3.0, 10.0, 100.0)]
    assert slowing == sorted(slowing, reverse=True)
    assert slowing[-1] < 512 * KIB / 10


def test_the_speed_follows_a_change_of_the_link() -> None:
    meter = SpeedMeter()
    end = transfer(meter, start=0.0, rate=100 * MBIT, total=256 * MIB, piece=512 * KIB)
    end = transfer(meter, start=end, rate=10 * MBIT, total=64 * MIB, piece=512 * KIB)
    assert meter.bytes_per_second(end) == pytest.approx(10 * MBIT, rel=0.1)


def test_the_round_trip_before_the_first_acknowledgement_is_taken_off() -> None:
    """Bursts of 2.5 MB at 100 Mbit/s take 0.2 s; with 0.1 s of latency a naive meter would see two thirds."""
    meter = SpeedMeter()
    now = 0.0
    for _ in range(5):
        now = transfer(meter, start=now, rate=100 * MBIT, total=40 * 64 * KIB, piece=64 * KIB, latency=0.1, told=0.1)
        now += 1.0
    assert meter.bytes_per_second(now) == pytest.approx(100 * MBIT, rel=0.05)


def test_small_talk_says_nothing_about_speed() -> None:
    meter = SpeedMeter()
    for index in range(100):
        transfer(meter, start=index, rate=1e6, total=1000, piece=1000, latency=0.05)
    assert meter.bytes_per_second(200.0) is None
    end = transfer(meter, start=200.0, rate=1e6, total=8 * MIB, piece=512 * KIB)
    for index in range(100):
        transfer(meter, start=end + index, rate=1e6, total=1000, piece=1000, latency=0.05)
    assert meter.bytes_per_second(end + 200.0) == pytest.approx(1e6)


def test_transfers_side_by_side_add_up() -> None:
    total, first, second = SpeedMeter(), SpeedMeter(), SpeedMeter()
    one, other = Transfer(first, total), Transfer(second, total)
    one.update(True, 0.0)
    other.update(True, 0.0)
    for step in range(1, 101):
        one.moved(100_000, step * 0.1)
        other.moved(50_000, step * 0.1)
    one.update(False, 10.0)
    assert first.bytes_per_second(10.0) == pytest.approx(1e6)
    assert second.bytes_per_second(10.0) == pytest.approx(0.5e6)
    assert total.bytes_per_second(10.0) == pytest.approx(1.5e6)
    for step in range(1, 301):
        other.moved(50_000, 10.0 + step * 0.1)
    other.update(False, 40.0)
    assert total.bytes_per_second(40.0) == pytest.approx(0.5e6, rel=0.1)


def test_updates_that_change_nothing_do_nothing() -> None:
    meter = SpeedMeter()
    sending = Transfer(meter)
    sending.update(False, 0.0)
    sending.update(True, 1.0)
    sending.update(True, 5.0)
    sending.moved(1_000_000, 11.0)
    sending.update(False, 11.0)
    sending.update(False, 12.0)
    assert meter.bytes_per_second(20.0) == pytest.approx(100_000)
