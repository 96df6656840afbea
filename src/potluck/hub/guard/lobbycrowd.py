"""Which strangers have to leave the lobby, so that they do not keep out newcomers (pure).

Knocking takes moments: connect, hand in an application, hear the answer. Only those on the waiting list have a reason
to stay. All others that are still there after some seconds are cut. Where more come than the lobby holds, or more from
one address than its share, connections are cut at once: of the busiest address, the oldest that has no reason to stay.
Many honest people behind one router lose nothing by that: each of them needs a connection for a moment.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from potluck.hub.access.member import AccessRequest
from potluck.hub.guard.connections import Connection
from potluck.hub.guard.presencecore import ConnectionId

IDLE_SECONDS = 10.0  # two round trips and the check of a token fit in
ADDRESS_SHARE = 0.25  # of the lobby, and of the waiting list
FEWEST_OF_ADDRESS = 8  # whatever the share


def address_of(host: str) -> str:
    """Whose connections count together: of an IPv4 address; in IPv6 of 64 bits, since one customer gets that many."""
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return host
    if parsed.version == 4:
        return host
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


def share_of_address(places: int) -> int:
    """How many of so many places one address may take while others might want them."""
    return max(FEWEST_OF_ADDRESS, int(places * ADDRESS_SHARE))


def num_from_address(waiting: Iterable[AccessRequest], host: str) -> int:
    """How many on the waiting list came from the address of `host`."""
    return sum(address_of(request.host) == address_of(host) for request in waiting)


def first_to_go(waiting: Sequence[AccessRequest], host: str) -> str:
    """Who on a full waiting list makes room for somebody from `host`: the newest of the busiest address, if any.

    Nobody does for an address that would then be as busy itself.
    """
    per_address = Counter(address_of(request.host) for request in waiting)
    busiest = max(per_address, key=lambda address: per_address[address], default="")
    if per_address[busiest] < per_address[address_of(host)] + 2:
        return ""
    return max(
        (request for request in waiting if address_of(request.host) == busiest),
        key=lambda request: (request.asked_at, request.peer),
    ).peer


class LobbyCrowd:
    """The strangers' connections, and since when each has had no reason to stay."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._idle_since: dict[ConnectionId, float] = {}
        self._cut: set[ConnectionId] = set()

    def to_cut(
        self, connections: Iterable[Connection], may_stay: Callable[[str], bool], now: float
    ) -> list[tuple[Connection, str]]:
        """Which of all lobby connections to cut now, and why. `may_stay` is asked with the id of a peer."""
        listed = {connection.id: connection for connection in connections}
        self._cut &= listed.keys()
        present = [connection for connection in listed.values() if connection.id not in self._cut]
        idle = [connection for connection in present if not may_stay(connection.peer)]
        since = self._idle_since
        self._idle_since = dict.fromkeys((connection.id for connection in present), now)
        self._idle_since |= {connection.id: since.get(connection.id, connection.seen_at) for connection in idle}
        overdue = {connection.id for connection in idle if now - self._idle_since[connection.id] > IDLE_SECONDS}
        reason = f"it has been in the lobby for {IDLE_SECONDS:.0f} s and does not wait for anything"
        chosen = [(listed[connection_id], reason) for connection_id in overdue]
        chosen += self._too_many(
            [connection for connection in present if connection.id not in overdue],
            [connection for connection in idle if connection.id not in overdue],
        )
        self._cut |= {connection.id for connection, _ in chosen}
        return chosen

    def _too_many(self, present: list[Connection], idle: list[Connection]) -> list[tuple[Connection, str]]:
        per_address = Counter(address_of(connection.host) for connection in present)
        share, excess = share_of_address(self._places), len(present) - self._places
        if excess <= 0 and max(per_address.values(), default=0) <= share:
            return []
        chosen: list[tuple[Connection, str]] = []
        oldest_first: dict[str, list[Connection]] = {}
        for connection in sorted(idle, key=lambda each: (each.opened_at, each.id), reverse=True):
            oldest_first.setdefault(address_of(connection.host), []).append(connection)  # the oldest at the end
        while oldest_first:
            busiest = max(oldest_first, key=lambda address: per_address[address])
            if excess <= 0 and per_address[busiest] <= share:
                break
            reason = f"the lobby is full, and {busiest} has {per_address[busiest]} connections there"
            chosen.append((oldest_first[busiest].pop(), reason))
            excess -= 1
            per_address[busiest] -= 1
            if not oldest_first[busiest]:
                del oldest_first[busiest]
        return chosen
