"""Who publishes too much, by the hub's counters."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from potluck.errors import ConfigurationError
from potluck.hub.guard.floodcore import Flood, FloodCore, FloodLimits, Traffic
from potluck.hub.guard.presencecore import ConnectionId
from potluck.sim.virtualclock import VirtualClock

LIMITS = FloodLimits(
    messages_per_second=100, burst_messages=1000, bytes_per_second=1e6, burst_bytes=10_000_000, longest_seconds=200
)
KIB = 1024


@dataclass
class Line:
    """A connection as the hub counts it."""

    clock: VirtualClock
    number: int
    peer: str = "mallory"
    opened_at: float = field(init=False)
    num_messages: int = 0
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self.opened_at = self.clock.monotonic()

    def publish(self, num_messages: int, size: int = 100) -> Line:
        self.num_messages += num_messages
        self.num_bytes += num_messages * size
        return self

    @property
    def traffic(self) -> Traffic:
        return Traffic(
            id=ConnectionId("server", self.number),
            peer=self.peer,
            num_messages=self.num_messages,
            num_bytes=self.num_bytes,
            open_seconds=self.clock.monotonic() - self.opened_at,
        )


class Watched:
    """A core, and lines that it hears of."""

    def __init__(self, limits: FloodLimits = LIMITS) -> None:
        self.clock = VirtualClock()
        self.core = FloodCore(limits, self.clock)
        self._number = 0

    def line(self, peer: str = "mallory") -> Line:
        self._number += 1
        return Line(self.clock, self._number, peer)

    def look(self, *lines: Line, after_seconds: float = 0.0) -> list[str]:
        """Whom a list of these lines gives away."""
        self.clock.advance(after_seconds)
        return [flood.peer for flood in self.core.listed([line.traffic for line in lines])]


@pytest.mark.parametrize(("num_messages", "size"), [(1001, 1), (11, 1_000_000)])
def test_one_message_beyond_the_burst_is_too_much(num_messages: int, size: int):
    watched = Watched()
    line = watched.line()
    assert watched.look(line.publish(num_messages - 1, size)) == []
    assert watched.look(line.publish(1, size)) == ["mallory"]


def test_the_rate_is_fine_for_ever_and_a_little_more_is_not():
    watched = Watched()
    honest, eager = watched.line("honest"), watched.line("eager")
    found = [watched.look(honest.publish(100), eager.publish(110), after_seconds=1) for _ in range(200)]
    assert found[:100] == [[]] * 100  # 10 a second too many, of which 1,000 are tolerated
    assert found[100] == ["eager"]
    assert not any("honest" in each for each in found)


def test_the_reason_says_how_much_and_what_is_allowed():
    watched = Watched()
    line = watched.line().publish(1000, 50_000)
    [flood] = watched.core.listed([line.traffic])
    assert flood == Flood(
        peer="mallory",
        reason="it flooded the run: 1000 messages and 50 MB more than 100 messages and 1.0 MB a second",
    )


def test_connections_of_one_peer_count_together_and_those_of_others_apart():
    watched = Watched()
    lines = [watched.line() for _ in range(4)]
    others = [watched.line(f"honest-{number}") for number in range(4)]
    assert watched.look(*(line.publish(251) for line in [*lines, *others])) == ["mallory"]


def test_what_was_published_before_the_first_look_counts_unless_time_explains_it():
    watched = Watched()
    old, new = watched.line("old"), watched.line("new")
    watched.clock.advance(3600)
    new.opened_at = watched.clock.monotonic()
    assert watched.look(old.publish(300_000), new.publish(300_000)) == ["new"]
    assert watched.look(old.publish(1000), after_seconds=0.0) == []
    assert watched.look(old.publish(1)) == ["old"]


def test_a_guard_that_could_not_look_for_long_blames_nobody():
    watched = Watched()
    line = watched.line().publish(10)
    assert watched.look(line) == []
    assert watched.look(line.publish(100 * 50), after_seconds=50) == []  # five times the burst, at the right rate
    assert watched.look(line.publish(100 * 600), after_seconds=600) == []


def test_who_comes_and_goes_between_two_lists_is_found_by_the_closings():
    watched = Watched()
    found = []
    for _ in range(20):
        line = watched.line()
        watched.clock.advance(0.25)
        found.append(watched.core.closed(line.publish(125).traffic))
    # Of 125, 25 are right since the connection was open for so long, and from the second on 25 by the time that passed.
    assert [flood is not None for flood in found].index(True) == 13
    assert len(watched.core) == 0


def test_a_closing_counts_only_what_lists_have_not():
    watched = Watched()
    line = watched.line()
    assert watched.look(line.publish(900)) == []
    assert watched.core.closed(line.publish(100).traffic) is None
    again = watched.line()
    assert watched.look(again.publish(1)) == ["mallory"]


def test_after_the_verdict_it_begins_anew():
    watched = Watched()
    line = watched.line()
    assert watched.look(line.publish(100_000)) == ["mallory"]
    assert watched.core.closed(line.publish(900).traffic) is None
    assert watched.look(watched.line().publish(100), after_seconds=0.0) == []


def test_sentences_double_up_to_the_longest():
    core = Watched().core
    seconds = []
    for _ in range(40):
        seconds.append(core.sentence("mallory"))
        core.sentenced("mallory")
    assert seconds[:4] == [60, 120, 200, 200]
    assert seconds[-1] == 200
    assert core.sentence("alice") == 60


def test_a_sentence_that_is_not_carried_out_does_not_count():
    core = Watched().core
    assert [core.sentence("mallory") for _ in range(3)] == [60, 60, 60]


def test_what_is_gone_is_forgotten():
    watched = Watched()
    assert watched.look(*(watched.line(f"peer-{number}") for number in range(50))) == []
    assert len(watched.core) == 50
    assert watched.look(watched.line(), after_seconds=61) == []
    assert len(watched.core) == 1
    assert len(watched.core._overruns) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages_per_second": 0},
        {"burst_messages": 0},
        {"bytes_per_second": -1},
        {"burst_bytes": 0},
        {"first_seconds": 0},
        {"first_seconds": 100, "longest_seconds": 99},
    ],
)
def test_limits_are_checked(wrong):
    with pytest.raises(ConfigurationError):
        FloodLimits(**wrong)


Steps = st.lists(
    st.tuples(
        st.sampled_from(["list", "close", "quiet"]),
        st.integers(0, 3),
        st.integers(0, 400),
        st.integers(0, 20 * KIB),
        st.floats(0, 5),
    ),
    max_size=60,
)


@given(Steps)
@example(
    [
        ("list", 0, 0, 0, 0.0),
        ("quiet", 0, 496, 0, 0.0),
        ("quiet", 0, 399, 0, 1.0),
        *2 * [("close", 1, 0, 0, 0.0)],
        ("list", 0, 106, 0, 0.0),
    ]
)
def test_who_stays_within_the_burst_is_never_found(steps: list[tuple[str, int, int, int, float]]):
    """However lists, closings and silences follow each other: counted as a bucket would, exactly, at each message."""
    watched = Watched()
    lines = [watched.line() for _ in range(4)]
    messages = total_bytes = 0.0
    for kind, which, num_messages, size, seconds in steps:
        watched.clock.advance(seconds)
        messages = max(0.0, messages - seconds * LIMITS.messages_per_second)
        total_bytes = max(0.0, total_bytes - seconds * LIMITS.bytes_per_second)
        num_messages = min(num_messages, int(LIMITS.burst_messages - messages))
        size = min(size, int((LIMITS.burst_bytes - total_bytes) / max(num_messages, 1)))
        lines[which].publish(num_messages, size)
        messages += num_messages
        total_bytes += num_messages * size
        if kind == "list":
            assert watched.look(*lines) == []
        elif kind == "close":
            assert watched.core.closed(lines[which].traffic) is None
            lines[which] = watched.line()


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(0.05, 2)), min_size=1, max_size=50))
def test_who_publishes_three_times_what_it_may_is_found(steps: list[tuple[int, bool, float]]):
    """On up to four connections, however they come and go between two lists."""
    watched = Watched()
    lines = [watched.line() for _ in range(4)]
    beyond = 0.0
    for which, closes, seconds in steps:
        if watched.look(*lines):
            return
        watched.clock.advance(seconds)
        num_messages = int(3 * seconds * LIMITS.messages_per_second)
        beyond += num_messages - seconds * LIMITS.messages_per_second
        lines[which].publish(num_messages, 1)
        if closes:
            if watched.core.closed(lines[which].traffic) is not None:
                return
            lines[which] = watched.line()
    assert beyond <= LIMITS.burst_messages + 3 * 2 * LIMITS.messages_per_second
