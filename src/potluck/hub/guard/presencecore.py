"""Who is there, judged from cards, beacons and connections (pure).

A process that dies closes its TCP connection, and the hub says so at once: that is how most deaths are noticed. A
process that freezes, or whose network goes away, keeps its connection; then the silence of its beacons tells: first
*suspect*, later *dead*. A dead peer that is heard again is alive again.

Silence alone is no death while the connection lives. A process may be *busy*: an import, a compiler or a tokenizer can
hold Python's interpreter lock for a minute, and no thread of ours runs meanwhile. Its operating system still
acknowledges what the hub sends, and that is what tells it from a machine that has vanished. A busy peer is suspect:
nothing new is begun with it, and it is back with its next beacon.

Three things make this harder than it sounds:

*Events overtake each other.* Beacons come on one connection of the guard, the hub's events on another. The last
beacon of a killed process may be read after the news of its death; so, for a moment after a peer's last connection
closed, its beacons are taken for echoes unless a new connection is known.

*A restarted process is somebody else.* Each process has a session of its own. The newest session holds the peer's
place; what an older one still sends, or that its connection closes at last, means nothing any more.

*The guard itself may have been away.* After a pause, at its start, and after it lost the hub or was cut off with a part
of it, what it did not hear proves nothing: everybody gets a full timeout again before it judges.

Several guards may keep one roster. Each follows what the others write (`observe`) and takes it for its own opinion,
which its own evidence may then change: nothing here needs them to agree on a leader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from potluck.clock import Clock
from potluck.errors import ConfigurationError
from potluck.hub.presence import Card, Presence, State

KEPT_OLD_SESSIONS = 8
BUSY = "busy: it says nothing, and its connection lives"
TOO_SLOW = "Slow Consumer"  # how the server's reasons begin when it gave up a connection whose reader lagged behind


class ConnectionId(NamedTuple):
    """One TCP connection to one server of the hub; numbers are not used again while that server lives."""

    server: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceConfig:
    """How long silence may last."""

    suspect_after_seconds: float = 3.0
    """Without a beacon for so long, a peer is under suspicion. Beacons come each second."""

    dead_after_seconds: float = 10.0
    """Without a beacon for so long, it is dead, unless its connection lives."""

    busy_seconds: float = 90.0
    """Without a beacon for so long, it is dead, even if its connection lives."""

    forget_after_seconds: float = 600.0
    """The dead and those who left stay in the roster for so long, for newcomers to see."""

    echo_seconds: float = 2.0
    """For so long after a peer's last connection closed, beacons without a new connection are echoes."""

    pause_seconds: float = 2.0
    """Two ticks further apart than this mean that the guard itself was not running."""

    def __post_init__(self) -> None:
        if not 0 < self.suspect_after_seconds < self.dead_after_seconds <= self.busy_seconds:
            raise ConfigurationError(
                f"a peer cannot be suspect after {self.suspect_after_seconds:g} s, dead after "
                f"{self.dead_after_seconds:g} s and busy for {self.busy_seconds:g} s: name growing times above 0"
            )
        if min(self.forget_after_seconds, self.echo_seconds, self.pause_seconds) <= 0:
            raise ConfigurationError("forget_after_seconds, echo_seconds and pause_seconds must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the member record contributes to a peer's presence."""

    person: str
    coordinates: bool = False
    trusted: bool = False
    pardoned_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterChange:
    """One entry of the roster to write; to remove when `presence` is None."""

    peer: str
    presence: Presence | None


@dataclass(slots=True)
class _Peer:
    presence: Presence
    heard_at: float  # monotonic: the last sign of life
    changed_at: float  # monotonic: when the state last changed
    gone_at: float | None = None  # monotonic: when the last connection was seen to close, none having come since
    old_sessions: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_OLD_SESSIONS))


