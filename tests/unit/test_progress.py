"""How far a run is: the coordinator's books, one peer's pace, and the news that everybody gets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ConfigurationError
from potluck.hub.presence import Beacon
from potluck.messages import encode
from potluck.optim.collaboration import Collaboration
from potluck.optim.progress.pace import Pace, is_worth_another_step, patience_seconds
from potluck.optim.progress.progresskeeper import TOPIC
from potluck.optim.progress.tracker import (
    FOLLOW_SECONDS,
    FORGET_SECONDS,
    MOST_DELAY_SECONDS,
    ProgressTracker,
    RunProgress,
    predict_seconds,
)
from potluck.round.codecs import CodecChoice
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.sim.inlineworkers import InlineWorkers
from potluck.sim.memoryrun import MemoryPeer, MemoryRun
from potluck.sim.virtualloop import LoopClock, in_virtual_time


def beacon(epoch: int = 0, samples: int = 0, rate: float = 0.0) -> Beacon:
    return Beacon(session="s", epoch=epoch, samples=samples, samples_per_second=rate)


# The coordinator's books


def test_samples_of_all_peers_make_the_batch() -> None:
    tracker = ProgressTracker(100)
    tracker.heard("a", beacon(samples=60, rate=10), 0.0)
    tracker.heard("b", beacon(samples=30, rate=5), 0.0)
    progress = tracker.summary(0.0)
    assert (progress.samples, progress.samples_per_second, progress.num_trainers) == (90, 15, 2)
    assert not progress.is_due
    assert progress.due_in_seconds == pytest.approx(10 / 15)
    tracker.heard("b", beacon(samples=40, rate=5), 0.5)
    assert tracker.summary(0.5).is_due


def tracker_of_four(**trusted: bool) -> ProgressTracker:
    """After an epoch in which all four had samples, the next of which began at 10."""
    tracker = ProgressTracker(1000)
    tracker.weight_cap = 16.0
    for peer in "abcd":
        tracker.heard(peer, beacon(samples=100, rate=10), 9.0)
    tracker.committed(1, 10.0)
    for peer in "abcd":
        tracker.heard(peer, beacon(epoch=1, rate=10), 10.0, is_trusted=trusted.get(peer, False))
    return tracker


def test_a_claim_beyond_the_cap_does_not_make_an_epoch_due_at_once() -> None:
    tracker = tracker_of_four()
    tracker.heard("a", beacon(epoch=1, samples=10**9, rate=1e9), 10.5)
    progress = tracker.summary(10.5)
    assert not progress.is_due
    assert progress.samples == 16 * 5, "sixteen times what the others should have by now"
    assert progress.samples_per_second == 30 + 160
    assert progress.due_in_seconds is not None
    assert progress.due_in_seconds > 3.0
    for second in range(12, 17):  # as soon as a peer sixteen times as fast could have made it so
        for peer in "bcd":
            tracker.heard(peer, beacon(epoch=1, samples=10 * (second - 10), rate=10), float(second))
        assert tracker.summary(float(second)).is_due == (second >= 16)


def test_a_claim_beyond_the_cap_holds_an_epoch_up_for_a_while_at_most() -> None:
    tracker = tracker_of_four()
    for second in range(1, 32):
        now = 10.0 + second
        tracker.heard("a", beacon(epoch=1, samples=2000, rate=1000), now)
        for peer in "bcd":  # so slow that it would take an hour otherwise
            tracker.heard(peer, beacon(epoch=1, samples=0, rate=0.01), now)
        assert tracker.summary(now).is_due == (second >= MOST_DELAY_SECONDS)


def test_a_trusted_peer_of_any_speed_makes_an_epoch_due() -> None:
    tracker = tracker_of_four(a=True)
    tracker.heard("a", beacon(epoch=1, samples=1000, rate=1e6), 10.1, is_trusted=True)
    assert tracker.summary(10.1).is_due


def test_newcomers_hold_nobody_up() -> None:
    tracker = ProgressTracker(1000)
    tracker.weight_cap = 16.0
    tracker.heard("a", beacon(samples=1000, rate=100), 9.0)
    tracker.committed(1, 10.0)
    tracker.heard("a", beacon(epoch=1, samples=1000, rate=100), 20.0)
    for peer in "bc":
        tracker.heard(peer, beacon(epoch=1, samples=1, rate=0.1), 20.0)
    assert tracker.summary(20.0).is_due


def test_an_epoch_is_made_as_it_is_when_all_are_about_to_leave() -> None:
    tracker = ProgressTracker(100)
    gone = Beacon(session="s", samples=6, leaving=True)
    tracker.heard("aux", beacon(), 0.0)
    tracker.heard("a", gone, 0.0)
    tracker.heard("b", beacon(samples=4, rate=5), 0.0)
    assert not tracker.summary(0.0).is_due, "somebody goes on"
    tracker.heard("b", gone, 0.1)
    assert tracker.summary(0.1).is_due
    tracker.heard("c", beacon(samples=1, rate=5), 0.2)
    assert not tracker.summary(0.2).is_due
    tracker.forget("c")
    tracker.committed(1, 0.3)
    assert not tracker.summary(0.3).is_due, "nothing is done yet"


def test_a_prediction_is_not_a_reason_to_start() -> None:
    tracker = ProgressTracker(100)
    tracker.heard("a", beacon(samples=90, rate=10), 0.0)
    late = tracker.summary(5.0)
    assert late.due_in_seconds == 0.0
    assert not late.is_due


def test_an_epoch_stays_due_when_those_who_average_in_the_background_count_towards_the_next() -> None:
    tracker = ProgressTracker(10)
    tracker.heard("quick", beacon(samples=6), 0.0)
    tracker.heard("slow", beacon(samples=4), 0.0)
    assert tracker.summary(0.0).is_due
    tracker.heard("quick", beacon(epoch=1, samples=2), 0.1)
    assert tracker.summary(0.1).is_due
    tracker.committed(1, 0.1)
    assert not tracker.summary(0.2).is_due


def test_a_prediction_knows_how_old_a_count_is() -> None:
    tracker = ProgressTracker(100)
    tracker.heard("a", beacon(samples=50, rate=10), 10.0, age_seconds=0.5)
    tracker.heard("b", beacon(samples=20, rate=10), 10.0)
    assert tracker.summary(10.0).due_in_seconds == pytest.approx((100 - 55 - 20) / 20)
    tracker.heard("a", beacon(samples=50, rate=10), 11.0, age_seconds=1.5)
    assert tracker.summary(11.0).due_in_seconds == pytest.approx((100 - 65 - 30) / 20), "the same count, said again"
    for age_seconds in (1e9, math.inf):
        tracker.heard("a", beacon(samples=50, rate=10), 11.0, age_seconds=age_seconds)
        assert tracker.summary(11.0).due_in_seconds == 0.0, "as old as a count can be, and no older"
    tracker.heard("a", beacon(samples=50, rate=10), 11.0, age_seconds=-5.0)
    assert tracker.summary(11.0).due_in_seconds == pytest.approx((100 - 50 - 30) / 20), "nobody is ahead of the time"


def test_an_epoch_begins_anew_and_the_outdated_do_not_count() -> None:
    tracker = ProgressTracker(10)
    tracker.committed(1, 0.0)
    tracker.heard("a", beacon(samples=10), 5.0)
    tracker.heard("b", beacon(epoch=1, samples=4), 5.0)
    progress = tracker.summary(5.0)
    assert (progress.epoch, progress.samples, progress.num_behind, progress.is_due) == (1, 4, 1, False)
    tracker.committed(0, 5.0)
    assert tracker.summary(5.0).epoch == 1


def test_who_made_an_epoch_is_expected_to_work_on_the_next_before_it_says_so() -> None:
    tracker = ProgressTracker(60)
    for peer in "abc":
        tracker.heard(peer, beacon(samples=20, rate=10), 0.0)
    tracker.committed(1, 2.0)
    tracker.heard("c", beacon(samples=20, rate=10), 2.1)  # sent before it had heard of the commit
    progress = tracker.summary(2.5)
    assert progress.due_in_seconds == pytest.approx(1.5)
    assert (progress.samples, progress.num_trainers, progress.num_behind) == (0, 3, 0)
    tracker.heard("a", beacon(epoch=1, samples=4, rate=10), 4.5)
    tracker.heard("b", beacon(samples=20, rate=10), 4.5)  # it did not get the averages
    progress = tracker.summary(4.5)
    assert progress.due_in_seconds == pytest.approx((60 - 4 - 25) / 20)
    assert (progress.num_trainers, progress.num_behind) == (2, 1)


def test_the_silent_and_the_gone_are_forgotten() -> None:
    tracker = ProgressTracker(10)
    tracker.heard("a", beacon(samples=6), 0.0)
    tracker.heard("b", beacon(samples=6), 5.0)
    assert tracker.summary(5.0).is_due
    assert tracker.summary(FORGET_SECONDS + 1.0).samples == 6
    tracker.forget("b")
    assert tracker.summary(FORGET_SECONDS + 1.0).samples == 0


@pytest.mark.parametrize("samples", [-5, 10**18])
def test_nonsense_counts_for_nothing(samples: int) -> None:
    tracker = ProgressTracker(10)
    tracker.heard("liar", beacon(samples=samples, rate=math.nan), 0.0)
    tracker.heard("other", beacon(samples=1, rate=math.inf), 0.0)
    progress = tracker.summary(0.0)
    assert (progress.samples, progress.samples_per_second, progress.is_due) == (1, 0.0, False)


def test_without_a_target_of_its_own_the_tracker_takes_what_most_say() -> None:
    tracker = ProgressTracker()
    assert tracker.summary(0.0).target == 0
    assert not tracker.summary(0.0).is_due
    for peer, target in (("a", 50), ("b", 50), ("liar", 1), ("mute", 0)):
        tracker.heard(peer, Beacon(session="s", samples=12, samples_per_second=1.0, target=target), 0.0)
    progress = tracker.summary(0.0)
    assert (progress.target, progress.samples, progress.is_due) == (50, 48, False)
    assert progress.due_in_seconds == pytest.approx(0.5)


def test_an_epoch_without_samples_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="target_batch_size"):
        ProgressTracker(0)


PEERS = st.lists(
    st.tuples(st.integers(0, 10**6), st.floats(0, 1e4, allow_nan=False), st.floats(0, 60, allow_nan=False)), max_size=8
)


@given(PEERS, st.integers(1, 10**7))
def test_when_the_predicted_time_has_come_the_target_is_met(peers: list[tuple[int, float, float]], target: int) -> None:
    seconds = predict_seconds(peers, target)
    if seconds is None:
        assert sum(rate for _, rate, _ in peers) < 1e-290
        return
    assert seconds >= 0
    later = sum(samples + rate * (age + seconds) for samples, rate, age in peers)
    assert later >= target * (1 - 1e-9)
    if seconds > 0:  # and not before
        earlier = sum(samples + rate * (age + 0.99 * seconds) for samples, rate, age in peers)
        assert earlier < target * (1 + 1e-9)


def last_epochs(events: list[tuple[str, int, int]], committed_at: float) -> list[int]:
    """Where each peer is by its last word; who was one behind around the commit of an epoch has followed."""
    heard = {peer: (at, time / 10) for time, (peer, at, _) in enumerate(events)}
    epoch, until = max(at for _, at, _ in events), committed_at + FOLLOW_SECONDS
    return [epoch if at == epoch - 1 and time <= until else at for at, time in heard.values()]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.integers(0, 50)), max_size=40))
def test_the_sum_is_that_of_the_last_words_at_this_epoch(events: list[tuple[str, int, int]]) -> None:
    tracker = ProgressTracker(60)
    last: dict[str, tuple[int, int]] = {}
    epoch, committed_at = 0, 0.0
    for time, (peer, at, samples) in enumerate(events):
        now = time / 10
        tracker.heard(peer, beacon(at, samples), now)
        last[peer] = (at, samples)
        if at > epoch:
            epoch, committed_at = at, now
            tracker.committed(epoch, now)
        progress = tracker.summary(now)
        expected = sum(count for its, count in last.values() if its == epoch)
        assert progress.samples == expected
        assert progress.is_due == (expected >= 60)
        assert progress.num_behind == sum(1 for its in last_epochs(events[: time + 1], committed_at) if its < epoch)


# One peer's pace


def test_pace_leaves_out_the_time_in_rounds() -> None:
    pace = Pace(alpha=0.5)
    assert pace.samples_per_second == 0.0
    pace.resume(0.0)
    pace.step_done(10, 2.0)
    assert pace.samples_per_second == 5.0
    pace.resume(100.0)  # after a long round
    pace.step_done(10, 102.0)
    assert pace.samples_per_second == 5.0
    assert pace.seconds_per_step == 2.0
    pace.step_done(10, 103.0)
    assert pace.seconds_per_step == pytest.approx(1.5)
    with pytest.raises(ConfigurationError):
        Pace(0.0)


@pytest.mark.parametrize(
    ("due", "step", "worth"),
    [(None, 5, True), (10, 5, True), (5, 5, True), (2.6, 5, True), (2.4, 5, False), (0, 1, False), (0, 0, True)],
)
def test_another_step_or_not(due: float | None, step: float, worth: bool) -> None:
    assert is_worth_another_step(due, step) is worth


@pytest.mark.parametrize(
    ("due", "step", "grace", "patience"),
    [(0.1, 0.5, 3, 0.5), (0.1, 4, 3, 3.1), (0, 2, 2, 2), (1, 10, 3, 4)],
)
def test_nobody_waits_for_what_was_only_predicted_longer_than_it_would_lose(
    due: float, step: float, grace: float, patience: float
) -> None:
    assert patience_seconds(due, step, grace) == pytest.approx(patience)


# The news


class Company:
    def __init__(self, run: MemoryRun) -> None:
        self.run = run
        self.all: list[tuple[MemoryPeer, Collaboration]] = []

    async def join(self, *, coordinates: bool) -> Collaboration:
        peer = await self.run.join(f"p{len(self.all)}", coordinates=coordinates)
        collaboration = Collaboration(
            peer, target=20, codecs=CodecChoice(), coordinator=CoordinatorConfig(), workers=InlineWorkers()
        )
        await collaboration.start()
        self.all.append((peer, collaboration))
        return collaboration


@asynccontextmanager
async def company() -> AsyncIterator[Company]:
    run = MemoryRun(clock=LoopClock())
    await run.open()
    there = Company(run)
    try:
        yield there
    finally:
        for _, collaboration in there.all:
            await collaboration.close()
        await run.close()


@in_virtual_time
async def test_everybody_hears_when_the_batch_is_there() -> None:
    async with company() as there:
        coordinator = await there.join(coordinates=True)
        one, other = await there.join(coordinates=False), await there.join(coordinates=False)
        await asyncio.sleep(2.0)
        assert not await one.progress.until_due(0, 0.5)
        one.progress.report(epoch=0, samples=12, samples_per_second=4.0)
        await asyncio.sleep(2.5)  # by the beacon of each second, and the news of each second
        assert other.progress.latest is not None
        assert (other.progress.latest.samples, other.progress.latest.is_due) == (12, False)
        assert other.progress.seems_due(0, 8)
        assert not other.progress.seems_due(0, 7)
        before = asyncio.get_running_loop().time()
        other.progress.report(epoch=0, samples=9, samples_per_second=4.0, eager=True)
        for each in (one, other, coordinator):
            assert await each.progress.until_due(0, 5.0)
        assert asyncio.get_running_loop().time() - before < 0.3  # not by the beacon of each second


@in_virtual_time
async def test_an_end_that_is_expected_at_another_time_is_told_at_once() -> None:
    async with company() as there:
        await there.join(coordinates=True)
        one, other = await there.join(coordinates=False), await there.join(coordinates=False)
        await asyncio.sleep(2.0)
        one.progress.report(epoch=0, samples=2, samples_per_second=2.0, eager=True)
        await asyncio.sleep(0.3)
        due_in_seconds = other.progress.due_in_seconds(0)
        assert due_in_seconds is not None
        assert due_in_seconds == pytest.approx(18 / 2 - 0.3, abs=0.1)
        other.progress.report(epoch=0, samples=2, samples_per_second=4.0, eager=True)
        await asyncio.sleep(0.3)
        for each in (one, other):
            due_in_seconds = each.progress.due_in_seconds(0)
            assert due_in_seconds is not None
            assert due_in_seconds == pytest.approx((20 - 2.6 - 2) / 6 - 0.3, abs=0.1), "not a second later"


@in_virtual_time
async def test_a_word_that_was_long_on_its_way_says_less_time() -> None:
    async with company() as there:
        coordinator, trainer = await there.join(coordinates=True), await there.join(coordinates=False)
        await asyncio.sleep(2.0)
        session = there.all[0][0].session
        token = coordinator.averager.lease.view.token

        async def tell(way_seconds: float) -> float | None:
            word = RunProgress(epoch=0, token=token, target=20, due_in_seconds=1.5, told_at=session.now() - way_seconds)
            await session.hub.publish(session.subjects.news(session.peer_id, TOPIC), encode(word))
            await asyncio.sleep(0)
            return trainer.progress.due_in_seconds(0)

        assert await tell(0.5) == pytest.approx(1.0, abs=0.05)
        assert trainer.progress.way_seconds == pytest.approx(0.5, abs=0.05)
        assert await tell(-3.0) == pytest.approx(1.5, abs=0.05), "clocks are wrong: as if it came at once"
        assert await tell(1000.0) == 0.0
        assert trainer.progress.way_seconds <= 2.0


@in_virtual_time
async def test_only_the_coordinators_word_counts() -> None:
    async with company() as there:
        await there.join(coordinates=True)
        honest, liar = await there.join(coordinates=False), await there.join(coordinates=False)
        await asyncio.sleep(2.0)
        peer = there.all[2][0]
        lie = RunProgress(epoch=0, token=liar.averager.lease.view.token, samples=99, is_due=True)
        await peer.session.hub.publish(peer.session.subjects.news(peer.peer_id, TOPIC), encode(lie))
        await peer.session.hub.publish(peer.session.subjects.news(peer.peer_id, TOPIC), b"nonsense")
        await asyncio.sleep(0.5)
        assert not honest.progress.is_due(0)
        assert honest.progress.counts["foreign_news"] >= 1
        assert honest.progress.counts["bad_news"] == 1


@in_virtual_time
async def test_the_next_coordinator_keeps_the_books_on() -> None:
    async with company() as there:
        first = await there.join(coordinates=True)
        await asyncio.sleep(0.5)
        await there.join(coordinates=True)
        trainer = await there.join(coordinates=False)
        trainer.progress.report(epoch=0, samples=25, samples_per_second=1.0)
        assert await trainer.progress.until_due(0, 5.0)
        await there.run.kill(there.all[0][0])
        await first.close()
        trainer.progress.report(epoch=0, samples=3, samples_per_second=1.0)
        await asyncio.sleep(6.0)
        assert trainer.progress.latest is not None
        assert (trainer.progress.latest.samples, trainer.progress.latest.is_due) == (3, False)
        assert "3 of 20" in trainer.progress.latest.describe()
