"""A common pace for all connections of a peer: what its line carries, who gets how much, what the kernel is told."""

from __future__ import annotations

import math
import socket
import struct
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.link.direct.pacing import (
    BACK_OFF,
    BULK_BYTES,
    LEAST,
    PROBE_UP,
    PROBE_WINDOWS,
    STEP_UP,
    LineSpeed,
    Pacer,
    shares,
)
from potluck.link.direct.sockets import Progress, progress_of, renew_measure, set_pace

LINE = 10e6  # bytes per second
TICK_SECONDS = 0.1
PACKET_BYTES = 1000


class Sender:
    """A connection that sends as if it were alone on the line, and a little more than its receiver takes."""

    def __init__(self, line: Line, *, fastest: float = LINE, way_seconds: float = 0.2) -> None:
        self.queued_bytes = 0
        self.pace: float | None = None
        self.num_renewed = 0
        self.fastest = fastest
        self.acknowledged = self.sent_packets = self.repeated_packets = 0
        self.way_seconds = self.shortest_way_seconds = way_seconds
        self.is_gone = False
        line.senders.append(self)

    def progress(self) -> Progress | None:
        if self.is_gone:
            return None
        return Progress(
            acknowledged_bytes=self.acknowledged,
            waiting_bytes=0,
            sent_packets=self.sent_packets,
            repeated_packets=self.repeated_packets,
            way_seconds=self.way_seconds,
            shortest_way_seconds=self.shortest_way_seconds,
        )

    def set_pace(self, bytes_per_second: float | None) -> None:
        self.pace = bytes_per_second

    def renew(self) -> None:
        self.num_renewed += 1


