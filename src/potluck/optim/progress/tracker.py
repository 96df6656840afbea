"""How far the run is towards its next epoch (pure): samples out of beacons, and when there will be enough.

Every trainer says in its beacons how many samples it has handed in since the last committed epoch, and how fast it is.
The coordinator adds them up and tells everybody (`RunProgress`): among n peers that is n messages in and n out, where
everybody listening to everybody would be n². Between two beacons of a peer its samples are extrapolated, for the
prediction alone: a round starts when the samples *are* there.

A count is what a peer says. So that nobody makes every epoch due at once, it counts up to `weight_cap` times what the
others, by their median, have or should have by now. Where only such a claim makes the batch full, the epoch comes
later, but not by more than MOST_DELAY_SECONDS: a peer that really is so fast should not be held up for long.

Who averages in the background counts its samples towards the epoch after the one that is being made. What it had for
that one it says no more; but that it is ahead says that it was due, and those who have not come yet should.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from potluck.errors import ConfigurationError
from potluck.hub.presence import Beacon
from potluck.messages import Message
from potluck.optim.methods.dylu import fast_rate
from potluck.round.plan.weights import Medians

FORGET_SECONDS = 10.0  # the guard gives up a peer that was silent for so long, and so do we
LARGEST_COUNT = 10**12  # samples of one peer in one epoch: more is nonsense, and would start every round at once
MAX_PEERS = 100_000
OLDEST_SECONDS = 2.0  # a count that is said to be older than that is taken to be so old: clocks may be wrong
MOST_DELAY_SECONDS = 30.0  # of an epoch that claims beyond the cap have made full
FOLLOW_SECONDS = 2.0  # for a commit to be heard of and brought in: until then nobody counts as behind

Count = Annotated[int, msgspec.Meta(ge=0)]
Rate = Annotated[float, msgspec.Meta(ge=0.0)]


class RunProgress(Message, frozen=True, kw_only=True):
    """What the coordinator tells everybody about the run."""

    epoch: Count  # committed; what follows is about the next one
    token: Count  # of the coordinator's lease
    samples: Count = 0  # handed in by all since then
    target: Count = 0  # of them make an epoch; 0: nobody has said
    samples_per_second: Rate = 0.0
    fast_steps_per_second: Rate = 0.0  # local steps of the fast peers (methods/dylu.py); 0: nobody has said
    num_trainers: Count = 0  # that are at this epoch
    num_behind: Count = 0  # whose state is of an earlier one
    due_in_seconds: Rate | None = None  # predicted; None: nobody can tell
    is_due: bool = False  # start now
    told_at: Rate = 0.0  # hub time

    def describe(self) -> str:
        """In one line."""
        eta = "" if self.due_in_seconds is None else f", due in {self.due_in_seconds:.1f} s"
        wanted = f" of {self.target}" if self.target else ""
        return (
            f"epoch {self.epoch}: {self.samples}{wanted} samples from {self.num_trainers} trainers, "
            f"{self.samples_per_second:.1f}/s{eta}"
        )


@dataclass(slots=True)
class _Known:
    epoch: int
    samples: int
    samples_per_second: float
    steps_per_second: float
    target: int
    leaving: bool
    heard_at: float
    counted_at: float  # when it had the samples
    is_trusted: bool  # its word is taken
    is_measured: bool  # it had samples for an earlier epoch too, so that others can be held against it


class ProgressTracker:
    """The coordinator's books for one run."""

    def __init__(self, target: int | None = None) -> None:
        """`target` is the samples of an epoch; None: what most trainers say."""
        if target is not None and target < 1:
            raise ConfigurationError(f"target_batch_size={target}: an epoch needs at least 1 sample")
        self.target = target
        self.weight_cap: float | None = None
        """How many times what others have may count of what a peer says; None: all of it."""
        self.epoch = 0
        self._committed_at = 0.0
        self._peers: dict[str, _Known] = {}

    def heard(
        self, peer: str, beacon: Beacon, now: float, *, age_seconds: float = 0.0, is_trusted: bool = False
    ) -> None:
        """Take in a beacon, whose count is so old. What cannot be is left out: it comes from anybody."""
        if peer not in self._peers and len(self._peers) >= MAX_PEERS:
            return
        rate, steps_rate = beacon.samples_per_second, beacon.steps_per_second
        before = self._peers.get(peer)
        self._peers[peer] = _Known(
            epoch=beacon.epoch,
            samples=beacon.samples if 0 <= beacon.samples <= LARGEST_COUNT else 0,
            samples_per_second=rate if 0.0 <= rate <= LARGEST_COUNT else 0.0,
            steps_per_second=steps_rate if 0.0 <= steps_rate <= LARGEST_COUNT else 0.0,
            target=beacon.target if 0 < beacon.target <= LARGEST_COUNT else 0,
            leaving=beacon.leaving,
            heard_at=now,
            counted_at=now - min(max(age_seconds, 0.0), OLDEST_SECONDS),
            is_trusted=is_trusted,
            is_measured=before is not None
            and (before.is_measured or (before.samples > 0 and before.epoch < beacon.epoch)),
        )

    def forget(self, peer: str) -> None:
        """A peer is gone, and what it had done with it."""
        self._peers.pop(peer, None)

    def committed(self, epoch: int, now: float) -> None:
        """So many epochs are committed: if that is news, counting begins anew."""
        if epoch > self.epoch:
            self.epoch, self._committed_at = epoch, now

    def summary(self, now: float, *, token: int = 0, told_at: float = 0.0) -> RunProgress:
        """Where the run is; `told_at` is hub time."""
        for peer in [peer for peer, known in self._peers.items() if now - known.heard_at > FORGET_SECONDS]:
            del self._peers[peer]
        by_now = {peer: self._by_now(known) for peer, known in self._peers.items()}
        told = {peer: known for peer, known in by_now.items() if known.epoch == self.epoch}
        current = self._plausible(told, now - self._committed_at)
        is_begun = any(known.epoch == self.epoch + 1 for known in self._peers.values())
        samples = sum(known.samples for known in current)
        target = self.target or _most_common([known.target for known in current if known.target])
        rate = sum(known.samples_per_second for known in current)
        is_late = now - self._committed_at >= MOST_DELAY_SECONDS
        is_full = target <= (sum(known.samples for known in told.values()) if is_late else samples)
        due_in_seconds = predict_seconds(
            [(known.samples, known.samples_per_second, now - known.counted_at) for known in current], target
        )
        return RunProgress(
            epoch=self.epoch,
            token=token,
            samples=samples,
            target=target,
            samples_per_second=rate,
            fast_steps_per_second=fast_rate(known.steps_per_second for known in self._peers.values()),
            num_trainers=sum(1 for known in current if known.samples or known.samples_per_second),
            num_behind=sum(1 for known in self._peers.values() if self._by_now(known).epoch < self.epoch),
            due_in_seconds=due_in_seconds,
            is_due=(target > 0 and is_full) or is_begun or (samples > 0 and not self._is_computed_on(current)),
            told_at=max(told_at, 0.0),
        )

    def _plausible(self, told: dict[str, _Known], seconds: float) -> list[_Known]:
        """With as much of counts and speeds as others make plausible, `seconds` after the epoch began."""
        cap = self.weight_cap
        if cap is None:
            return list(told.values())
        others = {peer: known for peer, known in told.items() if known.is_measured and known.samples_per_second > 0}
        rates = Medians({peer: known.samples_per_second for peer, known in others.items()})
        counts = Medians({p: max(known.samples, known.samples_per_second * seconds) for p, known in others.items()})

        def limited(peer: str, known: _Known) -> _Known:
            count, rate = counts.without(peer), rates.without(peer)
            if known.is_trusted or count is None or rate is None:
                return known
            return replace(
                known,
                samples=min(known.samples, int(cap * count)),
                samples_per_second=min(known.samples_per_second, cap * rate),
            )

        return [limited(peer, known) for peer, known in told.items()]

    @staticmethod
    def _is_computed_on(current: list[_Known]) -> bool:
        """Whether somebody adds to the epoch. Where all are about to leave, nobody does, and it is made as it is."""
        return any(not known.leaving for known in current if known.samples or known.samples_per_second)

    def _by_now(self, known: _Known) -> _Known:
        """A peer that was at the epoch before, around its commit, works on the next one by now.

        Where epochs last a second or two, they would be over before anybody could predict their end otherwise.
        """
        if known.epoch == self.epoch - 1 and known.heard_at <= self._committed_at + FOLLOW_SECONDS:
            return replace(known, epoch=self.epoch, samples=0, counted_at=self._committed_at)
        return known


def _most_common(targets: list[int]) -> int:
    """What most say, and the larger of two that as many say; 0 when nobody says anything."""
    return max(targets, key=lambda target: (targets.count(target), target), default=0)


def predict_seconds(peers: list[tuple[int, float, float]], target: int) -> float | None:
    """Seconds until the peers, each (samples, samples per second, seconds since it said so), have the target together.

    0 when they should have it by now; None when they never will at this rate.
    """
    if target < 1:
        return None
    expected = sum(samples + rate * age for samples, rate, age in peers)
    if expected >= target:
        return 0.0
    rate = sum(rate for _, rate, _ in peers)
    seconds = (target - expected) / rate if rate > 0 else math.inf
    return seconds if math.isfinite(seconds) else None
