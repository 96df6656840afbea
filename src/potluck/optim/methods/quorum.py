"""Merging at a quorum: who is late is waited for, but only as long as waiting has paid off (pure).

A round starts when K trainers are ready and the others have had their grace. The grace window follows the lateness that
was seen in the rounds before: long enough for a peer that is usually a little late, and no longer. A peer that is out
of reach costs one window, which then shrinks back.

A peer's contribution weighs tokens · (tokens/steps): the more it has seen, and the larger its batches, the more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from potluck.errors import ConfigurationError
from potluck.round.trigger import Quorum, ReadySender

KEPT_ROUNDS = 16


class AdaptiveGrace:
    """How long to wait for stragglers, learnt from how late they were."""

    def __init__(self, *, least_seconds: float = 0.2, most_seconds: float = 30.0, margin: float = 1.25) -> None:
        if not 0 <= least_seconds <= most_seconds or not margin >= 1.0:
            raise ConfigurationError("a grace window needs 0 ≤ least_seconds ≤ most_seconds and a margin of 1 or more")
        self._least_seconds = least_seconds
        self._most_seconds = most_seconds
        self._margin = margin
        self._lateness: deque[float] = deque(maxlen=KEPT_ROUNDS)

    @property
    def seconds(self) -> float:
        """The window: nine in ten of the lateness seen lately, and a margin."""
        if not self._lateness:
            return self._most_seconds / 4
        ordered = sorted(self._lateness)
        typical = ordered[(9 * (len(ordered) - 1)) // 10]
        return min(max(self._margin * typical, self._least_seconds), self._most_seconds)

    def observe(self, lateness_seconds: Sequence[float]) -> None:
        """A round is over: how long after the quorum each of the others was ready, as far as they came."""
        self._lateness.extend(late for late in lateness_seconds if 0.0 <= late <= self._most_seconds)


class AdaptiveQuorum:
    """A trigger (round/trigger.py) with such a window. Its memory is a convenience: a new coordinator learns anew."""

    def __init__(self, *, min_senders: int = 1, grace: AdaptiveGrace | None = None) -> None:
        if min_senders < 1:
            raise ConfigurationError(f"min_senders={min_senders}: a round needs at least 1 peer that contributes")
        self.grace = grace or AdaptiveGrace()
        self._min_senders = min_senders
        self._seen: dict[str, float] = {}

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
            reached_at = times[self._min_senders - 1]
            self.grace.observe([time - reached_at for time in times[self._min_senders :]])


def token_weight(tokens: int, steps: int) -> float:
    """What a contribution weighs: tokens · (tokens per step)."""
    return tokens * (tokens / steps) if steps > 0 else 0.0
