from __future__ import annotations

import pytest

from potluck.link.direct.pulse import Pulse
from potluck.link.direct.sockets import SocketSettings
from potluck.sim.virtualclock import VirtualClock

SETTINGS = SocketSettings(heartbeat_seconds=5.0, silence_seconds=30.0)


class Line:
    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.heard_at = clock.monotonic()
        self.asked_at: float | None = None
        self.asked: list[float] = []

    def ask(self) -> None:
        self.asked.append(self.clock.monotonic())

    def hear(self) -> None:
        self.heard_at = self.clock.monotonic()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def watch(pulse: Pulse[Line], clock: VirtualClock, lines: list[Line], seconds: float) -> list[Line]:
    """Check several times a second for a while; who was lost."""
    lost: list[Line] = []
    for _ in range(round(seconds / 0.25)):
        clock.advance(0.25)
        lost += pulse.check([line for line in lines if line not in lost])
    return lost


def test_a_line_on_which_messages_come_is_never_asked(clock: VirtualClock) -> None:
    pulse, line = Pulse[Line](SETTINGS, clock), Line(clock)
    for _ in range(50):
        assert not watch(pulse, clock, [line], 2.0)
        line.hear()
    assert not line.asked


def test_a_silent_line_is_asked_now_and_then_and_kept_when_it_answers(clock: VirtualClock) -> None:
    pulse, line = Pulse[Line](SETTINGS, clock), Line(clock)
    for _ in range(20):
        num_asked = len(line.asked)
        assert not watch(pulse, clock, [line], 5.5)
        assert len(line.asked) == num_asked + 1
        line.hear()


def test_a_line_that_does_not_answer_is_given_up_after_the_silence(clock: VirtualClock) -> None:
    pulse, line, other = Pulse[Line](SETTINGS, clock), Line(clock), Line(clock)
    started = clock.monotonic()
    while not watch(pulse, clock, [line, other], 0.25):
        other.hear()
        assert clock.monotonic() - started < 100
    assert clock.monotonic() - started == pytest.approx(35.0, abs=0.5)
    assert 5 <= len(line.asked) <= 8
    assert not other.asked


def test_our_own_pause_is_not_the_others_silence(clock: VirtualClock) -> None:
    pulse, line = Pulse[Line](SETTINGS, clock), Line(clock)
    assert not watch(pulse, clock, [line], 20.0)
    clock.advance(3600.0)
    assert not pulse.check([line])
    assert not watch(pulse, clock, [line], 30.0)
    assert watch(pulse, clock, [line], 10.0) == [line]
