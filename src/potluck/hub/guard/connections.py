"""Which connections are open in the hub, from its events and its lists (pure).

The guard's answer to a connecting peer names the user `PEER.LANE.SESSION`; the hub shows that name in its connect and
disconnect events and in its connection lists, so each of them tells whose connection it is. Events can be missed (a
server of a cluster that is killed sends none), so now and then the lists are compared with what we believe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from potluck.hub.guard.presencecore import ConnectionId
from potluck.hub.subjects import PEER_ID

Lane = Literal["lobby", "main", "bulk", "queue"]
LANES: tuple[Lane, ...] = get_args(Lane)
SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
REMEMBER_CLOSED_SECONDS = 60.0
MAX_UNANSWERED_LISTS = 2  # a server that is missing from so many lists in a row is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """One open connection."""

    id: ConnectionId
    peer: str
    lane: Lane
    session: str = ""  # which process of the peer, where it told
    host: str = ""
    port: int = 0  # that it comes from; 0: only the hub's lists tell, and none was read since it opened
    opened_at: float = 0.0  # the server's wall clock
    seen_at: float = 0.0  # monotonic: when we learnt of it


def user_name(peer: str, lane: Lane, session: str) -> str:
    """The name under which the hub shows a connection."""
    return f"{peer}.{lane}.{session or '-'}"


def read_user_name(name: str) -> tuple[str, Lane, str] | None:
    """Peer, lane and session of a name; None when it is not one of a peer (the guard's own, for one)."""
    peer, _, rest = name.partition(".")
    lane_name, _, session = rest.partition(".")
    lane = known_lane(lane_name)
    if lane is None or not PEER_ID.fullmatch(peer):
        return None
    return peer, lane, session if SESSION.fullmatch(session) and session != "-" else ""


def known_lane(name: str) -> Lane | None:
    """The lane of that name, if there is one."""
    for lane in LANES:
        if lane == name:
            return lane
    return None


class Connections:
    """The table of open connections."""

    def __init__(self) -> None:
        self._open: dict[ConnectionId, Connection] = {}
        self._by_peer: dict[str, dict[ConnectionId, Connection]] = {}
        self._closed: dict[ConnectionId, float] = {}
        self._unanswered: dict[str, int] = {}
        self._num_by_lane: dict[Lane, int] = dict.fromkeys(LANES, 0)

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Connection) -> bool:
        """Take in a connection; False when it is known already, or known to have closed."""
        known = self._open.get(connection.id)
        if known is not None and connection.port and not known.port:
            self._keep(replace(known, port=connection.port))
        if known is not None or connection.id in self._closed:
            return False
        self._keep(connection)
        self._num_by_lane[connection.lane] += 1
        return True

    def get(self, connection_id: ConnectionId) -> Connection | None:
        """The open connection of that id, if there is one."""
        return self._open.get(connection_id)

    def closed(self, connection_id: ConnectionId, now: float) -> Connection | None:
        """Take in that a connection closed; the connection, if it was known."""
        self._closed[connection_id] = now
        return self._drop(connection_id)

    def compare(
        self, listed: Iterable[Connection], servers: Iterable[str], asked_at: float, now: float
    ) -> list[Connection]:
        """Compare with the lists of those servers that answered, and drop what has vanished without an event.

        What is listed and not known is for the caller to hand to `opened`.
        """
        listed_ids = {connection.id for connection in listed}
        gone = self._gone_servers(set(servers))
        vanished = [
            connection
            for connection in self._open.values()
            if connection.seen_at < asked_at
            and connection.id not in listed_ids
            and (connection.id.server in gone or self._unanswered.get(connection.id.server) == 0)
        ]
        for connection in vanished:
            self._drop(connection.id)
        self._closed = {key: at for key, at in self._closed.items() if now - at < REMEMBER_CLOSED_SECONDS}
        return vanished

    def of_peer(self, peer: str, lane: Lane | None = None) -> list[Connection]:
        """The connections of a peer, the oldest first."""
        connections = self._by_peer.get(peer, {}).values()
        return sorted((c for c in connections if lane is None or c.lane == lane), key=lambda c: (c.opened_at, c.id))

    def is_live(self, peer: str) -> bool:
        """Whether a peer has a main connection."""
        return any(connection.lane == "main" for connection in self._by_peer.get(peer, {}).values())

    def count(self, lane: Lane) -> int:
        """How many connections a lane has."""
        return self._num_by_lane[lane]

    def in_lane(self, lane: Lane) -> list[Connection]:
        """The connections of a lane."""
        return [connection for connection in self._open.values() if connection.lane == lane]

    def host_of(self, peer: str) -> str:
        """Where the hub sees a peer come from: its newest main connection, else its newest of any kind."""
        connections = self.of_peer(peer, "main") or self.of_peer(peer)
        return connections[-1].host if connections else ""

    def _keep(self, connection: Connection) -> None:
        self._open[connection.id] = connection
        self._by_peer.setdefault(connection.peer, {})[connection.id] = connection

    def _drop(self, connection_id: ConnectionId) -> Connection | None:
        connection = self._open.pop(connection_id, None)
        if connection is None:
            return None
        self._num_by_lane[connection.lane] -= 1
        of_peer = self._by_peer[connection.peer]
        del of_peer[connection_id]
        if not of_peer:
            del self._by_peer[connection.peer]
        return connection

    def _gone_servers(self, answered: set[str]) -> set[str]:
        """Servers that have connections in our table but do not answer any more."""
        known = {connection_id.server for connection_id in self._open}
        self._unanswered = {
            server: 0 if server in answered else self._unanswered.get(server, 0) + 1 for server in known | answered
        }
        return {server for server, times in self._unanswered.items() if times >= MAX_UNANSWERED_LISTS}
