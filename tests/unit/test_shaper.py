from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ConfigurationError
from potluck.testing.shaper import BURST_SECONDS, Direction
from potluck.testing.shaping import LinkShape

IPV4 = b"\x08\x00"
ARP = b"\x08\x06"


def frame(size_bytes: int = 1000, kind: bytes = IPV4) -> bytes:
    return bytes(12) + kind + bytes(size_bytes - 14)


def direction(**shape: float) -> Direction:
    link = Direction(seed=1)
    link.configure(**LinkShape(**shape).shaper_arguments())
    return link


def test_a_plain_link_passes_frames_at_once() -> None:
    link = direction()
    link.offer([frame(), frame()], now=5.0)
    assert link.next_due_at() == 5.0
    assert len(link.take(5.0)) == 2
    assert link.next_due_at() == float("inf")


def test_delay_holds_a_frame_for_its_time() -> None:
    link = direction(delay_ms=50)
    link.offer([frame()], now=1.0)
    assert link.take(1.049) == []
    assert link.take(1.051) == [frame()]


def test_rate_spaces_frames_by_their_length() -> None:
    link = direction(rate_mbit=8, queue_ms=10_000)  # a byte a microsecond
    link.offer([frame(1000)] * 100, now=10.0)
    passed_early = len(link.take(10.0 + 0.050))
    assert 50 <= passed_early <= 50 + BURST_SECONDS * 1000
    assert len(link.take(10.0 + 0.100)) == 100 - passed_early


def test_a_late_shaper_makes_up_for_lost_time_but_not_for_idle_hours() -> None:
    link = direction(rate_mbit=8, queue_ms=10_000)
    link.offer([frame(1000)], now=1.0)
    link.take(2.0)
    link.offer([frame(1000)] * 1000, now=3600.0)
    assert len(link.take(3600.0)) == pytest.approx(BURST_SECONDS * 1000, abs=1)


def test_a_full_queue_drops_what_comes() -> None:
    link = direction(rate_mbit=8, queue_ms=100)
    link.offer([frame(1000)] * 500, now=1.0)
    assert len(link.take(100.0)) == pytest.approx(100, abs=BURST_SECONDS * 1000 + 2)
    assert link.statistics()["overflowed_frames"] == 500 - link.statistics()["passed_frames"]


def test_a_slow_line_still_holds_a_burst() -> None:
    link = direction(rate_mbit=0.1, queue_ms=0)
    link.offer([frame(1500)] * 100, now=1.0)
    assert 30 <= len(link.take(1000.0)) <= 40


def test_loss_takes_its_share_of_packets_but_no_arp() -> None:
    link = direction(loss=0.1)
    link.offer([frame(100)] * 10_000 + [frame(100, ARP)] * 1000, now=1.0)
    assert link.statistics()["lost_frames"] == pytest.approx(1000, rel=0.15)
    assert sum(kept[12:14] == ARP for kept in link.take(1.0)) == 1000


def test_total_loss_lets_nothing_through() -> None:
    link = direction(loss=1.0)
    link.offer([frame()] * 100, now=1.0)
    assert link.take(2.0) == []


def test_a_new_shape_does_not_let_frames_overtake() -> None:
    link = direction(delay_ms=100)
    link.offer([frame(100)], now=1.0)
    link.configure(**LinkShape().shaper_arguments())
    link.offer([frame(200)], now=1.01)
    assert link.take(1.05) == []
    assert [len(kept) for kept in link.take(1.2)] == [100, 200]


@given(
    st.lists(st.tuples(st.floats(0, 0.01), st.integers(60, 1514)), max_size=60),
    st.floats(0, 100),
    st.floats(0, 50),
    st.one_of(st.none(), st.floats(0.5, 1000)),
)
def test_frames_keep_their_order_and_are_never_early(
    arrivals: list[tuple[float, int]], delay_ms: float, jitter_ms: float, rate_mbit: float | None
) -> None:
    link = Direction(seed=7)
    link.configure(**LinkShape(delay_ms=delay_ms, jitter_ms=jitter_ms, rate_mbit=rate_mbit).shaper_arguments())
    now, offered = 1.0, []
    for number, (gap, size) in enumerate(arrivals):
        now += gap
        offered.append((now, number.to_bytes(12, "big") + IPV4 + bytes(size - 14)))
        link.offer([offered[-1][1]], now)
    sent_at = {kept: when for when, kept in offered}
    taken: list[bytes] = []
    while (due_at := link.next_due_at()) != float("inf"):
        batch = link.take(due_at)
        assert all(due_at >= sent_at[kept] + delay_ms / 1e3 - 1e-9 for kept in batch)
        taken += batch
    counts = link.statistics()
    assert counts["passed_frames"] + counts["overflowed_frames"] == len(offered)
    assert taken == sorted(taken)


@pytest.mark.parametrize(
    "wrong",
    [{"rate_mbit": 0}, {"rate_mbit": -1}, {"delay_ms": -1}, {"loss": 1.5}, {"loss": -0.1}, {"jitter_ms": float("nan")}],
)
def test_a_shape_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        LinkShape(**wrong)


def test_netem_is_told_the_same() -> None:
    words = LinkShape(rate_mbit=100, delay_ms=50, loss=0.01).netem_arguments()
    assert words == ["limit", "1239", "rate", "100000000bit", "delay", "50000us", "0us", "loss", "random", "1%"]
    assert LinkShape().netem_arguments() == ["limit", "20000"]
    assert LinkShape(delay_ms=10, jitter_ms=4).netem_arguments()[2:] == ["delay", "12000us", "2000us"]
