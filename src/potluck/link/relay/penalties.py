"""Which senders are ignored, because they flood us (pure).

The hub queues what a receiver has not taken, and cuts the receiver off when that is too much. Credit (credit.py) keeps
it little, if senders respect it. The hub cannot see which senders do not, and no report could be believed: the sender
would deny it, and a receiver that grants credit and then denies that would have an honest sender punished. But a
receiver can choose its senders. The hub drops packets without a subscriber, and then nothing is left to queue.

So each receiver keeps an allowance for every sender. What comes without credit is paid from it: greetings, wants, rests
of a path that was given up, and whatever is wrong. It fills slowly, and with each packet that either side had reason to
send. Honest peers stay far above zero. A sender with nothing left is shut out for a minute, then for two, four, … up to
an hour; that concerns the two of them alone, and only the relay.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from potluck.errors import ConfigurationError

MIB = 1024 * 1024
MAX_PEERS = 4096  # allowances that are kept; the one that was used longest ago is forgotten, which does its owner good


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyConfig:
    """How much a peer may send without credit."""

    tolerated_bytes: int = 4 * MIB
    """At once. What waits in an honest sender's own buffers when we begin a path anew must fit."""

    bytes_per_second: int = 16 * 1024
    """So fast the allowance fills."""

    word_bytes: int = 300
    """Earned with each packet: what is said about it without credit, be it that credit is wanted or given."""

    leftovers_seconds: float = 60.0
    """How often credit that a peer may have used when we gave up its path is let pass beside that: once in this."""

    first_seconds: float = 60.0
    """For how long a peer is shut out at first; it doubles each time."""

    longest_seconds: float = 3600.0
    """For how long at most."""

    def __post_init__(self) -> None:
        for name in ("tolerated_bytes", "bytes_per_second", "word_bytes", "leftovers_seconds", "first_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: it must be more than 0")
        if self.longest_seconds < self.first_seconds:
            raise ConfigurationError(f"longest_seconds is {self.longest_seconds}: less than first_seconds")


@dataclass(slots=True)
class _Allowance:
    left_bytes: float
    counted_at: float
    leftovers_at: float = float("-inf")
    num_offences: int = 0


class Penalties:
    """The allowances of all senders, and who is shut out."""

    def __init__(self, config: PenaltyConfig | None = None) -> None:
        self.config = config or PenaltyConfig()
        self._allowances: OrderedDict[str, _Allowance] = OrderedDict()
        self._shut_until: dict[str, float] = {}

    @property
    def shut_out(self) -> frozenset[str]:
        """The ignored senders."""
        return frozenset(self._shut_until)

    def earned(self, peer: str, now: float) -> None:
        """A packet went to the peer, or came from it on credit."""
        allowance = self._allowances.get(peer)
        if allowance is not None:  # an allowance that nobody has used yet is full
            self._fill(allowance, now)
            allowance.left_bytes = max(
                allowance.left_bytes, min(allowance.left_bytes + self.config.word_bytes, self._full_bytes)
            )

    def given_up(self, peer: str, granted_bytes: int, now: float) -> None:
        """We gave up its path, of our own accord: so much may still be on its way, and was granted."""
        allowance = self._allowance(peer, now)
        if granted_bytes > 0 and now - allowance.leftovers_at >= self.config.leftovers_seconds:
            allowance.leftovers_at = now
            allowance.left_bytes += granted_bytes

    def spent(self, peer: str, num_bytes: int, now: float) -> bool:
        """Something came without credit; False: that was too much, and the peer is shut out from now on."""
        allowance = self._allowance(peer, now)
        allowance.left_bytes -= num_bytes
        if allowance.left_bytes >= 0:
            return True
        seconds = min(self.config.first_seconds * 2**allowance.num_offences, self.config.longest_seconds)
        allowance.num_offences = min(allowance.num_offences + 1, 32)
        allowance.left_bytes = self._full_bytes  # it begins anew when it is let in again
        self._shut_until[peer] = now + seconds
        return False

    def is_shut_out(self, peer: str) -> bool:
        """Whether nothing is heard from a peer."""
        return peer in self._shut_until

    def let_in(self, now: float) -> list[str]:
        """Those whose time is over; they are listened to again."""
        over = [peer for peer, until in self._shut_until.items() if now >= until]
        for peer in over:
            del self._shut_until[peer]
        return over

    @property
    def _full_bytes(self) -> float:
        return float(self.config.tolerated_bytes)

    def _allowance(self, peer: str, now: float) -> _Allowance:
        allowance = self._allowances.get(peer)
        if allowance is None:
            allowance = self._allowances[peer] = _Allowance(self._full_bytes, now)
            while len(self._allowances) > MAX_PEERS:
                self._allowances.popitem(last=False)
        self._allowances.move_to_end(peer)
        self._fill(allowance, now)
        return allowance

    def _fill(self, allowance: _Allowance, now: float) -> None:
        """What time brings; never beyond a full allowance, but what was let pass stays."""
        filled = allowance.left_bytes + (now - allowance.counted_at) * self.config.bytes_per_second
        allowance.left_bytes = max(allowance.left_bytes, min(filled, self._full_bytes))
        allowance.counted_at = now