class PresenceCore:
    """The roster's state machine: what happened goes in, entries to write come out."""

    def __init__(self, config: PresenceConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        self._connections: dict[str, dict[ConnectionId, str]] = {}  # main lane: peer -> connection -> session or ""
        self._ticked_at = self._judge_from = clock.monotonic()
        self.num_stray_beacons = 0  # of unknown peers or old sessions, and echoes

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, peer: str) -> Presence | None:
        """What the roster says of a peer."""
        known = self._peers.get(peer)
        return known.presence if known is not None else None

    def all(self) -> list[Presence]:
        """What the roster says of everybody."""
        return [known.presence for known in self._peers.values()]

    def user_of_link_key(self, link_key: str) -> str:
        """Who of those present has this link key; empty when nobody has."""
        present = (known.presence for known in self._peers.values() if known.presence.state in ("alive", "suspect"))
        return next((presence.peer for presence in present if presence.card.link_key == link_key), "")

    def is_old_session(self, peer: str, session: str) -> bool:
        """Whether this session is known to have been replaced by a newer one."""
        known = self._peers.get(peer)
        return known is not None and session in known.old_sessions

    # What the roster's store says

    def observe(self, presence: Presence) -> None:
        """Take in an entry that stands in the store: our own from an earlier life, or another guard's."""
        now = self._clock.monotonic()
        known = self._peers.get(presence.peer)
        age_seconds = max(0.0, self._clock.wall() - presence.since)
        if known is None:
            self._peers[presence.peer] = _Peer(presence, heard_at=now, changed_at=now - age_seconds)
            return
        if known.presence == presence:
            return
        if known.presence.card.session != presence.card.session:
            self._replace_session(known, presence.card.session)
        if presence.state == "alive":
            known.heard_at, known.gone_at = now, None
        known.presence, known.changed_at = presence, now - age_seconds

    def observe_removal(self, peer: str) -> None:
        """Take in that an entry was removed from the store."""
        known = self._peers.get(peer)
        if known is not None and known.presence.state in ("dead", "left"):
            del self._peers[peer]

    # What peers say

    def card(self, peer: str, card: Card, *, host: str, standing: Standing) -> list[RosterChange] | None:
        """A peer says who it is. None: a newer process of this peer has taken its place, and it should stop."""
        now = self._clock.monotonic()
        known = self._peers.get(peer)
        if known is not None and card.session in known.old_sessions:
            return None
        state: State = "alive"
        if known is not None and known.presence.card.session != card.session:
            self._replace_session(known, card.session)
        elif known is not None and self._is_echo(peer, known, now):
            state = known.presence.state
        since = self._clock.wall()
        if known is not None and known.presence.state == state and known.presence.card.session == card.session:
            since = known.presence.since
        presence = Presence(
            peer=peer,
            card=card,
            state=state,
            host=host,
            person=standing.person,
            coordinates=standing.coordinates,
            trusted=standing.trusted,
            pardoned_at=standing.pardoned_at,
            since=since,
            reason=known.presence.reason if known is not None and state != "alive" else "",
        )
        if known is None:
            known = self._peers[peer] = _Peer(presence, heard_at=now, changed_at=now)
        elif known.presence == presence:
            known.heard_at = now
            return []
        else:
            known.presence, known.heard_at, known.changed_at = presence, now, now
        if state == "alive":
            known.gone_at = None
        return [RosterChange(peer=peer, presence=presence)]

    def beacon(self, peer: str, session: str) -> list[RosterChange]:
        """A sign of life. This is the busy one: a thousand a second and more."""
        known = self._peers.get(peer)
        if known is None or known.presence.card.session != session:
            self.num_stray_beacons += 1
            return []
        now = self._clock.monotonic()
        state = known.presence.state
        if state == "alive":
            known.heard_at = now
            return []
        if state == "left" or self._is_echo(peer, known, now):
            self.num_stray_beacons += 1
            return []
        return self._revive(known, now)

    def leave(self, peer: str, session: str) -> list[RosterChange]:
        """A peer says good-bye."""
        known = self._peers.get(peer)
        if known is None or known.presence.card.session != session or known.presence.state == "left":
            return []
        return self._change(known, "left", "it said good-bye")

    def standing(self, peer: str, standing: Standing) -> list[RosterChange]:
        """A peer's member record has changed."""
        known = self._peers.get(peer)
        if known is None:
            return []
        presence = msgspec.structs.replace(
            known.presence,
            person=standing.person,
            coordinates=standing.coordinates,
            trusted=standing.trusted,
            pardoned_at=standing.pardoned_at,
        )
        if presence == known.presence:
            return []
        known.presence = presence
        return [RosterChange(peer=peer, presence=presence)]

    # What the hub says of main connections

    def connected(
        self, peer: str, connection: ConnectionId, *, session: str = "", host: str = ""
    ) -> list[RosterChange]:
        """A main connection has opened; `session` is which process it belongs to, where that is known."""
        connections = self._connections.setdefault(peer, {})
        if session:  # a process has one: an older one of the same process is a half-open leftover
            for other in [other for other, theirs in connections.items() if theirs == session]:
                del connections[other]
        connections[connection] = session
        known = self._peers.get(peer)
        if known is None or (session and session != known.presence.card.session):
            return []
        known.gone_at = None
        moved = bool(host) and known.presence.host != host
        if moved:
            known.presence = msgspec.structs.replace(known.presence, host=host)
        if session and known.presence.state == "dead":
            return self._revive(known, self._clock.monotonic())
        return [RosterChange(peer=peer, presence=known.presence)] if moved else []

    def disconnected(self, peer: str, connection: ConnectionId, reason: str = "") -> list[RosterChange]:
        """A main connection has closed: if it was the last one of the peer's process, the peer is dead.

        Unless it was the hub that cut it off for being slow to read, as happens to many at once when somebody floods
        the run: such a peer is under suspicion, and comes back or falls silent.
        """
        session = self._drop_connection(peer, connection)
        known = self._peers.get(peer)
        if session is None or known is None:
            return []
        if (session and session != known.presence.card.session) or self._has_connection(known):
            return []
        known.gone_at = self._clock.monotonic()
        if known.presence.state not in ("alive", "suspect"):
            return []
        if not reason.startswith(TOO_SLOW):
            why = f"its connection closed ({reason})" if reason else "its connection closed"
            return self._change(known, "dead", why)
        if known.presence.state == "suspect":
            return []
        return self._change(known, "suspect", f"the hub cut it off ({reason})")

    def lost_track(self, peer: str, connection: ConnectionId) -> None:
        """A connection is no longer listed, and nobody saw it close. Beacons will tell what that means."""
        self._drop_connection(peer, connection)

    # Time

    def tick(self, is_answering: Callable[[ConnectionId], bool] = lambda _connection: True) -> list[RosterChange]:
        """Judge by the time that has passed; to be called several times a second while the guard can judge.

        `is_answering` tells of an open connection whether the other end still acknowledges what it is sent; it is asked
        about those who are silent alone.
        """
        now = self._clock.monotonic()
        if now - self._ticked_at > self._config.pause_seconds:
            self._judge_from = now
        self._ticked_at = now
        changes: list[RosterChange] = []
        for peer, known in list(self._peers.items()):
            if known.presence.state in ("alive", "suspect"):
                changes += self._judge(known, now, is_answering)
            elif now - known.changed_at > self._config.forget_after_seconds:
                del self._peers[peer]
                changes.append(RosterChange(peer=peer, presence=None))
        return changes

    def was_deaf(self) -> None:
        """The guard could not hear the hub for a while: nobody's silence until now counts."""
        self._judge_from = self._clock.monotonic()

    def _judge(self, known: _Peer, now: float, is_answering: Callable[[ConnectionId], bool]) -> Iterable[RosterChange]:
        silent_seconds = now - max(known.heard_at, self._judge_from)
        is_suspect = known.presence.state == "suspect"
        if silent_seconds >= self._config.dead_after_seconds:
            is_busy = any(map(is_answering, self._connections_of(known)))
            if not is_busy or silent_seconds >= self._config.busy_seconds:
                return self._change(known, "dead", f"not heard for {silent_seconds:.1f} s")
            if not is_suspect or known.presence.reason != BUSY:
                return self._change(known, "suspect", BUSY)
        elif silent_seconds >= self._config.suspect_after_seconds and not is_suspect:
            return self._change(known, "suspect", f"not heard for {silent_seconds:.1f} s")
        return ()

    def _revive(self, known: _Peer, now: float) -> list[RosterChange]:
        known.heard_at, known.gone_at = now, None
        return self._change(known, "alive", "")

    def _change(self, known: _Peer, state: State, reason: str) -> list[RosterChange]:
        known.changed_at = self._clock.monotonic()
        known.presence = msgspec.structs.replace(known.presence, state=state, reason=reason, since=self._clock.wall())
        return [RosterChange(peer=known.presence.peer, presence=known.presence)]

    def _is_echo(self, peer: str, known: _Peer, now: float) -> bool:
        if known.gone_at is None or self._has_connection(known):
            return False
        return now - known.gone_at < self._config.echo_seconds

    def _has_connection(self, known: _Peer) -> bool:
        return any(True for _ in self._connections_of(known))

    def _connections_of(self, known: _Peer) -> Iterator[ConnectionId]:
        """The open connections of the process that holds the peer's place."""
        of_process = ("", known.presence.card.session)
        connections = self._connections.get(known.presence.peer, {})
        return (connection for connection, session in connections.items() if session in of_process)

    def _drop_connection(self, peer: str, connection: ConnectionId) -> str | None:
        """The session of a connection that is dropped; None when it is not a known one."""
        connections = self._connections.get(peer, {})
        session = connections.pop(connection, None)
        if session is not None and not connections:
            del self._connections[peer]
        return session

    @staticmethod
    def _replace_session(known: _Peer, session: str) -> None:
        """A newer process has the peer's place; remember the old one, so that it cannot take it back."""
        if session in known.old_sessions:
            known.old_sessions.remove(session)
        known.old_sessions.append(known.presence.card.session)
        known.gone_at = None
