"""Who gets in: the keys of the roster, and nobody else.

A dialler's first message names its link key and proves it by a handshake message (greeting.py). Whether that key may
come in is looked up before anything costly is done for it, and nothing is kept for those who may not.

A handshake message that was overheard proves its key as well as the first time, so those that were used are remembered
and refused. A very old one that passes gains only a connection that cannot finish its greeting.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from potluck.clock import Clock
from potluck.errors import ProtocolError
from potluck.link.direct.addresses import parse_ip, reach_of
from potluck.link.direct.greeting import (
    BAD_PROOF,
    NOT_ADMITTED,
    OTHER_MODE,
    OTHER_VERSION,
    TOO_OFTEN,
    Answerer,
    Knock,
    LinkKeys,
    ephemeral_of,
    is_key,
)
from potluck.messages import PROTOCOL_VERSION

# A peer that reconnects more often than this is broken or hostile: a burst, then one a second.
BURST_CONNECTIONS = 20
CONNECTIONS_PER_SECOND = 1.0
MAX_PROBES = 16
MAX_BANNED = 1024  # the oldest ban is forgotten first
MAX_USED = 4096  # handshake messages that are remembered, for so long
USED_SECONDS = 3600.0

# What a dialler is told, for each reason under which we count it.
ANSWERS = {
    "version": OTHER_VERSION,
    "mode": OTHER_MODE,
    "far_address": NOT_ADMITTED,
    "unknown_key": NOT_ADMITTED,
    "banned_key": NOT_ADMITTED,
    "bad_proof": BAD_PROOF,
    "replay": BAD_PROOF,
    "too_often": TOO_OFTEN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPeer:
    """A session of a peer that may connect."""

    peer: str
    session: str
    key: str


@dataclass(slots=True)
class _Pace:
    tokens: float
    refilled_at: float


class Admission:
    """The table of keys that may connect, and the count of those that may not."""

    def __init__(self, clock: Clock, keys: LinkKeys, *, plain: bool = False) -> None:
        """`keys` are this peer's own. `plain`: trusted-LAN mode, where only near addresses may connect."""
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._keys = keys
        self._plain = plain
        self._by_key: dict[str, KnownPeer] = {}
        self._by_peer: dict[str, KnownPeer] = {}
        self._banned: dict[str, KnownPeer] = {}  # by key
        self._probes: dict[str, float] = {}  # key → until when
        self._pace: dict[str, _Pace] = {}
        self._used: dict[bytes, float] = {}  # ephemeral key → until when it is remembered, the oldest first

    def admit(self, member: KnownPeer) -> bool:
        """Let this session of a peer in, and no earlier one. False when it is banned or its key cannot be used."""
        if member.key in self._banned:
            self.withdraw(member.peer)
            return False
        owner = self._by_key.get(member.key)
        if not is_key(member.key) or (owner is not None and owner.peer != member.peer):
            self.counts["unusable_keys"] += 1  # a key that is another peer's would let one speak for the other
            self.withdraw(member.peer)
            return False
        if self._by_peer.get(member.peer) != member:
            self.withdraw(member.peer)
            self._by_key[member.key] = self._by_peer[member.peer] = member
        return True

    def withdraw(self, peer: str) -> None:
        """Let this peer in no more."""
        member = self._by_peer.pop(peer, None)
        if member is not None:
            del self._by_key[member.key]
            self._pace.pop(member.key, None)

    def ban(self, peer: str) -> None:
        """Keep the present session of this peer out; a restarted peer has another key and may come again."""
        member = self._by_peer.get(peer)
        if member is not None:
            while len(self._banned) >= MAX_BANNED:
                del self._banned[next(iter(self._banned))]
            self._banned[member.key] = member
            self.withdraw(peer)

    def invite_probe(self, key: str, *, seconds: float) -> None:
        """Let this key connect for a while, as a probe of reachability that may say nothing else."""
        now = self._clock.monotonic()
        self._probes = {probe: until for probe, until in self._probes.items() if until > now}
        while len(self._probes) >= MAX_PROBES:
            del self._probes[next(iter(self._probes))]
        self._probes[key] = now + seconds

    def member(self, key: str) -> KnownPeer | None:
        """Whose key this is, if it may connect."""
        return self._by_key.get(key)

    def is_probe(self, key: str) -> bool:
        """Whether this key is a probe's that was invited."""
        return self._probes.get(key, 0.0) > self._clock.monotonic()

    def judge(self, knock: Knock, *, host: str) -> Answerer | int:
        """The responder that continues an allowed connection's greeting, or the answer to a refused one."""
        reason = self._refusal(knock, host)
        if reason is None:
            try:
                answerer = Answerer(self._keys, knock.key, knock.handshake, plain=self._plain)
            except ProtocolError:
                reason = "bad_proof"
            else:
                reason = self._refusal_of_proven(knock.key, ephemeral_of(knock.handshake))
                if reason is None:
                    self.counts["admitted"] += 1
                    return answerer
        self.counts[f"refused_{reason}"] += 1
        return ANSWERS[reason]

    def _refusal(self, knock: Knock, host: str) -> str | None:
        if knock.version != PROTOCOL_VERSION:
            return "version"
        if knock.plain != self._plain:
            return "mode"
        if self._plain:
            ip = parse_ip(host)
            if ip is None or reach_of(ip) == "public":
                return "far_address"
        if knock.key in self._by_key or self.is_probe(knock.key):
            return None
        return "banned_key" if knock.key in self._banned else "unknown_key"

    def _refusal_of_proven(self, key: str, ephemeral: bytes) -> str | None:
        now = self._clock.monotonic()
        while self._used and (len(self._used) >= MAX_USED or next(iter(self._used.values())) <= now):
            del self._used[next(iter(self._used))]
        if ephemeral in self._used:
            return "replay"
        self._used[ephemeral] = now + USED_SECONDS
        return None if key not in self._by_key or self._within_pace(key) else "too_often"

    def _within_pace(self, key: str) -> bool:
        now = self._clock.monotonic()
        pace = self._pace.setdefault(key, _Pace(BURST_CONNECTIONS, now))
        pace.tokens = min(BURST_CONNECTIONS, pace.tokens + (now - pace.refilled_at) * CONNECTIONS_PER_SECOND)
        pace.refilled_at = now
        if pace.tokens < 1.0:
            return False
        pace.tokens -= 1.0
        return True
