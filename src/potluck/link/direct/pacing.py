"""A common pace for connections that send much at the same time.

Each TCP connection sends as fast as it finds the line to be when it is alone there. In a round a peer sends to many at
once, all over its own line: after each pause they begin together, each at the speed of the whole line, the router's
queue overflows, and what was lost is sent again. So once that was seen, the connections that are busy divide the line's
speed among them, and the kernel spaces out the packets of each.

What the line carries is what the others acknowledge, of all connections together. The estimate sinks slowly while the
line is too full, and rises while all of it is used and nothing is lost. It never sinks far below the best that was
seen: on bad lines packets are lost at any speed, and a pace that is too high does no more harm than none. Nor is an
estimate believed for long that may be too low: what was measured while TCP itself still sped up says nothing, a line
that stays calm is tried with leaps, and one that always seems full (by its delays, so does any line of a busy machine)
is asked for more now and then. Before the line was ever full there is no pace, nor for a connection that is alone, nor
on a short way, where what is lost is sent again before it matters. A connection that cannot use its share leaves it to
the others, and one whose own line is full says nothing about ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from potluck.link.direct.sockets import Progress

BULK_BYTES = 64 * 1024  # who has so much waiting is busy, until no more than that is under way
LONG_WAY_SECONDS = 0.01  # there and back
WINDOW_SECONDS = 0.3  # acknowledgements come in bursts: in shorter times the line would seem faster than it is
FULL_LOSS = 0.01  # of a connection's packets were sent again: its way is full
FULL_DELAY = 1.25  # times as long as on an empty way: likewise
USED = 0.9  # of the speed, or of a share
BACK_OFF = 0.95
LEAST = 0.8  # of the best that was seen
STEP_UP = 1.05
LEAP_UP = 1.3
CALM_WINDOWS = 3  # in so many, one after the other, all was used and nothing full: the line carries far more
GROWING = 1.25  # times the best before, as BBR has it: connections still find out how fast they may be
PROBE_UP = 1.25
PROBE_WINDOWS = 8  # one in so many, while the line seems full; as in BBR's cycle
ROOM_TO_GROW = 1.25  # over what a connection used that did not use its share: the rest is for the others
RENEW_SECONDS = 5.0  # how old a measure of the way may be when much is sent; at 10 s some kernels stop for it


class LineSpeed:
    """What the line of this peer carries (pure)."""

    def __init__(self) -> None:
        self.bytes_per_second: float | None = None
        """The estimate; None: it was never full."""
        self._best = 0.0
        self._num_full = 0  # windows one after the other
        self._num_calm = 0  # likewise, in which all was used
        self._before_probe: float | None = None

    def observe(self, bytes_per_second: float, *, is_full: bool) -> None:
        """So much was acknowledged in one window, in which several connections had more to send."""
        is_growing = bytes_per_second > self._best * GROWING
        self._best = max(self._best, bytes_per_second)
        is_carried = self.bytes_per_second is not None and bytes_per_second >= self.bytes_per_second * USED
        speed, self._before_probe = self._before_probe or self.bytes_per_second, None
        if speed is None:
            if is_full and not is_growing:
                self.bytes_per_second = self._best
        elif is_full:
            is_probe_carried = is_carried and speed != self.bytes_per_second
            self._num_full, self._num_calm = self._num_full + 1, 0
            self.bytes_per_second = max(speed * BACK_OFF, bytes_per_second, self._best * LEAST)
            if is_probe_carried or self._num_full % PROBE_WINDOWS == 0:
                self._before_probe = self.bytes_per_second
                self.bytes_per_second *= PROBE_UP
        elif is_carried:
            self._num_full, self._num_calm = 0, self._num_calm + 1
            step = STEP_UP if self._num_calm <= CALM_WINDOWS else LEAP_UP
            self.bytes_per_second = max(speed, bytes_per_second) * step


K = TypeVar("K")


def shares(speed: float, wants: Mapping[K, float]) -> dict[K, float]:
    """Divide a speed so that nobody gets more than it wants, and what one leaves goes to the others in equal parts."""
    given: dict[K, float] = {}
    left = speed
    for number, (key, want) in enumerate(sorted(wants.items(), key=lambda item: item[1])):
        given[key] = min(want, left / (len(wants) - number))
        left -= given[key]
    return given


class Paced(Protocol):
    """An open connection, as far as its pace is concerned."""

    @property
    def queued_bytes(self) -> int:
        """How much waits that the socket has not taken yet."""
        ...

    def progress(self) -> Progress | None:
        """How far TCP has come with what it was given; None where it cannot tell, or the connection is gone."""
        ...

    def set_pace(self, bytes_per_second: float | None) -> None:
        """Send at most so fast; None: as fast as TCP wants."""
        ...

    def renew(self) -> None:
        """Have TCP not stop to measure the way for the next while."""
        ...


P = TypeVar("P", bound=Paced)


@dataclass(slots=True)
class _Sender:
    """A busy connection."""

    began_at: float
    before: Progress  # at the begin of the window, or when it became busy
    want: float = math.inf  # bytes per second
    pace: float | None = None


class Pacer(Generic[P]):
    """Divides the line among the connections of one carrier that are busy."""

    def __init__(self) -> None:
        self._line = LineSpeed()
        self._senders: dict[P, _Sender] = {}
        self._renewed_at: dict[P, float] = {}
        self._window_began_at = 0.0
        self._finished_bytes = 0  # acknowledged in this window, of those that are not busy any more

    @property
    def bytes_per_second(self) -> float | None:
        """What the line carries, as far as is known."""
        return self._line.bytes_per_second

    def begin(self, connection: P, now: float) -> None:
        """This connection has much to send. To be called as often as that is seen; `now` is monotonic."""
        if connection in self._senders:
            return
        progress = connection.progress()
        if progress is None or progress.shortest_way_seconds < LONG_WAY_SECONDS:
            return
        self._senders[connection] = _Sender(now, progress)
        self._renew(connection, now)
        if len(self._senders) == 2:
            self._begin_window(_progress(self._senders), now)
        self._share()

    def forget(self, connection: P) -> None:
        """This connection has ended."""
        self._renewed_at.pop(connection, None)
        if self._senders.pop(connection, None) is not None:
            self._share()

    def look(self, now: float) -> None:
        """See how far all have come, and who is done. To be called often."""
        if not self._senders:
            return
        seen = _progress(self._senders)
        seconds = now - self._window_began_at
        is_window_over = len(self._senders) > 1 and seconds >= WINDOW_SECONDS
        if is_window_over:
            self._learn(seen, seconds)
            self._begin_window(seen, now)
        done = [c for c, progress in seen.items() if c.queued_bytes + progress.waiting_bytes < BULK_BYTES]
        for connection in done:
            sender = self._senders.pop(connection)
            self._finished_bytes += seen[connection].acknowledged_bytes - sender.before.acknowledged_bytes
            connection.set_pace(None)
        if is_window_over or done:
            self._share()

    def _renew(self, connection: P, now: float) -> None:
        is_old = now - self._renewed_at.get(connection, -math.inf) > RENEW_SECONDS
        if is_old and self._line.bytes_per_second is not None:
            self._renewed_at[connection] = now
            connection.renew()

    def _begin_window(self, seen: Mapping[P, Progress], now: float) -> None:
        self._window_began_at = now
        self._finished_bytes = 0
        for connection, progress in seen.items():
            self._senders[connection].before = progress

    def _learn(self, seen: Mapping[P, Progress], seconds: float) -> None:
        """What this window says about the line, and about what each connection can use."""
        total_bytes = self._finished_bytes
        num_full = 0
        for connection, progress in seen.items():
            sender = self._senders[connection]
            num_bytes = progress.acknowledged_bytes - sender.before.acknowledged_bytes
            total_bytes += num_bytes
            num_full += _is_full(progress, sender.before)
            if sender.pace is not None and sender.began_at + progress.way_seconds <= self._window_began_at:
                is_using_all = num_bytes >= USED * sender.pace * seconds
                sender.want = math.inf if is_using_all else ROOM_TO_GROW * num_bytes / seconds
        self._line.observe(total_bytes / seconds, is_full=2 * num_full > len(self._senders))

    def _share(self) -> None:
        speed = self._line.bytes_per_second
        if speed is None:
            return
        given = shares(speed, {connection: sender.want for connection, sender in self._senders.items()})
        for connection, sender in self._senders.items():
            # A connection that did not use its share may have been held up, and can have it back at once.
            is_alone = len(self._senders) == 1
            sender.pace = None if is_alone else max(given[connection], speed / len(self._senders))
            connection.set_pace(sender.pace)


def _progress(connections: Iterable[P]) -> dict[P, Progress]:
    return {connection: progress for connection in connections if (progress := connection.progress()) is not None}


def _is_full(progress: Progress, before: Progress) -> bool:
    """Whether a way was full, by what became of the packets since `before`."""
    num_sent = progress.sent_packets - before.sent_packets
    num_repeated = progress.repeated_packets - before.repeated_packets
    return num_repeated > FULL_LOSS * num_sent or progress.way_seconds > FULL_DELAY * progress.shortest_way_seconds
