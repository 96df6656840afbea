"""When the next round should be, by when the last ones were (pure).

A peer that missed a round takes over its result when the others are in the middle of their next local steps. If it then
took as many steps as they do, it would be late by as much again, and in every round after that. So it takes the steps
that fit into what is left, and is in step with the others.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from potluck.round.plan.messages import Commit

KEPT_ROUNDS = 8


class Cadence:
    """From one commit to the start of the next round. Written by one thread; others may ask."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        """The usual time; None while fewer than two epochs were seen."""
        self._before: Commit | None = None
        self._seen: deque[float] = deque(maxlen=KEPT_ROUNDS)

    def committed(self, commit: Commit) -> None:
        """An epoch was committed."""
        before, self._before = self._before, commit
        if before is None or commit.epoch != before.epoch + 1 or commit.restored is not None:
            return
        seconds = commit.committed_at - commit.seconds - before.committed_at
        if seconds > 0:
            self._seen.append(seconds)
            self.seconds = median(self._seen)

    def left_seconds(self, hub_now: float) -> float | None:
        """Until the next round should start; None: nobody can tell."""
        before, seconds = self._before, self.seconds
        return None if before is None or seconds is None else max(0.0, before.committed_at + seconds - hub_now)
