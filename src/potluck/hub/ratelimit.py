"""How often somebody may try (pure).

Each key has a bucket of tries that fills up again with time. The table is bounded: when it is full, the bucket that was
used longest ago is forgotten, which can only be to a stranger's advantage.
"""

from __future__ import annotations

from collections import OrderedDict

from potluck.clock import Clock

MAX_KEYS = 4096


class RateLimit:
    """Tries per key: `burst` at once, and `per_second` more as time passes."""

    def __init__(self, *, burst: float, per_second: float, clock: Clock, max_keys: int = MAX_KEYS) -> None:
        self._burst = burst
        self._per_second = per_second
        self._clock = clock
        self._max_keys = max_keys
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # key -> tries left, at which time

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str) -> bool:
        """Use up one try; False when there is none left."""
        left = self._left(key)
        if left < 1:
            return False
        self._buckets[key] = (left - 1, self._clock.monotonic())
        self._buckets.move_to_end(key)
        while len(self._buckets) > self._max_keys:
            self._buckets.popitem(last=False)
        return True

    def is_exhausted(self, key: str) -> bool:
        """Whether no try is left."""
        return self._left(key) < 1

    def seconds_until_next(self, key: str) -> float:
        """How long until there is a try."""
        return max(0.0, 1 - self._left(key)) / self._per_second

    def _left(self, key: str) -> float:
        left, at = self._buckets.get(key, (self._burst, 0.0))
        return min(self._burst, left + (self._clock.monotonic() - at) * self._per_second)
