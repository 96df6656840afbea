"""Which chunk is asked of whom, under any sequence of answers, failures, lies and returns."""

from __future__ import annotations

import heapq

from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.state.schedule import FIRST_OPEN, LONGEST_PAUSE_SECONDS, MAX_OPEN, Ask, Schedule

NAMES = ("a", "b", "c", "d")
Event = tuple[str, int, int]
events = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "fail", "lie", "leave", "join", "wait"]), st.integers(0, 3), st.integers(0, 50)
    ),
    max_size=120,
)


class Checked:
    """A schedule, and what must be true of it."""

    def __init__(self, num_chunks: int) -> None:
        self.schedule = Schedule(range(num_chunks))
        self.num_chunks = num_chunks
        self.now = 0.0
        self.open: dict[str, set[int]] = {name: set() for name in NAMES}
        self.present = set(NAMES)
        self.liars: set[str] = set()
        self.held: set[int] = set()
        self.schedule.keepers_changed(dict.fromkeys(self.present))

    def ask(self) -> None:
        for ask in self.schedule.due(self.now):
            assert ask.keeper in self.present - self.liars
            assert ask.chunk not in self.held
            assert ask.chunk not in self.open[ask.keeper], "asked of the same keeper twice"
            self.open[ask.keeper].add(ask.chunk)
            assert len(self.open[ask.keeper]) <= MAX_OPEN
            assert sum(ask.chunk in chunks for chunks in self.open.values()) <= 2

    def happen(self, event: Event) -> None:
        kind, who, which = event
        name = NAMES[who]
        chunks = sorted(self.open[name])
        self.now += 0.1
        if kind == "wait":
            self.now += which / 4
        elif kind in ("leave", "join"):
            self.present = self.present - {name} if kind == "leave" else self.present | {name}
            self.schedule.keepers_changed(dict.fromkeys(self.present))
            if kind == "leave":
                self.open[name].clear()
        elif chunks and name not in self.liars:
            self._answer(kind, Ask(name, chunks[which % len(chunks)]))

    def _answer(self, kind: str, ask: Ask) -> None:
        if kind == "arrive":
            is_new = self.schedule.arrived(ask, self.now)
            assert is_new == (ask.chunk not in self.held)
            self.held.add(ask.chunk)
            self.open[ask.keeper].discard(ask.chunk)
        elif kind == "fail":
            self.schedule.all_failed(ask.keeper, self.now)
            self.open[ask.keeper].clear()
        else:
            self.schedule.lied(ask.keeper, "wrong")
            self.liars.add(ask.keeper)
            self.open[ask.keeper].clear()

    def check(self) -> None:
        assert self.schedule.num_missing == self.num_chunks - len(self.held)
        assert self.schedule.is_complete == (len(self.held) == self.num_chunks)
        assert set(self.schedule.liars) == self.liars
        assert sum(self.schedule.given.values()) == len(self.held)
        assert set(self.schedule.usable()) == self.present - self.liars


@given(st.integers(0, 60), events)
@settings(max_examples=300)
def test_whatever_happens_the_rest_can_still_be_fetched(num_chunks: int, sequence: list[Event]) -> None:
    checked = Checked(num_chunks)
    checked.ask()
    for event in sequence:
        checked.happen(event)
        checked.ask()
        checked.check()
    checked.present = set(NAMES)
    checked.schedule.keepers_changed(dict.fromkeys(checked.present))
    if checked.liars == set(NAMES):
        assert checked.schedule.due(checked.now + 100) == []
        return
    for _ in range(num_chunks + 100):  # now everybody answers
        checked.now += LONGEST_PAUSE_SECONDS
        checked.ask()
        for name in sorted(checked.present - checked.liars):
            for chunk in sorted(checked.open[name]):
                checked._answer("arrive", Ask(name, chunk))
        checked.check()
    assert checked.schedule.is_complete
    assert checked.held == set(range(num_chunks))