class Line:
    """The line of one peer: what is more than it carries is lost, and sent again."""

    def __init__(self, speed: float = LINE) -> None:
        self.speed = speed
        self.senders: list[Sender] = []
        self.pacer: Pacer[Sender] = Pacer()
        self.now = 100.0
        self.lost_bytes = 0.0

    def give(self, *senders: Sender, num_bytes: float) -> None:
        for sender in senders:
            sender.queued_bytes += int(num_bytes)
            self.pacer.begin(sender, self.now)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_SECONDS)):
            self._tick()
            self.now += TICK_SECONDS
            self.pacer.look(self.now)

    def _tick(self) -> None:
        def offered(sender: Sender) -> float:
            pace = min(self.speed, 1.05 * sender.fastest, math.inf if sender.pace is None else sender.pace)
            return min(pace * TICK_SECONDS, sender.queued_bytes)

        total = sum(offered(sender) for sender in self.senders)
        carried = min(1.0, self.speed * TICK_SECONDS / total) if total else 0.0
        for sender in self.senders:
            there = min(offered(sender) * carried, sender.fastest * TICK_SECONDS)
            lost = offered(sender) - there
            self.lost_bytes += lost
            sender.acknowledged += int(there)
            sender.queued_bytes = max(0, sender.queued_bytes - int(there))
            sender.sent_packets += int((there + lost) // PACKET_BYTES)
            sender.repeated_packets += int(lost // PACKET_BYTES)


def test_nothing_is_known_of_a_line_that_was_never_full() -> None:
    line = LineSpeed()
    line.observe(5e6, is_full=False)
    line.observe(9e6, is_full=False)
    assert line.bytes_per_second is None
    line.observe(7e6, is_full=True)
    assert line.bytes_per_second == 9e6, "as much as it has carried"


def test_the_estimate_sinks_while_the_line_is_full_and_rises_while_it_is_used() -> None:
    line = LineSpeed()
    line.observe(10e6, is_full=True)
    line.observe(10e6, is_full=True)
    line.observe(1e6, is_full=True)
    assert line.bytes_per_second == pytest.approx(10e6 * BACK_OFF)
    line.observe(1e6, is_full=False)
    assert line.bytes_per_second == pytest.approx(10e6 * BACK_OFF), "little was sent: that says nothing"
    line.observe(9.4e6, is_full=False)
    assert line.bytes_per_second == pytest.approx(10e6 * BACK_OFF * STEP_UP)
    line.observe(9.9e6, is_full=True)
    assert line.bytes_per_second == 9.9e6, "not below what it carries"


def test_what_tcp_reached_while_it_still_sped_up_is_no_measure() -> None:
    line = LineSpeed()
    for speed in (0.5e6, 1e6, 2e6, 4e6, 8e6):
        line.observe(speed, is_full=True)
        assert line.bytes_per_second is None
    line.observe(9e6, is_full=True)
    assert line.bytes_per_second == 9e6


def test_a_line_that_always_seems_full_is_not_given_up_and_asked_for_more_now_and_then() -> None:
    line = LineSpeed()
    line.observe(10e6, is_full=False)
    line.observe(10e6, is_full=True)
    told = []
    for _ in range(10 * PROBE_WINDOWS):
        assert line.bytes_per_second is not None
        told.append(line.bytes_per_second)
        line.observe(min(0.95 * line.bytes_per_second, 7e6), is_full=True)
    usual = told[2 * PROBE_WINDOWS :]
    assert min(usual) == pytest.approx(LEAST * 10e6)
    assert max(usual) == pytest.approx(LEAST * 10e6 * PROBE_UP)
    assert usual.count(min(usual)) == pytest.approx(len(usual) * (1 - 1 / PROBE_WINDOWS)), "and then as before"


@pytest.mark.parametrize("is_full", [False, True], ids=["by what it lost", "by its delays alone"])
def test_an_estimate_that_is_far_too_low_is_found_out_soon(is_full: bool) -> None:
    """As after a first exchange on a machine that was busy with something else."""
    line = LineSpeed()
    line.observe(1e6, is_full=False)
    line.observe(1e6, is_full=True)
    num_windows = 0
    while line.bytes_per_second is not None and line.bytes_per_second < 12e6 and num_windows < 1000:
        line.observe(min(line.bytes_per_second, 12.5e6), is_full=is_full)
        num_windows += 1
    assert num_windows <= 25


WANTS = st.dictionaries(st.integers(0, 9), st.floats(0.0, 1e9) | st.just(math.inf), min_size=1)


@given(st.floats(1.0, 1e9), WANTS)
def test_a_line_is_divided_fairly(speed: float, wants: dict[int, float]) -> None:
    given_ = shares(speed, wants)
    assert given_.keys() == wants.keys()
    assert sum(given_.values()) <= speed * (1 + 1e-9)
    largest = max(given_.values())
    for key, share in given_.items():
        assert share <= wants[key]
        assert share == wants[key] or share == pytest.approx(largest), "who gets less than it wants gets the most"
    if math.inf in wants.values():
        assert sum(given_.values()) == pytest.approx(speed)


def test_connections_that_begin_together_stop_losing_packets() -> None:
    line = Line()
    senders = [Sender(line) for _ in range(3)]
    line.give(*senders, num_bytes=5e6)
    line.run(5.0)
    first_loss, line.lost_bytes = line.lost_bytes, 0.0
    assert first_loss > 5e6, "each sent at the speed of the line"
    for _ in range(3):
        line.give(*senders, num_bytes=5e6)
        assert sum(sender.pace or math.inf for sender in senders) == pytest.approx(LINE, rel=0.1)
        line.run(5.0)
    assert line.lost_bytes / 3 < 0.05 * first_loss
    assert not any(sender.queued_bytes for sender in senders)
    assert [sender.pace for sender in senders] == [None] * 3, "who is done has no pace"


def test_a_line_that_has_become_faster_is_found_out() -> None:
    line = Line()
    senders = [Sender(line, fastest=math.inf) for _ in range(2)]
    line.give(*senders, num_bytes=10e6)
    line.run(4.0)
    line.speed = 3 * LINE
    line.give(*senders, num_bytes=1e9)
    line.run(12.0)
    assert line.pacer.bytes_per_second is not None
    assert line.pacer.bytes_per_second > 2.5 * LINE


def test_what_a_slow_receiver_leaves_goes_to_the_others() -> None:
    line = Line()
    slow, fast = Sender(line, fastest=LINE / 10), Sender(line)
    line.give(slow, fast, num_bytes=2e6)
    line.run(3.0)
    line.give(slow, fast, num_bytes=1e9)
    line.run(10.0)
    before = fast.acknowledged
    line.run(5.0)
    assert fast.acknowledged - before > 0.8 * LINE * 5.0
    assert slow.pace is None or slow.pace >= LINE / 10


def test_who_is_alone_or_near_or_cannot_tell_has_no_pace() -> None:
    line = Line()
    one, two = Sender(line), Sender(line)
    line.give(one, two, num_bytes=20e6)
    line.run(2.0)
    assert one.pace is not None
    two.is_gone = True
    line.pacer.forget(two)
    assert one.pace is None
    near = Sender(line, way_seconds=0.001)
    mute = Sender(line)
    mute.is_gone = True
    line.give(one, near, mute, num_bytes=20e6)
    assert (one.pace, near.pace, mute.pace) == (None, None, None)


def test_a_line_with_room_for_all_is_left_alone() -> None:
    line = Line()
    senders = [Sender(line, fastest=LINE / 10) for _ in range(3)]
    for sender in senders:
        sender.set_pace(LINE / 10)  # so that they lose nothing
    line.give(*senders, num_bytes=20e6)
    line.run(5.0)
    assert line.pacer.bytes_per_second is None
    assert [sender.num_renewed for sender in senders] == [0, 0, 0]


def test_the_way_is_measured_anew_before_it_would_be_in_the_middle_of_a_round() -> None:
    line = Line()
    senders = [Sender(line) for _ in range(2)]
    line.give(*senders, num_bytes=5e6)
    line.run(3.0)
    for _ in range(10):
        line.give(*senders, num_bytes=5e6)
        line.run(2.0)
    assert all(3 <= sender.num_renewed <= 4 for sender in senders), "not more often than every five seconds"


def test_little_is_not_paced() -> None:
    line = Line()
    one, two = Sender(line), Sender(line)
    line.give(one, two, num_bytes=5e6)
    line.run(3.0)
    line.give(one, two, num_bytes=BULK_BYTES - 1)
    line.run(TICK_SECONDS)
    assert (one.pace, two.pace) == (None, None)


# What the kernel is told

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    with dialled, accepted:
        yield dialled, accepted


@linux
def test_what_tcp_tells_is_what_was_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = pair
    before = progress_of(sender)
    assert before is not None
    num_bytes = 50_000
    sender.sendall(bytes(num_bytes))
    left = num_bytes
    while left:
        left -= len(receiver.recv(left))
    receiver.sendall(b".")  # carries the last acknowledgement
    assert sender.recv(1) == b"."
    after = progress_of(sender)
    assert after is not None
    assert after.acknowledged_bytes - before.acknowledged_bytes == num_bytes
    assert after.waiting_bytes == 0
    assert after.sent_packets > before.sent_packets
    assert after.repeated_packets >= before.repeated_packets
    assert 0 < after.shortest_way_seconds <= after.way_seconds + 1e-6 < 5.0


@linux
def test_a_pace_is_set_and_taken_back(pair: tuple[socket.socket, socket.socket]) -> None:
    def rate() -> int:
        return int(struct.unpack("=I", pair[0].getsockopt(socket.SOL_SOCKET, 47, 4))[0])

    unlimited = rate()
    set_pace(pair[0], 123_456.7)
    assert rate() == 123_456
    set_pace(pair[0], 1e12)
    assert rate() >= 2**32 - 2, "more than the kernel can be told"
    set_pace(pair[0], None)
    assert rate() == unlimited


@linux
def test_the_way_of_sending_stays_the_same_when_its_measure_is_renewed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    def control() -> bytes:
        return pair[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)

    before = control()
    renew_measure(pair[0])
    assert control() == before


def test_a_socket_that_is_gone_or_no_tcp_says_nothing() -> None:
    one, two = socket.socketpair()
    with one, two:
        assert progress_of(one) is None
        set_pace(one, 1e6)
        renew_measure(one)
    assert progress_of(one) is None
    set_pace(one, None)
    renew_measure(one)
