"""Time as a collaborator, so that pure cores can be driven by a test or a simulator."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where a component reads the time from."""

    def monotonic(self) -> float:
        """Seconds that only grow; for deadlines and durations."""
        ...

    def wall(self) -> float:
        """Seconds since 1970 as this machine believes; compare across machines only by way of the hub's time."""
        ...


class SystemClock:
    """The clock of this machine."""

    def monotonic(self) -> float:
        """Seconds that only grow."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since 1970."""
        return time.time()