def simulate(speeds: dict[str, float], num_chunks: int) -> tuple[float, dict[str, int]]:
    """How long it takes with keepers that give so many chunks a second, one after the other, and who gave what."""
    schedule = Schedule(range(num_chunks))
    schedule.keepers_changed(dict.fromkeys(speeds))
    free_at = dict.fromkeys(speeds, 0.0)
    answers: list[tuple[float, Ask]] = []
    now = 0.0
    while not schedule.is_complete:
        for ask in schedule.due(now):
            free_at[ask.keeper] = max(free_at[ask.keeper], now) + 1 / speeds[ask.keeper]
            heapq.heappush(answers, (free_at[ask.keeper], ask))
        now, ask = heapq.heappop(answers)
        schedule.arrived(ask, now)
    return now, schedule.given


@given(st.lists(st.floats(0.2, 200.0), min_size=1, max_size=5), st.integers(1, 400))
@settings(max_examples=100)
def test_the_time_is_near_to_the_best_possible(speeds: list[float], num_chunks: int) -> None:
    named = {f"k{number}": speed for number, speed in enumerate(speeds)}
    seconds, _ = simulate(named, num_chunks)
    best = num_chunks / sum(speeds)
    # At the end, what a slow keeper was asked for waits behind what fast ones do; and they ask for it once again.
    bound = 2 * best + (FIRST_OPEN + 2) / max(speeds) + MAX_OPEN * len(speeds) / max(speeds)
    if num_chunks < len(speeds):  # nobody's speed is known yet: all of it may have been asked of the slowest
        bound += 1 / min(speeds)
    assert seconds <= bound


def test_faster_keepers_give_more() -> None:
    _, given_by = simulate({"fast": 100.0, "slow": 10.0}, 1000)
    assert 5 < given_by["fast"] / given_by["slow"] < 15


def test_a_slow_keeper_is_not_asked_for_more_than_it_gives_in_a_second() -> None:
    schedule = Schedule(range(100))
    schedule.keepers_changed({"slow": None})
    asks = schedule.due(0.0)
    now = 0.0
    for _ in range(10):
        now += 2.0
        schedule.arrived(asks.pop(0), now)
        asks += schedule.due(now)
    assert len(asks) == 1


def test_a_keeper_that_fails_again_and_again_is_asked_less_and_less() -> None:
    schedule = Schedule(range(10))
    schedule.keepers_changed({"shaky": None})
    now, pauses = 0.0, []
    for _ in range(8):
        assert schedule.due(now)
        schedule.all_failed("shaky", now)
        assert schedule.due(now) == []
        again_at = schedule.next_at(now)
        assert again_at is not None
        pauses.append(again_at - now)
        now = again_at
    assert pauses == sorted(pauses)
    assert pauses[0] < 1 <= pauses[-1] == LONGEST_PAUSE_SECONDS
    schedule.keepers_changed({})
    schedule.keepers_changed({"shaky": None})
    assert schedule.due(now), "who comes back gets another chance at once"


def test_who_owes_an_answer_for_long_is_overdue() -> None:
    schedule = Schedule(range(10))
    schedule.keepers_changed({"a": None, "b": None})
    asks = schedule.due(0.0)
    assert schedule.overdue(19.0, 20.0) == []
    schedule.arrived(next(ask for ask in asks if ask.keeper == "a"), 15.0)
    assert schedule.overdue(20.0, 20.0) == ["b"]


def test_thin_lines_are_spared_while_a_fast_keeper_is_well() -> None:
    schedule = Schedule(range(20))
    schedule.keepers_changed({"fast": 1e6, "thin": 2e5, "fair": 3e5, "unknown": None})
    assert {ask.keeper for ask in schedule.due(0.0)} == {"fast", "fair", "unknown"}
    schedule.all_failed("fast", 1.0)
    assert {ask.keeper for ask in schedule.due(1.0)} == {"thin"}, "the others have their questions still"
