"""Merging at a quorum: who is late is waited for, as long as waiting pays off (pure).

A round starts when K trainers are ready and the others have had their grace. The grace window follows the lateness that
was seen in the rounds before: of those who came in time, and of those that the round began without. These say when they
would have been ready, so that a window that is too short grows.

It is measured against the *work* of a round, the time from the start of the one before until the quorum is there again:

    at least a third of it    ordinary jitter shuts nobody out: who is shut out has to fetch the state
    learnt up to all of it    who comes later than that is not waited for, since the others would stand still for longer
                              than they work. Its work is not lost: it counts in a later round (outerloop.py)

A coordinator that trains nothing, as a host's, is not told how its run was set up: it does as most trainers would.

A peer's contribution weighs tokens · (tokens/steps): the more it has seen, and the larger its batches, the more.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Self

import msgspec

from potluck.errors import ConfigurationError
from potluck.round.coordinator.trigger import Quorum, ReadySender
from potluck.round.plan.specs import StartSpec

KEPT_ROUNDS = 16
REMEMBERED_ROUNDS = 64
LEAST_SHARE = 1 / 3  # of a round's work
LEAST_REACH_SECONDS = 2.0  # where the work of a round takes milliseconds, a busy machine is late by more than all of it
LONGEST_GRACE_SECONDS = 300.0  # that trainers can make a host wait


class AdaptiveGrace:
    """How long to wait for stragglers, learnt from how late they were."""

    def __init__(self, *, least_seconds: float = 0.2, most_seconds: float = 30.0, margin: float = 1.25) -> None:
        if not 0 <= least_seconds <= most_seconds or not margin >= 1.0:
            raise ConfigurationError("a grace window needs 0 ≤ least_seconds ≤ most_seconds and a margin of 1 or more")
        self.least_seconds = least_seconds
        self.most_seconds = most_seconds
        self._margin = margin
        self._latest: deque[float] = deque(maxlen=KEPT_ROUNDS)  # how late the last one was, by round
        self._work: deque[float] = deque(maxlen=KEPT_ROUNDS)
        self._before: float | None = None  # what another had learnt

    @property
    def seconds(self) -> float:
        """The window: what would have done in nine of ten of the rounds before, and a margin; and a share of the work.

        Nothing is known before the second round: then all that are there are waited for as long as may be, or as long
        as the coordinator before did.
        """
        if not self._work:
            return self.most_seconds if self._before is None else min(self._before, self.most_seconds)
        ordered = sorted(self._latest)
        typical = ordered[math.ceil(0.9 * len(ordered)) - 1]
        share = LEAST_SHARE * median(self._work)
        return min(max(self._margin * typical, share, self.least_seconds), self.most_seconds)

    @property
    def reach_seconds(self) -> float:
        """A round does not wait for peers that come later than this after the quorum: a round's usual work."""
        return max(median(self._work), LEAST_REACH_SECONDS) if self._work else self.most_seconds

    def resume(self, seconds: float) -> None:
        """Another coordinator had learnt this window."""
        self._before = max(seconds, self.least_seconds)

    def round_begins(self, work_seconds: float | None) -> None:
        """Another round begins. Its quorum was there so long after the one before began; None: that is not known."""
        if work_seconds is not None and work_seconds > 0:
            self._work.append(work_seconds)
        self._latest.append(0.0)

    def observe(self, lateness_seconds: float, *, of_most: bool = False) -> None:
        """Of the round that began last: so long after the quorum another one was ready, in time or not.

        `of_most`: most trainers were. Then those in time are the exception, and their work is no measure for the rest.
        """
        reach_seconds = self.most_seconds if of_most else min(self.reach_seconds, self.most_seconds)
        if self._latest and 0.0 <= lateness_seconds <= reach_seconds:
            self._latest[-1] = max(self._latest[-1], lateness_seconds)


