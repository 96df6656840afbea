"""Who publishes far more than any honest member, judged by the hub's counters (pure).

A member's main connection carries what everybody hears: beacons, and news to all others. The hub passes each message on
to all of them, so a peer that publishes without measure takes their processor time and fills what waits for the slow
ones, until the hub cuts those off. The hub limits the size of a message and nothing else; but it counts what each
connection has published, and shows it in its lists and when a connection closes.

So there is a rate that a member may publish at for ever, in messages and in bytes, and an amount by which it may be
beyond that for a while. Honest members come nowhere near either. A member that goes further is kept out for a minute,
then for two, four, … up to an hour. A new connection changes nothing, since it is the peer that counts; nor does one
that lasts less than the time between two lists. Relay connections do not count: what they carry concerns two peers, and
the receiver helps itself (link/relay/penalties.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from potluck.clock import Clock
from potluck.errors import ConfigurationError
from potluck.hub.guard.presencecore import ConnectionId

MIB = 1024 * 1024
MAX_OFFENDERS = 4096  # whose sentences are remembered; of more, those of longest ago are forgotten
UNSEEN_SECONDS = 60.0  # what was published by connections and peers that no list names is remembered for so long


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodLimits:
    """How much a member may publish on its main connections, and what follows if it is more."""

    messages_per_second: float = 1000.0
    """In the long run. A trainer near the end of an epoch sends 50 beacons a second; a coordinator of the smallest
    rounds says a few hundred things."""

    burst_messages: int = 30_000
    """Beside that, at once."""

    bytes_per_second: float = float(MIB)
    """In the long run. Everybody's line has to carry it."""

    burst_bytes: int = 32 * MIB
    """Beside that, at once. Less than may wait for a slow member: nobody is cut off by what is tolerated."""

    first_seconds: int = 60
    """For how long a peer is kept out at first; it doubles each time."""

    longest_seconds: int = 3600
    """For how long at most."""

    def __post_init__(self) -> None:
        for name in ("messages_per_second", "burst_messages", "bytes_per_second", "burst_bytes", "first_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: it must be more than 0")
        if self.longest_seconds < self.first_seconds:
            raise ConfigurationError(f"longest_seconds is {self.longest_seconds}: less than first_seconds")


# A queue's items go to one taker, and streams have bounds of their own: what is left to guard is the server's time.
QUEUE_LIMITS = FloodLimits(
    messages_per_second=10_000.0, burst_messages=300_000, bytes_per_second=128.0 * MIB, burst_bytes=4096 * MIB
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one connection has published since it was opened, by the hub's count."""

    id: ConnectionId
    lane: str = "main"
    peer: str
    num_messages: int
    num_bytes: int
    open_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood:
    """A verdict: this peer is to be cut off."""

    peer: str
    reason: str


@dataclass(slots=True)
class _Overrun:
    """By how much a peer is beyond what it may publish in the long run."""

    listed_at: float  # what it may publish since then is not taken off yet
    num_messages: float = 0.0
    num_bytes: float = 0.0


class FloodCore:
    """What everybody has published."""

    def __init__(self, limits: FloodLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._counted: dict[ConnectionId, Traffic] = {}
        self._seen_at: dict[ConnectionId, float] = {}
        self._overruns: dict[str, _Overrun] = {}
        self._num_sentences: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counted)

    def listed(self, connections: Iterable[Traffic]) -> list[Flood]:
        """Take in a list of connections, of all servers or some; who is found to flood."""
        now = self._clock.monotonic()
        by_peer: dict[str, list[Traffic]] = {}
        for connection in connections:
            by_peer.setdefault(connection.peer, []).append(connection)
        floods = [self._count(peer, of_peer, now, is_all=True) for peer, of_peer in by_peer.items()]
        self._forget(now)
        return [flood for flood in floods if flood is not None]

    def closed(self, connection: Traffic) -> Flood | None:
        """Take in the last count of a connection that has closed: also one that no list has shown."""
        flood = self._count(connection.peer, [connection], self._clock.monotonic(), is_all=False)
        del self._counted[connection.id], self._seen_at[connection.id]
        return flood

    def sentence(self, peer: str) -> int:
        """For how many seconds to keep a peer out that floods: longer each time."""
        return min(self._limits.first_seconds << self._num_sentences.get(peer, 0), self._limits.longest_seconds)

    def sentenced(self, peer: str) -> None:
        """It is kept out now."""
        self._num_sentences[peer] = min(self._num_sentences.get(peer, 0) + 1, 32)
        self._num_sentences.move_to_end(peer)
        while len(self._num_sentences) > MAX_OFFENDERS:
            self._num_sentences.popitem(last=False)

    def _count(self, peer: str, connections: list[Traffic], now: float, *, is_all: bool) -> Flood | None:
        """Add what a peer has published since it was counted last, less what it may in that time.

        Unless these are all its connections, the time still counts for what the others have published meanwhile.
        """
        num_messages = num_bytes = 0
        for connection in connections:
            before = self._counted.get(connection.id) or self._could_rightly(connection)
            num_messages += max(0, connection.num_messages - before.num_messages)
            num_bytes += max(0, connection.num_bytes - before.num_bytes)
            self._counted[connection.id] = connection
            self._seen_at[connection.id] = now
        limits = self._limits
        overrun = self._overruns.setdefault(peer, _Overrun(now))
        overrun.num_messages += num_messages
        overrun.num_bytes += num_bytes
        seconds = now - overrun.listed_at
        messages_beyond = max(0.0, overrun.num_messages - seconds * limits.messages_per_second)
        bytes_beyond = max(0.0, overrun.num_bytes - seconds * limits.bytes_per_second)
        if is_all:
            self._overruns[peer] = _Overrun(now, messages_beyond, bytes_beyond)
        if messages_beyond <= limits.burst_messages and bytes_beyond <= limits.burst_bytes:
            return None
        del self._overruns[peer]  # it begins anew when it comes back
        reason = (
            f"it flooded the run: {messages_beyond:.0f} messages and {bytes_beyond / 1e6:.0f} MB more "
            f"than {limits.messages_per_second:.0f} messages and {limits.bytes_per_second / 1e6:.1f} MB a second"
        )
        return Flood(peer=peer, reason=reason)

    def _could_rightly(self, connection: Traffic) -> Traffic:
        """Where to count a connection from that we see for the first time, though it may have been there for long."""
        seconds, limits = max(0.0, connection.open_seconds), self._limits
        return replace(
            connection,
            num_messages=min(connection.num_messages, int(seconds * limits.messages_per_second)),
            num_bytes=min(connection.num_bytes, int(seconds * limits.bytes_per_second)),
        )

    def _forget(self, now: float) -> None:
        """Forget connections and peers that no list has named for a while."""
        for connection in [each for each, at in self._seen_at.items() if now - at > UNSEEN_SECONDS]:
            del self._counted[connection], self._seen_at[connection]
        for peer in [each for each, overrun in self._overruns.items() if now - overrun.listed_at > UNSEEN_SECONDS]:
            del self._overruns[peer]
