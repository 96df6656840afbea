"""The line that all links of this process send over (pure): whose packet is next, and what rounds leave to streams.

**Streams beside bulk.** A state is much larger than what a round exchanges, and nobody waits for it. So while any link
has bulk to send, streams get `stream_share` of the bytes on all links together: each byte of bulk that leaves earns
them a part of one. That needs no measured speed. Where bulk waits and does not move (its receiver takes nothing, or its
path is dead) the line is free, and streams have it.

**Turns under a cap.** With a cap on what is sent, links take turns packet by packet. Otherwise the link that looks
first, each time that the bucket has filled, would have the whole line, and the others would seem dead to their peers.
"""

from __future__ import annotations

import math

from potluck.link.channel.packet import Urgency
from potluck.link.limits import KIB
from potluck.link.throttle import Throttle

MOVING_SECONDS = 1.0  # bulk that has not moved for so long leaves the line to streams
MOST_EARNED_BYTES = 256.0 * KIB  # what streams may send at once after bulk had the line
MOST_OVERDRAWN_BYTES = 64.0 * KIB  # what they pay back of what they sent while the line was free
LOOK_AGAIN_SECONDS = 0.05
AT_ONCE = 0.0


class SharedLine:
    """What leaves next. Links are told apart by identity."""

    def __init__(self, throttle: Throttle | None, *, stream_share: float) -> None:
        self._throttle = throttle
        self._earned_by_byte = stream_share / (1.0 - stream_share)
        self._earned_bytes = 0.0
        self._with_bulk: set[object] = set()
        self._bulk_left_at = -math.inf

    @property
    def bytes_per_second(self) -> float:
        """The cap; infinite where there is none."""
        return self._throttle.bytes_per_second if self._throttle is not None else math.inf

    def bulk_waits(self, link: object, waits: bool) -> None:
        """Whether this link has bulk to send, or on its way."""
        if waits:
            self._with_bulk.add(link)
        else:
            self._with_bulk.discard(link)

    def admits_streams(self, now: float, *, has_bulk: bool = False) -> bool:
        """Whether the next packet may be a stream's, on a link that has bulk to send itself, or has none."""
        return self._earned_bytes > 0 or not (has_bulk or self._is_taken(now))

    def _is_taken(self, now: float) -> bool:
        """Whether bulk moves."""
        return bool(self._with_bulk) and now - self._bulk_left_at < MOVING_SECONDS

    def admits(self, link: object, now: float) -> bool:
        """Whether this link may send a packet with a payload. If not, it stands in line until it has, or `left`."""
        return self._throttle is None or self._throttle.admits(link, 1, now) > 0

    def sent(self, link: object, header_bytes: int, payload_bytes: int, urgency: Urgency, now: float) -> None:
        """A packet has left. One without a payload needs no turn."""
        num_bytes = header_bytes + payload_bytes
        if self._throttle is not None:
            self._throttle.spent(num_bytes)
            if payload_bytes:
                self._throttle.leave(link)
        if urgency == Urgency.BULK:
            self._bulk_left_at = now
            self._earned_bytes = min(self._earned_bytes + num_bytes * self._earned_by_byte, MOST_EARNED_BYTES)
        elif urgency == Urgency.STREAM:
            least = -math.inf if self._is_taken(now) else min(self._earned_bytes, -MOST_OVERDRAWN_BYTES)
            self._earned_bytes = max(self._earned_bytes - num_bytes, least)

    def left(self, link: object) -> None:
        """This link has nothing to send now, or no way to."""
        if self._throttle is not None:
            self._throttle.leave(link)

    def look_again_at(self, now: float) -> float:
        """When a link that was refused, by `admits` or `admits_streams`, should ask again; long ago: at once."""
        if self._throttle is None:
            return now + LOOK_AGAIN_SECONDS
        # Not `now`: that would be later than the moment at which the caller has looked at the clock.
        return AT_ONCE if self._throttle.available_bytes(now) else self._throttle.available_at(1, now)