class AdaptiveQuorum:
    """A trigger (round/coordinator/trigger.py) with such a window."""

    def __init__(self, *, min_senders: int = 1, grace: AdaptiveGrace | None = None) -> None:
        if min_senders < 1:
            raise ConfigurationError(f"min_senders={min_senders}: a round needs at least 1 peer that contributes")
        self.grace = grace or AdaptiveGrace()
        self._min_senders = min_senders
        self._began_at: float | None = None  # the last round
        self._rounds: OrderedDict[int, _Round] = OrderedDict()  # by epoch, those that began last
        self._num_trainers = 0

    @classmethod
    def of(cls, start: StartSpec) -> Self:
        """That does as `start` says."""
        grace = AdaptiveGrace(least_seconds=start.least_seconds, most_seconds=start.most_seconds)
        return cls(min_senders=start.min_senders, grace=grace)

    @property
    def start(self) -> StartSpec:
        """What does not change."""
        grace = self.grace
        return StartSpec(
            min_senders=self._min_senders, least_seconds=grace.least_seconds, most_seconds=grace.most_seconds
        )

    @property
    def grace_seconds(self) -> float:
        """The window as it is now."""
        return self.grace.seconds

    def resume(self, grace_seconds: float) -> None:
        """See Trigger."""
        self.grace.resume(grace_seconds)

    def due_at(self, ready: Sequence[ReadySender], trainers: frozenset[str]) -> float | None:
        """As Quorum, with the window as it is now."""
        self._num_trainers = len(trainers)
        quorum = Quorum(min_senders=self._min_senders, grace_seconds=self.grace.seconds)
        return quorum.due_at(ready, trainers)

    def begun(self, epoch: int, ready: Sequence[ReadySender], now: float) -> None:
        """Learn from those who came in time. Another attempt at an epoch says nothing new of its work."""
        times = sorted(sender.since for sender in ready)
        if len(times) < self._min_senders:
            return
        if epoch not in self._rounds:
            begins = self._rounds[epoch] = _Round(times[self._min_senders - 1])
            self.grace.round_begins(None if self._began_at is None else begins.reached_at - self._began_at)
            while len(self._rounds) > REMEMBERED_ROUNDS:
                self._rounds.popitem(last=False)
        self._began_at = now
        for sender in ready:
            self._rounds[epoch].came.add(sender.peer)
            self.grace.observe(max(0.0, sender.since - self._rounds[epoch].reached_at))

    def came_late(self, epoch: int, peer: str, now: float) -> None:
        """Learn from those who did not. A peer much slower than the rest is late by several rounds."""
        late_for = self._rounds.get(epoch)
        if late_for is None or peer in late_for.came:
            return
        late_for.came.add(peer)
        late_for.late_seconds.append(max(0.0, now - late_for.reached_at))
        if 2 * len(late_for.late_seconds) > self._num_trainers:
            self.grace.observe(max(late_for.late_seconds), of_most=True)
        elif epoch == next(reversed(self._rounds)):
            self.grace.observe(late_for.late_seconds[-1])


@dataclass(slots=True)
class _Round:
    """One round that began, and who came for it."""

    reached_at: float  # when the quorum was there
    came: set[str] = field(default_factory=set)  # in time or not
    late_seconds: list[float] = field(default_factory=list)  # of those who were not in time


class ByMost:
    """A trigger for a coordinator that trains nothing: rounds start as most trainers would have them.

    That is, more than half of all that are there, whether they are ready now or were so before. Until so many agree it
    does as it was told itself: one that comes first, alone, cannot run away with the epochs of the others, nor can a
    few make them wait. A trainer's word is kept while it is there. A window that adapts does not shrink below its own
    least: who coordinates from afar sees others' delays beside their lateness.
    """

    def __init__(self, otherwise: StartSpec) -> None:
        self._otherwise = otherwise
        self._said: dict[str, StartSpec] = {}
        self._quorum = AdaptiveQuorum.of(otherwise)
        self._before: float | None = None

    @property
    def start(self) -> None:
        """It has no say of its own."""
        return None

    @property
    def grace_seconds(self) -> float:
        """The window as it is now."""
        return self._quorum.grace_seconds

    def resume(self, grace_seconds: float) -> None:
        """See Trigger."""
        self._before = grace_seconds
        self._quorum.resume(grace_seconds)

    def due_at(self, ready: Sequence[ReadySender], trainers: frozenset[str]) -> float | None:
        """As they would."""
        said = self._said | {sender.peer: sender.start for sender in ready if sender.start is not None}
        self._said = {peer: start for peer, start in said.items() if peer in trainers}
        start = self._chosen(len(trainers))
        if start != self._quorum.start:
            self._quorum = AdaptiveQuorum.of(start)
            if self._before is not None:
                self._quorum.resume(self._before)
        return self._quorum.due_at(ready, trainers)

    def begun(self, epoch: int, ready: Sequence[ReadySender], now: float) -> None:
        """As they would."""
        self._quorum.begun(epoch, ready, now)

    def came_late(self, epoch: int, peer: str, now: float) -> None:
        """As they would."""
        self._quorum.came_late(epoch, peer, now)

    def _chosen(self, num_trainers: int) -> StartSpec:
        for start, num_votes in Counter(self._said.values()).most_common(1):
            if 2 * num_votes > num_trainers:
                most_seconds = min(start.most_seconds, LONGEST_GRACE_SECONDS)
                least_seconds = min(max(start.least_seconds, self._otherwise.least_seconds), most_seconds)
                return msgspec.structs.replace(start, least_seconds=least_seconds, most_seconds=most_seconds)
        return self._otherwise


def token_weight(tokens: int, steps: int) -> float:
    """What a contribution weighs: tokens · (tokens per step)."""
    return tokens * (tokens / steps) if steps > 0 else 0.0
