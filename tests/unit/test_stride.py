"""Local steps until the next exchange: peers of any speed keep in step with each other, in virtual time."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potluck.optim.methods.cadence import Cadence
from potluck.optim.methods.dylu import fast_rate
from potluck.optim.methods.quorum import AdaptiveGrace, AdaptiveQuorum
from potluck.optim.methods.streaming import FragmentSchedule
from potluck.optim.stride import Stride
from potluck.round.coordinator.trigger import ReadySender
from potluck.round.plan.messages import Commit, RoundKey

EXCHANGE_SECONDS = 0.2
FETCH_SECONDS = 0.3


@dataclass
class Runner:
    """One peer in virtual time: takes steps, waits for rounds, catches up."""

    name: str
    step_seconds: float
    stride: Stride
    samples: int = 0
    epoch: int = 0
    epochs: list[int] = field(default_factory=list)
    """That have its work."""
    awaits: float = 0.0
    stands_by_until: float = 0.0


class Race:
    """Rounds among peers of different speed, with the trigger and the stride of the real thing."""

    def __init__(self, step_seconds: dict[str, float], *, inner_steps: int = 20, jitter: float = 0.1, seed: int = 0):
        schedule = FragmentSchedule(inner_steps=inner_steps)
        self.runners = {
            name: Runner(name, seconds, Stride(schedule, by_speed=True)) for name, seconds in step_seconds.items()
        }
        self.trigger = AdaptiveQuorum(grace=AdaptiveGrace(least_seconds=0.5, most_seconds=30.0))
        self.claims: dict[str, float] = {}  # of peers that only talk
        self.epoch = 0
        self.now = 0.0
        self.num_late = 0
        self._looks_at = 0.0
        self._weights: dict[str, float] = {}
        self._ready: dict[str, ReadySender] = {}
        self._waiting: dict[str, Runner] = {}
        self._random, self._jitter = random.Random(seed), jitter
        self._events: list[tuple[float, int, str, str]] = []
        self._number = 0
        for runner in self.runners.values():
            self._step(runner)

    def run(self, num_epochs: int, stall: tuple[int, str, float] | None = None) -> None:
        """Until so many epochs are made; `stall`: at this epoch, this peer stands still for so long."""
        for _ in range(1_000_000):
            if self.epoch >= num_epochs:
                return
            self.now, _, what, name = heapq.heappop(self._events)
            if what == "step" and stall is not None and self.epoch >= stall[0] and name == stall[1]:
                self._at(self.now + stall[2], "step", name)
                stall = None
            elif what == "step":
                self._stepped(self.runners[name])
            elif what == "caught up":
                self._take_over(self.runners[name])
            self._convene()
        raise AssertionError(f"only {self.epoch} epochs")

    @property
    def _fast(self) -> float:
        rates = [runner.stride.pace.steps_per_second for runner in self.runners.values()]
        return fast_rate([*rates, *self.claims.values()])

    def _at(self, when: float, what: str, name: str) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, what, name))

    def _step(self, runner: Runner) -> None:
        runner.stride.pace.resume(self.now)
        seconds = runner.step_seconds * self._random.uniform(1.0 - self._jitter, 1.0 + self._jitter)
        self._at(self.now + seconds, "step", runner.name)

    def _stepped(self, runner: Runner) -> None:
        runner.stride.steps += 1
        runner.samples += 1
        runner.stride.pace.step_done(1, self.now)
        if not runner.stride.is_done(self._fast):
            self._step(runner)
        elif runner.epoch < self.epoch:
            self.num_late += 1
            self.trigger.came_late(runner.epoch + 1, runner.name, self.now)
            self._at(self.now + FETCH_SECONDS, "caught up", runner.name)
        else:
            self._offer(runner)

    def _take_over(self, runner: Runner) -> None:
        runner.epoch = self.epoch
        runner.stride.offered()
        runner.stride.took_over(self.now)
        if runner.stride.is_done(self._fast):
            self._offer(runner)
        else:
            self._step(runner)

    def _offer(self, runner: Runner) -> None:
        others = sum(weight for name, weight in self._weights.items() if name != runner.name)
        stand_by = runner.stride.stand_by(
            own_weight=runner.samples,
            others_weight=others,
            fast_steps_per_second=self._fast,
            hub_now=self.now,
            most_seconds=30.0,
        )
        runner.stride.offered()
        runner.awaits = stand_by.awaits if stand_by is not None else 0.0
        runner.stands_by_until = self.now + (stand_by.seconds if stand_by is not None else 0.0)
        self._at(runner.stands_by_until, "look", runner.name)
        self._waiting[runner.name] = runner

    def _convene(self) -> None:
        """What Gathering and Convener do: who stands by is ready with the weight that it awaits."""
        weight = sum(runner.samples for runner in self._waiting.values())
        for runner in self._waiting.values():
            if runner.name not in self._ready and (weight >= runner.awaits or self.now >= runner.stands_by_until):
                self._ready[runner.name] = ReadySender(peer=runner.name, weight=runner.samples, since=self.now)
        ready = list(self._ready.values())
        due_at = self.trigger.due_at(ready, frozenset(self.runners))
        if due_at is None:
            return
        if due_at > self.now:
            if due_at != self._looks_at:
                self._looks_at = due_at
                self._at(due_at, "look", "")
            return
        self.trigger.begun(self.epoch + 1, ready, self.now)
        self.now += EXCHANGE_SECONDS
        self.epoch += 1
        self._weights = {sender.peer: sender.weight for sender in ready}
        for runner in self.runners.values():
            runner.stride.cadence.committed(commit(self.epoch, self.now))
        for runner in self._waiting.values():
            if runner.name in self._ready:
                runner.epochs.append(self.epoch)
                runner.epoch, runner.samples = self.epoch, 0
                self._step(runner)
            else:  # the round went on without it
                self._at(self.now + FETCH_SECONDS, "caught up", runner.name)
        self._ready, self._waiting = {}, {}


def commit(epoch: int, at: float, seconds: float = EXCHANGE_SECONDS) -> Commit:
    key = RoundKey(epoch=epoch, token=1, attempt=0)
    return Commit(
        epoch=epoch, key=key, term=1, coordinator="c", members=(), digest="", parent="", layout="",
        committed_at=at, seconds=seconds,
    )  # fmt: skip


def share_of(race: Race, name: str, *, after: int) -> float:
    """Of the epochs after this one, those that have a peer's work."""
    return sum(epoch > after for epoch in race.runners[name].epochs) / (race.epoch - after)


