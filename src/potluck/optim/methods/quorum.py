"""Merging at a quorum: who is late is waited for, but only as long as waiting has paid off (pure).

A round starts when K trainers are ready and the others have had their grace. The grace window follows the lateness that
was seen in the rounds before: long enough for a peer that is usually a little late, and no longer. Lateness is seen
only of those who came in time, so that by this alone the window would shrink until ordinary jitter shuts peers out, and
who is shut out has to fetch the state. So it is never less than a quarter of the time from one round to the next: a
peer that is out of reach costs the others that much, and one that is shut out would lose four times as much.

A coordinator that trains nothing, as a host's, is not told how its run was set up: it does as most trainers would.

A peer's contribution weighs tokens · (tokens/steps): the more it has seen, and the larger its batches, the more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Self

import msgspec

from potluck.errors import ConfigurationError
from potluck.round.specs import StartSpec
from potluck.round.trigger import Quorum, ReadySender

KEPT_ROUNDS = 16
LEAST_SHARE = 0.25  # of the time from one round to the next
LONGEST_GRACE_SECONDS = 300.0  # that trainers can make a host wait


class AdaptiveGrace:
    """How long to wait for stragglers, learnt from how late they were."""

    def __init__(self, *, least_seconds: float = 0.2, most_seconds: float = 30.0, margin: float = 1.25) -> None:
        if not 0 <= least_seconds <= most_seconds or not margin >= 1.0:
            raise ConfigurationError("a grace window needs 0 ≤ least_seconds ≤ most_seconds and a margin of 1 or more")
        self.least_seconds = least_seconds
        self.most_seconds = most_seconds
        self._margin = margin
        self._lateness: deque[float] = deque(maxlen=KEPT_ROUNDS)
        self._intervals: deque[float] = deque(maxlen=KEPT_ROUNDS)

    @property
    def seconds(self) -> float:
        """The window: nine in ten of the lateness seen lately, and a margin; and a share of a round's time.

        Nothing is known before the second round.
        """
        if not (self._lateness and self._intervals):
            return max(self.most_seconds / 4, self.least_seconds)
        ordered = sorted(self._lateness)
        typical = ordered[(9 * (len(ordered) - 1)) // 10]
        share = LEAST_SHARE * median(self._intervals)
        return min(max(self._margin * typical, share, self.least_seconds), self.most_seconds)

    def rounds_are_apart(self, seconds: float) -> None:
        """So long after the one before a quorum was there again."""
        self._intervals.append(seconds)

    def observe(self, lateness_seconds: Sequence[float]) -> None:
        """A round is over: how long after the quorum each of the others was ready, as far as they came."""
        self._lateness.extend(late for late in lateness_seconds if 0.0 <= late <= self.most_seconds)


class AdaptiveQuorum:
    """A trigger (round/trigger.py) with such a window. Its memory is a convenience: a new coordinator learns anew."""

    def __init__(self, *, min_senders: int = 1, grace: AdaptiveGrace | None = None) -> None:
        if min_senders < 1:
            raise ConfigurationError(f"min_senders={min_senders}: a round needs at least 1 peer that contributes")
        self.grace = grace or AdaptiveGrace()
        self._min_senders = min_senders
        self._seen: dict[str, float] = {}
        self._reached_at: float | None = None

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

    def due_at(self, ready: Sequence[ReadySender], trainers: frozenset[str]) -> float | None:
        """As Quorum, with the window as it is now."""
        now_ready = {sender.peer: sender.since for sender in ready}
        if any(self._seen[peer] != now_ready.get(peer) for peer in self._seen):  # another round has begun
            self._learn(self._seen)
        self._seen = now_ready
        quorum = Quorum(min_senders=self._min_senders, grace_seconds=self.grace.seconds)
        return quorum.due_at(ready, trainers)

    def _learn(self, since: Mapping[str, float]) -> None:
        if len(since) >= self._min_senders:
            times = sorted(since.values())
            reached_at, before = times[self._min_senders - 1], self._reached_at
            self._reached_at = reached_at
            if before is not None and reached_at > before:
                self.grace.rounds_are_apart(reached_at - before)
            self.grace.observe([time - reached_at for time in times[self._min_senders :]])


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

    @property
    def start(self) -> None:
        """It has no say of its own."""
        return None

    def due_at(self, ready: Sequence[ReadySender], trainers: frozenset[str]) -> float | None:
        """As they would."""
        said = self._said | {sender.peer: sender.start for sender in ready if sender.start is not None}
        self._said = {peer: start for peer, start in said.items() if peer in trainers}
        start = self._chosen(len(trainers))
        if start != self._quorum.start:
            self._quorum = AdaptiveQuorum.of(start)
        return self._quorum.due_at(ready, trainers)

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
