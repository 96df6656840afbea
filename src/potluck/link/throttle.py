"""A cap on bytes per second, one for all links together (pure): a bucket that fills up at that rate.

*Sending* it is asked before each packet with a payload (peerlink.py), below the channels: what waits for it waits in
the sender's own queue, where small messages still pass bulk, and not in a router. *Receiving* it is asked before
credit is given (inbox.py): a sender has only as much credit as we want to get, so that nobody needs to be told of the
cap. What a new channel may send unasked (1 MiB) is not counted, and no channel has more than that of unused credit.

Those who find the bucket too empty stand in line, and are served in that order.
"""

from __future__ import annotations

from potluck.errors import ConfigurationError

BURST_SECONDS = 0.1  # what may pass at once after a pause
LEAST_BURST_BYTES = 64 * 1024
LEAST_BYTES_PER_SECOND = 16 * 1024  # less, and control messages alone would fill it


class Throttle:
    """Bytes that may pass. It may be overdrawn by one packet, and lets nothing pass until that is made good."""

    def __init__(self, bytes_per_second: float) -> None:
        if not bytes_per_second >= LEAST_BYTES_PER_SECOND:
            raise ConfigurationError(
                f"a bandwidth of {bytes_per_second:g} bytes per second: at least {LEAST_BYTES_PER_SECOND} are needed "
                "to take part at all. Write it with its unit, as in 20Mbit"
            )
        self.bytes_per_second = bytes_per_second
        self._burst_bytes = max(bytes_per_second * BURST_SECONDS, float(LEAST_BURST_BYTES))
        self._bytes = self._burst_bytes
        self._at = 0.0
        self._waiting: dict[object, None] = {}  # in the order in which they came

    def admits(self, user: object, num_bytes: int, now: float) -> int:
        """How much this user may pass now, if that is at least so much and its turn; else 0, and it stands in line."""
        available = self.available_bytes(now)
        if available >= num_bytes and next(iter(self._waiting), user) is user:
            return available
        self._waiting[user] = None
        return 0

    def leave(self, user: object) -> None:
        """This user has had its turn, or wants none any more."""
        self._waiting.pop(user, None)

    def available_bytes(self, now: float) -> int:
        """How much may pass now."""
        if now > self._at:
            self._bytes = min(self._burst_bytes, self._bytes + (now - self._at) * self.bytes_per_second)
            self._at = now
        return max(0, int(self._bytes))

    def spent(self, num_bytes: int) -> None:
        """So much has passed."""
        self._bytes -= num_bytes

    def available_at(self, num_bytes: int, now: float) -> float:
        """When so much may pass, if that can ever be; at most a full bucket is waited for."""
        missing = min(num_bytes, self._burst_bytes) - self.available_bytes(now) - min(0.0, self._bytes)
        return now + max(0.0, missing) / self.bytes_per_second


def throttle_of(bytes_per_second: float | None) -> Throttle | None:
    """One with that cap; None: no cap."""
    return Throttle(bytes_per_second) if bytes_per_second is not None else None