@pytest.mark.parametrize("inner_steps", [20, 100, 500])
def test_a_peer_at_a_tenth_of_the_speed_contributes_in_nine_of_ten_rounds(inner_steps: int) -> None:
    race = Race({"a": 0.1, "b": 0.1, "slow": 1.0}, inner_steps=inner_steps)
    race.run(60)
    assert share_of(race, "slow", after=5) >= 0.9
    assert min(share_of(race, name, after=5) for name in "ab") >= 0.9


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    speeds=st.lists(st.sampled_from([1.0, 1.3, 2.0, 3.0, 5.0, 10.0]), min_size=1, max_size=5),
    jitter=st.sampled_from([0.0, 0.1, 0.3]),
    seed=st.integers(0, 1000),
)
@example(speeds=[10.0, 10.0, 10.0], jitter=0.3, seed=1)
@example(speeds=[10.0, 10.0, 10.0], jitter=0.3, seed=8)
def test_all_of_any_mix_of_speeds_contribute(speeds: list[float], jitter: float, seed: int) -> None:
    race = Race({"a": 0.1} | {f"p{n}": 0.1 * s for n, s in enumerate(speeds)}, jitter=jitter, seed=seed)
    race.run(60)
    assert min(share_of(race, name, after=10) for name in race.runners) >= 0.9


@pytest.mark.parametrize("seconds", [3.0, 17.0, 100.0])
@pytest.mark.parametrize("who", ["slow", "a"])
def test_whoever_missed_rounds_is_back_in_step_with_the_next(seconds: float, who: str) -> None:
    race = Race({"a": 0.1, "b": 0.1, "slow": 1.0})
    race.run(200, stall=(20, who, seconds))
    missed = [epoch for epoch in range(6, race.epoch + 1) if epoch not in race.runners[who].epochs]
    assert len(missed) <= seconds / 2 + 4, "while it stood still, and a few more"
    assert not [epoch for epoch in missed if epoch > 20 + seconds / 2 + 10]


def test_one_liar_about_its_speed_does_not_cut_the_others_to_one_step() -> None:
    race = Race({"a": 0.1, "b": 0.1})
    race.claims["liar"] = 1e9
    race.run(20)
    assert all(runner.stride.steps_per_round(race._fast) >= 2 for runner in race.runners.values())
    race.claims |= {"honest": 10.0}
    assert all(runner.stride.steps_per_round(race._fast) == 20 for runner in race.runners.values())


def test_a_peer_whose_single_step_takes_longer_than_a_round_gives_all_of_its_work() -> None:
    race = Race({"a": 0.1, "b": 0.1, "slow": 11.0})
    race.run(120)
    slow = race.runners["slow"]
    assert len(slow.epochs) >= 120 / 8
    assert slow.samples <= 1, "all else is in epochs"
    assert min(share_of(race, name, after=5) for name in "ab") >= 0.9, "nobody else is shut out by it"


def test_cadence_is_the_usual_time_from_a_commit_to_the_next_round() -> None:
    cadence = Cadence()
    assert cadence.left_seconds(0.0) is None
    for epoch, at in ((1, 10.0), (2, 20.0), (3, 30.0), (5, 100.0), (6, 110.0)):  # an epoch of which nobody told us
        cadence.committed(commit(epoch, at, seconds=2.0))
    assert cadence.seconds == 8.0
    assert cadence.left_seconds(113.0) == 5.0
    assert cadence.left_seconds(200.0) == 0.0
