"""How fast bytes really move (pure).

Bytes over time is easy; which time counts is not. At 4 Mbit/s half a megabyte takes a second: a meter that calls the
pause between two packets idle finds any link fast. A meter that counts pauses in which nobody wanted anything finds
any link slow. So the owner of a meter says when a transfer is in progress, which it knows: on the way up while much is
unacknowledged, on the way down while the sender says that more is coming and has credit to send it. Only that time
counts, and only what arrives in it.

Three corrections. Acknowledgements come a round trip late, so each transfer's first round trip is taken off, up to half
of its time. Transfers of a few bytes say nothing about speed and are left out. And while the next piece is awaited, it
is assumed to be about to arrive: the speed sinks only once the piece is later than the speed so far explains.
"""

from __future__ import annotations

import math

MEMORY_SECONDS = 10.0  # of transferring: how far back the average reaches
LEAST_TRANSFER_BYTES = 64 * 1024


class SpeedMeter:
    """Average speed of transfers, one way. Several may be in progress at once: their bytes add up, time runs once."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._num_transfers = 0
        self._counted_until = 0.0
        self._latency_seconds = 0.0
        self._pending_bytes = 0.0
        self._pending_seconds = 0.0
        self._is_informative = False  # this transfer has moved enough to count
        self._bytes = 0.0
        self._seconds = 0.0
        self._piece_bytes = 0.0

    def begin(self, now: float, *, latency_seconds: float = 0.0) -> None:
        """A transfer is in progress. `latency_seconds`: how much later than it arrives is a byte seen here?"""
        self._num_transfers += 1
        if self._num_transfers == 1:
            self._counted_until = now
            self._latency_seconds = latency_seconds
            self._pending_bytes = self._pending_seconds = 0.0
            self._is_informative = False

    def end(self) -> None:
        """A transfer is over, or stands still for a reason that is not the path's."""
        assert self._num_transfers > 0, "a transfer ended that never began"
        self._num_transfers -= 1

    def moved(self, num_bytes: int, now: float) -> None:
        """So many bytes have arrived."""
        self.total_bytes += num_bytes
        if not self._num_transfers:
            return
        self._pending_seconds += now - self._counted_until
        self._pending_bytes += num_bytes
        self._counted_until = now
        self._piece_bytes = max(num_bytes, self._piece_bytes * 0.9)
        self._is_informative = self._is_informative or self._pending_bytes >= LEAST_TRANSFER_BYTES
        if self._is_informative:
            self._settle()

    def _settle(self) -> None:
        discount = min(self._latency_seconds, self._pending_seconds / 2)
        self._latency_seconds -= discount
        seconds = self._pending_seconds - discount
        fading = math.exp(-seconds / MEMORY_SECONDS)
        self._bytes = self._bytes * fading + self._pending_bytes
        self._seconds = self._seconds * fading + seconds
        self._pending_bytes = self._pending_seconds = 0.0

    def bytes_per_second(self, now: float) -> float | None:
        """The speed; None while too little has been moved to tell."""
        if self._seconds <= 0.0:
            return None
        speed = self._bytes / self._seconds
        if self._num_transfers and self._is_informative:
            waited = now - self._counted_until
            speed = min(speed, (self._bytes + self._piece_bytes) / (self._seconds + waited))
        return speed


class Transfer:
    """One peer's part in several meters: its own and the one for all peers."""

    def __init__(self, *meters: SpeedMeter) -> None:
        self._meters = meters
        self._in_progress = False

    def update(self, in_progress: bool, now: float, latency_seconds: float = 0.0) -> None:
        """Say whether a transfer is in progress."""
        if in_progress == self._in_progress:
            return
        self._in_progress = in_progress
        for meter in self._meters:
            if in_progress:
                meter.begin(now, latency_seconds=latency_seconds)
            else:
                meter.end()

    def moved(self, num_bytes: int, now: float) -> None:
        """So many bytes have arrived."""
        for meter in self._meters:
            meter.moved(num_bytes, now)
