"""The guard against floods, on real TCP connections and a clock of its own."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from potluck.errors import ConfigurationError
from potluck.link.direct.flood import FloodGuard, FloodLimits, consumed_bytes
from potluck.testing.polling import poll_until_sync
from potluck.testing.virtualclock import VirtualClock

LIMITS = FloodLimits(held_bytes=100_000, ungreeted_bytes=10_000, ungreeted_seconds=5.0, max_ungreeted=3)


class Line:
    """A TCP connection whose near end plays ZeroMQ's."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.far = socket.create_connection(server.getsockname())
            self.near, _ = server.accept()
        self.fd = self.near.fileno()

    def bring(self, count: int) -> None:
        """The far end sends, and ZeroMQ reads all of it."""
        self.far.sendall(bytes(count))
        left = count
        while left:
            left -= len(self.near.recv(left))

    def is_cut(self) -> bool:
        self.far.settimeout(5)
        try:
            return self.far.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def lines() -> Iterator[list[Line]]:
    opened = [Line() for _ in range(5)]
    yield opened
    for line in opened:
        line.close()


@pytest.fixture
def guard() -> FloodGuard:
    return FloodGuard(LIMITS, VirtualClock())


def advance(guard: FloodGuard, seconds: float) -> None:
    assert isinstance(guard.clock, VirtualClock)
    guard.clock.advance(seconds)


def test_the_kernel_tells_what_was_read(lines):
    line = lines[0]
    assert consumed_bytes(line.fd) == 0
    line.far.sendall(bytes(1000))
    line.near.recv(1, socket.MSG_PEEK)
    assert consumed_bytes(line.fd) == 0  # arrived, but not read
    assert len(line.near.recv(400)) == 400
    assert consumed_bytes(line.fd) == 400


def test_what_is_no_connection_has_no_count(tmp_path):
    with (tmp_path / "file").open("w") as file:
        assert consumed_bytes(file.fileno()) is None
    assert consumed_bytes(999_999) is None


def test_bytes_that_form_no_message_are_cut(guard, lines):
    wire = guard.opened(lines[0].fd, incoming=True)
    reasons: list[str] = []
    wire.on_end = reasons.append
    guard.welcome(wire)
    wire.greeted = True
    lines[0].bring(100_000)
    guard.check()
    assert not wire.closed
    lines[0].bring(1)
    guard.check()
    assert wire.closed
    assert reasons == ["flood"]
    assert guard.counts == {"cut_flood": 1}
    assert lines[0].is_cut()
    assert len(guard) == 0
    guard.cut(wire, "flood")
    assert guard.counts == {"cut_flood": 1}


def test_delivered_messages_are_no_flood_however_many(guard, lines):
    wire = guard.opened(lines[0].fd, incoming=True)
    guard.welcome(wire)
    wire.greeted = True
    for _ in range(50):
        lines[0].bring(50_000 + 9 + 200 + 2)  # a part of each of ZMTP's two kinds
        wire.delivered([bytes(50_000), bytes(200)])
        guard.check()
    assert not wire.closed


def test_nobody_saves_up_an_allowance(guard, lines):
    wire = guard.opened(lines[0].fd, incoming=True)
    guard.welcome(wire)
    wire.greeted = True
    wire.delivered([bytes(10_000_000)])  # more than came: as if its bytes had been counted too high
    guard.check()
    lines[0].bring(150_000)
    guard.check()
    assert wire.closed


def test_the_ungreeted_may_send_little_and_not_for_long(guard, lines):
    talkative = guard.opened(lines[0].fd, incoming=True)
    slow = guard.opened(lines[1].fd, incoming=True)
    lines[0].bring(10_001)
    guard.check()
    assert talkative.closed
    assert not slow.closed
    advance(guard, 5.1)
    guard.check()
    assert slow.closed
    assert guard.counts == {"cut_flood": 1, "cut_greeting_too_slow": 1}


def test_heartbeats_are_in_order(guard, lines):
    wire = guard.opened(lines[0].fd, incoming=True)
    guard.welcome(wire)
    wire.greeted = True
    advance(guard, 10_000)
    lines[0].bring(100_000 + 10_000 * 64)
    guard.check()
    assert not wire.closed


def test_the_oldest_gives_way_when_too_many_are_greeting(guard, lines):
    wires = [guard.opened(line.fd, incoming=True) for line in lines[:3]]
    wires[0].greeted = True
    guard.opened(lines[3].fd, incoming=False)  # our own dial does not count
    assert not any(wire.closed for wire in wires)
    wires[0].greeted = False
    guard.opened(lines[4].fd, incoming=True)
    assert [wire.closed for wire in wires] == [True, False, False]
    assert guard.counts == {"cut_too_many_ungreeted": 1}


def test_a_number_that_is_used_again_is_another_connection(guard, lines):
    first = guard.opened(lines[0].fd, incoming=True)
    ended: list[str] = []
    first.on_end = ended.append
    assert guard.opened(lines[0].fd, incoming=True) is first  # told twice
    number = lines[0].fd
    socket.socket.detach(lines[0].near)
    other = Line()
    try:
        import os

        os.dup2(other.fd, number)  # ZeroMQ closed it, and accepted another with the same number
        guard.cut(first, "flood")
        assert ended == ["flood"]
        other.far.settimeout(0.05)
        with pytest.raises(TimeoutError):
            other.far.recv(1)  # the other one is not touched
        second = guard.opened(number, incoming=True)
        assert second is not first
        guard.closed(number)  # news of the first that came late
        assert not second.closed
    finally:
        os.close(number)
        other.close()
    guard.check()
    assert second.closed


def test_what_has_ended_is_forgotten(guard, lines):
    wire = guard.opened(lines[0].fd, incoming=True)
    ended: list[str] = []
    wire.on_end = ended.append
    number = lines[0].fd
    lines[0].near.close()
    guard.closed(number)
    assert ended == ["disconnected"]
    assert guard.opened(number, incoming=True) is None
    assert guard.wire(number) is None
    poll_until_sync(lambda: len(guard) == 0, 5, "nothing to be watched")


def test_limits_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigurationError, match="held_bytes"):
        FloodLimits(held_bytes=10)
    with pytest.raises(ConfigurationError, match="positive"):
        FloodLimits(held_bytes=10**6, max_ungreeted=0)
