"""How far this machine's clock is from the hub's (pure).

Deadlines and records use the hub's time, so that a peer with a wrong clock still works. One exchange tells the
offset to within half of its round trip; of the last few exchanges the quickest one is believed, because queues only
ever make one slower.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

KEPT_SAMPLES = 8
WRONG_CLOCK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class _Sample:
    round_trip_seconds: float
    offset_seconds: float


class HubTime:
    """An estimate of the hub's clock from request/reply exchanges."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=KEPT_SAMPLES)
        self._doubted = False

    def observe(self, *, sent_monotonic: float, received_monotonic: float, hub_wall: float) -> None:
        """Take in one exchange: our monotonic clock before and after, the hub's wall clock in the answer."""
        round_trip = max(0.0, received_monotonic - sent_monotonic)
        middle = sent_monotonic + round_trip / 2
        if self._doubted:
            self._samples.clear()
            self._doubted = False
        self._samples.append(_Sample(round_trip, hub_wall - middle))

    def doubt(self) -> None:
        """The clocks may have drifted apart (a laptop slept, the hub moved): the next exchange replaces the others."""
        self._doubted = True

    @property
    def is_known(self) -> bool:
        """Whether the hub has answered at least once."""
        return bool(self._samples)

    @property
    def uncertainty_seconds(self) -> float:
        """Half of the quickest round trip: how far the estimate can be off."""
        return self._best().round_trip_seconds / 2

    def at(self, monotonic: float) -> float:
        """The hub's wall clock at a moment of our monotonic clock."""
        return monotonic + self._best().offset_seconds

    def clock_error_seconds(self, *, monotonic: float, wall: float) -> float:
        """How far ahead of the hub this machine's wall clock is."""
        return wall - self.at(monotonic)

    def _best(self) -> _Sample:
        if not self._samples:
            raise RuntimeError("the hub's time is not known before the first exchange")
        return min(self._samples, key=lambda sample: sample.round_trip_seconds)
