"""When to start a server again that has died, and when to give it up (pure).

A server that dies once is started at once. One that dies again is given more and more time, and after a few deaths in
a short time it is not started any more: whatever kills it needs a person. Deaths that are long past are forgiven.
"""

from __future__ import annotations

from collections import deque

from potluck.clock import Clock

MAX_RESTARTS = 5
WITHIN_SECONDS = 120.0
FIRST_WAIT_SECONDS = 0.1
LONGEST_WAIT_SECONDS = 10.0


class Restarts:
    """The deaths of one server."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._deaths: deque[float] = deque()

    def next_wait_seconds(self) -> float | None:
        """It has died: how long to wait before it is started again; None: it has died too often."""
        now = self._clock.monotonic()
        while self._deaths and now - self._deaths[0] > WITHIN_SECONDS:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > MAX_RESTARTS:
            return None
        return float(min(FIRST_WAIT_SECONDS * 2 ** (len(self._deaths) - 1), LONGEST_WAIT_SECONDS))
