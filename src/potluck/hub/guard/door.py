"""The door: which connections the hub lets in.

Authentication is the key: the peer must have signed the server's nonce. Authorization is the member record. The door
never looks at invites or tokens: a peer without a record is sent to the lobby, where they are handled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass

from potluck.clock import Clock
from potluck.errors import ProtocolError, RetryableError
from potluck.hub.access.member import Member, Scopes, Service, seats_for
from potluck.hub.guard import callout
from potluck.hub.guard.callout import ConnectRequest
from potluck.hub.guard.connections import SESSION, Connections, Lane
from potluck.hub.guard.permissions import permissions_for
from potluck.hub.guard.registry import Registry
from potluck.hub.keys import Signer
from potluck.hub.queues import FLEET_ACCOUNT
from potluck.hub.subjects import Subjects

logger = logging.getLogger(__name__)

LOOK_UP_SECONDS = 3.0
LOOK_UP_RETRY_SECONDS = 0.2
RESERVED_SECONDS = 5.0  # how long the hub may take to tell of a connection that we let in


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorLimits:
    """How many connections there may be."""

    lobby: int = 500
    """Strangers at once, over all hubs: they must not use up the connections of members. Beyond it some are cut
    (lobbycrowd.py); twice as many may be there until that is done."""

    per_peer: int = 4
    """Of one peer on one lane: one that is in use, and leftovers of a bad network. The oldest are cut."""

    per_stranger: int = 2
    """The same in the lobby."""

    def of_lane(self, lane: Lane) -> int:
        """How many connections one peer may have on a lane."""
        return self.per_stranger if lane == "lobby" else self.per_peer


class Refused(Exception):  # noqa: N818 - it is an answer, not an error
    """Why a connection stays outside."""


class Door:
    """Answers the servers' questions."""

    def __init__(
        self,
        registry: Registry,
        connections: Connections,
        *,
        subjects: Subjects,
        account: str,
        signer: Signer,
        limits: DoorLimits,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._connections = connections
        self._subjects = subjects
        self._account = account
        self._signer = signer
        self._limits = limits
        self._clock = clock
        self._reserved: dict[str, float] = {}  # peers that were let in and are not seen yet, until when
        self.counts: Counter[str] = Counter()

    async def answer(self, token: bytes) -> bytes | None:
        """The answer to a server's question; None when it is no question."""
        try:
            request = callout.read_request(token)
        except ProtocolError as error:
            self.counts["invalid_questions"] += 1
            logger.warning("the auth callout got something that is no question: %s", error)
            return None
        try:
            lane, scopes = await self._decide(request)
        except Refused as refusal:
            self.counts["refused"] += 1
            return callout.refuse(request, str(refusal), signer=self._signer, now=self._clock.wall())
        self.counts[f"admitted_{lane}"] += 1
        permissions = permissions_for(lane, self._subjects, request.peer, scopes, self._registry.queues)
        account = FLEET_ACCOUNT if lane == "queue" else self._account
        return callout.allow(request, lane, permissions, account=account, signer=self._signer, now=self._clock.wall())

    def seen(self, peer: str) -> None:
        """A main connection of this peer is in the table now."""
        self._reserved.pop(peer, None)

    def seats_taken(self, person: str, service: Service, *, besides: str) -> int:
        """How many other peers of this person are live on this service."""
        return len(self._seated(person, service) - {besides})

    def over_limit(self, peer: str) -> bool:
        """Whether a live peer is one too many for its person: of those who came, the last ones have to go."""
        member = self._registry.members.get(peer)
        limit = self._seats(member) if member is not None else None
        if member is None or limit is None:
            return False
        seated = [other for other in self._seated(member.person, member.service) if self._connections.is_live(other)]
        seated.sort(key=lambda other: (self._connections.of_peer(other, "main")[0].opened_at, other))
        return peer in seated[limit:]

    async def _decide(self, request: ConnectRequest) -> tuple[Lane, Scopes]:
        """Which lane, and with which scopes; Refused otherwise. Waits only when a member is not known here yet."""
        if request.type not in callout.CONNECTION_TYPES:
            raise Refused(f"connections of type {request.type[:20]!r} are not let in")
        if not request.is_proven():
            self.counts["unproven"] += 1
            raise Refused("the signature does not prove the key")
        lane = request.lane
        if lane is None or (request.session and not SESSION.fullmatch(request.session)):
            raise Refused("the connection's name must be lobby, main, bulk or queue")
        if lane == "lobby":
            if self._connections.count("lobby") >= 2 * self._limits.lobby:
                raise Refused("more strangers come than can be cut: try again later")
            return lane, Scopes()
        member = await self._look_up(request.peer)
        if member is None:
            raise Refused("not a member: apply at the lobby")
        if self._registry.is_banned(member):
            raise Refused("banned")
        if lane == "main":
            self._reserve_seat(member)
        return lane, member.scopes

    async def _look_up(self, peer: str) -> Member | None:
        """The member of that id; while the store cannot be read, tries again for as long as the server waits for us."""
        deadline = self._clock.monotonic() + LOOK_UP_SECONDS
        while True:
            try:
                return await self._registry.member(peer)
            except RetryableError as error:
                if self._clock.monotonic() > deadline:
                    raise Refused("the hub cannot look at its records just now: try again") from error
            await asyncio.sleep(LOOK_UP_RETRY_SECONDS)

    def _reserve_seat(self, member: Member) -> None:
        limit = self._seats(member)
        if limit is not None and self.seats_taken(member.person, member.service, besides=member.peer) >= limit:
            raise Refused(f"all seats of {member.person} on {member.service} are taken")
        self._reserved[member.peer] = self._clock.monotonic() + RESERVED_SECONDS

    def _seats(self, member: Member) -> int | None:
        return seats_for(member.scopes, self._registry.policy, member.service)

    def _seated(self, person: str, service: Service) -> set[str]:
        """The peers of a person that are live on a service, or will be in a moment."""
        now = self._clock.monotonic()
        self._reserved = {peer: until for peer, until in self._reserved.items() if until > now}
        return {
            member.peer
            for member in self._registry.members_of(person)
            if member.service == service and (member.peer in self._reserved or self._connections.is_live(member.peer))
        }
