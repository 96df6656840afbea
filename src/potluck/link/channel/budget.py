"""How much of this process's memory each peer may fill with arrived data (pure).

Half of `receive_bytes` is shared out evenly as windows: a peer's window is what it may have arrived and not yet taken
by the application. A message that is large beside the window could never complete inside it, so it is given memory of
its own from the other half, all of it before any of it is credited: two peers that each hold half of what they need
would wait for each other for ever. Who finds the pool empty queues, first come first served; no peer gets more than a
quarter of it, or the largest message if that is more. Streams take their windows from the same pool, by the same rule.
"""

from __future__ import annotations

from collections import deque

from potluck.link.limits import INITIAL_CREDIT_BYTES, KIB, LinkConfig
from potluck.link.throttle import throttle_of


def reservation_bytes(message_bytes: int) -> int:
    """The memory to set aside for a message, with the overhead of its packets."""
    return message_bytes + message_bytes // 16 + 64 * KIB


class Ledger:
    """What one peer has arrived and untaken here: in its window, and in memory that was set aside for it.

    It outlives the peer's channels and lives, so a peer that starts anew again and again gains no memory by it.
    """

    __slots__ = ("held_bytes", "reserved_bytes")

    def __init__(self) -> None:
        self.held_bytes = 0
        self.reserved_bytes = 0


class ReceiveBudget:
    """The memory of one process for what arrives."""

    def __init__(self, config: LinkConfig) -> None:
        self.largest_window_bytes = config.window_bytes
        self._shared_bytes = config.receive_bytes // 2
        self._pool_bytes = config.receive_bytes // 2
        self.peer_bytes = max(self._pool_bytes // 4, reservation_bytes(config.max_message_bytes))
        self.throttle = throttle_of(config.receive_bytes_per_second)
        """Before credit is given."""
        self._queue: deque[object] = deque()
        self._num_channels = 0
        self.reserved_bytes = 0
        self.window_bytes = self.largest_window_bytes  # each channel's, now

    def add_channels(self, count: int) -> None:
        """So many more channels share the windows. None gets less than what every sender may send unasked."""
        self._num_channels += count
        share = self._shared_bytes // max(1, self._num_channels)
        self.window_bytes = max(INITIAL_CREDIT_BYTES, min(self.largest_window_bytes, share))

    def reserve(self, owner: object, size_bytes: int) -> bool:
        """Set memory aside, or queue the owner, who asks again later, and return False."""
        first = not self._queue or self._queue[0] is owner
        if not first or self.reserved_bytes + size_bytes > self._pool_bytes:
            if not any(waiting is owner for waiting in self._queue):
                self._queue.append(owner)
            return False
        if self._queue:
            self._queue.popleft()
        self.reserved_bytes += size_bytes
        return True

    def try_reserve(self, size_bytes: int) -> bool:
        """Set memory aside at once, or not at all."""
        if self._queue or self.reserved_bytes + size_bytes > self._pool_bytes:
            return False
        self.reserved_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Give memory back."""
        self.reserved_bytes -= size_bytes
        assert self.reserved_bytes >= 0, "more was released than reserved"

    def forget(self, owner: object) -> None:
        """The owner no longer waits."""
        self._queue = deque(waiting for waiting in self._queue if waiting is not owner)
