"""Keeps the roster true: feeds the presence core with what peers and the hub say, and has its verdicts written.

It also cuts connections that should not be: of the banned, of those who are one too many for their person, leftovers
of a peer whose network fails again and again, and of members whose rights have changed (they come back with the new
ones).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from potluck.clock import Clock
from potluck.errors import ProtocolError, RetryableError
from potluck.hub.access.member import MAX_NAME_CHARACTERS, Ban, Member
from potluck.hub.guard import lobby
from potluck.hub.guard.acknowledgements import Endpoint, unacknowledged
from potluck.hub.guard.connections import SESSION, Connection, Connections, Lane
from potluck.hub.guard.door import Door, DoorLimits
from potluck.hub.guard.hubsystem import HubSystem
from potluck.hub.guard.presencecore import ConnectionId, PresenceCore, Standing
from potluck.hub.guard.registry import Registry, Spawn
from potluck.hub.guard.rosterwriter import RosterWriter
from potluck.hub.presence import Beacon, Card, CardAnswer, is_link_proven
from potluck.hub.subjects import PEER_ID, RUN_NAME
from potluck.messages import PROTOCOL_VERSION, decode
from potluck.plaintext import check_plain

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
COMPARE_SECONDS = 15.0  # how often the table of connections is compared with the hub's lists
FORGET_TEMPORARY_SECONDS = 24 * 3600.0  # a monitor on a machine that sleeps finds its way back the next morning
MAX_CARD_BYTES = 8192
MAX_GROUPS = 64  # that one peer is in
MAX_BEACON_BYTES = 1024
MAX_ADDRESSES = 16
MAX_ADDRESS_CHARACTERS = 128
MEMBER_LANES: tuple[Lane, ...] = ("main", "bulk", "queue")


class PresenceKeeper:
    """The guard's part that concerns those who are in."""

    def __init__(
        self,
        core: PresenceCore,
        writer: RosterWriter,
        registry: Registry,
        connections: Connections,
        system: HubSystem,
        door: Door,
        *,
        run: str,
        limits: DoorLimits,
        clock: Clock,
        spawn: Spawn,
    ) -> None:
        self._run = run
        self._core = core
        self._writer = writer
        self._registry = registry
        self._connections = connections
        self._system = system
        self._door = door
        self._limits = limits
        self._clock = clock
        self._spawn = spawn
        self._rights: dict[str, tuple[bool, bool]] = {}  # as of each member's record: coordinates, organiser
        self._absent_since: dict[str, float] = {}  # temporary members, on this guard's clock
        self.counts: Counter[str] = Counter()
        registry.members.listen(self._member_changed)
        registry.bans.listen(self._ban_changed)

    # What peers say

    async def card(self, peer: str, payload: bytes) -> CardAnswer:
        """A member says who it is; answered once the roster says so too."""
        try:
            card = decode(Card, payload, limit_bytes=MAX_CARD_BYTES)
            check_card(card)
            check_plain(card)
        except ProtocolError as error:
            self.counts["invalid_cards"] += 1
            return CardAnswer(accepted=False, message=str(error))
        if card.protocol != PROTOCOL_VERSION:
            return CardAnswer(accepted=False, message=lobby.other_version(card.protocol, card.version))
        member = await self._registry.member(peer)
        if member is None:
            return CardAnswer(accepted=False, message="not a member of this run")
        if bans := self._registry.bans_of(member.peer, member.person):
            refusal = lobby.banned(bans, self._clock.wall())
            return CardAnswer(accepted=False, banned=refusal.code == "banned", message=refusal.message)
        if card.role not in member.scopes.roles:
            return CardAnswer(accepted=False, message=f"you may take part only as {', '.join(member.scopes.roles)}")
        if refusal_of_key := self._check_link_key(peer, card):
            self.counts["refused_link_keys"] += 1
            return CardAnswer(accepted=False, message=refusal_of_key)
        policy = self._registry.policy
        refusals = {group: policy.refusal_of_group(group, member.scopes) for group in card.groups}
        refused_groups = {group: reason for group, reason in refusals.items() if reason}
        if refused_groups:
            self.counts["refused_groups"] += 1
            allowed = tuple(group for group in card.groups if group not in refused_groups)
            card = msgspec.structs.replace(card, groups=allowed)
        host = self._connections.host_of(peer) or self._known_host(peer)
        changes = self._core.card(peer, card, host=host, standing=standing_of(member))
        if changes is None:
            self.counts["replaced_sessions"] += 1
            return CardAnswer(accepted=False, message="a newer process has taken this peer's place")
        self.counts["cards"] += 1
        self._writer.want(changes)
        await self._writer.written(peer)
        return CardAnswer(
            accepted=True, refused_groups=tuple(refused_groups), message="; ".join(refused_groups.values())
        )

    def beacon(self, peer: str, payload: bytes) -> None:
        """A sign of life."""
        try:
            beacon = decode(Beacon, payload, limit_bytes=MAX_BEACON_BYTES)
        except ProtocolError:
            self.counts["invalid_beacons"] += 1
            return
        self.counts["beacons"] += 1
        if changes := self._core.beacon(peer, beacon.session):
            self._writer.want(changes)

    async def leave(self, peer: str, payload: bytes) -> bool:
        """A member says good-bye, by a last beacon; whether it was understood."""
        try:
            beacon = decode(Beacon, payload, limit_bytes=MAX_BEACON_BYTES)
        except ProtocolError:
            self.counts["invalid_good_byes"] += 1
            return False
        self._writer.want(self._core.leave(peer, beacon.session))
        await self._writer.written(peer)
        return True

    # What the hub says

    def opened(self, connection: Connection) -> None:
        """A connection has opened."""
        if not self._connections.opened(connection):
            return
        peer = connection.peer
        leftovers = self._connections.of_peer(peer, connection.lane)[: -self._limits.of_lane(connection.lane)]
        self.cut(leftovers, "too many connections of one peer")
        if connection.lane == "lobby":
            return
        member = self._registry.members.get(peer)
        if member is not None and self._registry.is_banned(member):
            self.cut([connection], "banned meanwhile")
        if connection.lane == "main":
            self._door.seen(peer)
            changes = self._core.connected(peer, connection.id, session=connection.session, host=connection.host)
            self._writer.want(changes)
            if self._door.over_limit(peer):
                self.cut(self._connections.of_peer(peer, "main"), "no seat left")

    def closed(self, connection_id: ConnectionId, reason: str) -> None:
        """A connection has closed."""
        connection = self._connections.closed(connection_id, self._clock.monotonic())
        if connection is None or connection.lane != "main":
            return
        self._writer.want(self._core.disconnected(connection.peer, connection_id, reason))
        presence = self._core.get(connection.peer)
        if presence is not None and presence.state == "left" and not self._connections.is_live(connection.peer):
            self._forget_if_temporary(connection.peer)

    async def compare_connections(self) -> None:
        """Compare the table of connections with the hub's own lists."""
        asked_at = self._clock.monotonic()
        listed, servers = await self._system.list_connections()
        for connection in listed:
            self.opened(connection)
        for vanished in self._connections.compare(listed, servers, asked_at, self._clock.monotonic()):
            self.counts["vanished_connections"] += 1
            if vanished.lane == "main":
                self._core.lost_track(vanished.peer, vanished.id)
        self._forget_absent()

    def _forget_absent(self) -> None:
        """Forget those who only looked and ended without a good-bye, once they cannot be expected back."""
        now = self._clock.monotonic()
        absent = [m.peer for m in self._registry.members if m.temporary and not self._connections.is_live(m.peer)]
        self._absent_since = {peer: self._absent_since.get(peer, now) for peer in absent}
        for peer, since in self._absent_since.items():
            if now - since > FORGET_TEMPORARY_SECONDS:
                self._forget_if_temporary(peer)

    def _forget_if_temporary(self, peer: str) -> None:
        """Remove the record of somebody whose key is gone: it would stand in the list of members for nobody."""
        member = self._registry.members.get(peer)
        if member is not None and member.temporary:
            self.counts["forgotten_members"] += 1
            self._spawn(self._registry.members.remove(peer))

    def connections_of(self, target: str) -> list[Connection]:
        """What a peer or person has open as a member, as far as we know."""
        peers = self._peers_of_target(target)
        return [c for peer in peers for lane in MEMBER_LANES for c in self._connections.of_peer(peer, lane)]

    async def cut_banned(self, target: str, known: Iterable[Connection]) -> int:
        """Cut whatever a banned peer or person has open, also what we have not heard of yet; how many there were.

        `known` is what it had before the ban was told: another guard, or our own watch, may have cut it by now.
        """
        found = {connection.id: connection for connection in [*known, *self.connections_of(target)]}
        try:
            listed, _ = await self._system.list_connections()
        except RetryableError as error:
            logger.warning("the hub did not list its connections, known ones are cut: %s", error)
        else:
            peers = self._peers_of_target(target)
            found |= {c.id: c for c in listed if c.peer in peers and c.lane in MEMBER_LANES}
        done = await asyncio.gather(*(self._system.kick(connection_id) for connection_id in found))
        self.counts["cut_connections"] += sum(done)
        return sum(done)

    def cut(self, connections: Iterable[Connection], reason: str) -> None:
        """Cut connections soon."""
        for connection in connections:
            self.counts["cut_connections"] += 1
            logger.info("cutting a %s connection of %s: %s", connection.lane, connection.peer, reason)
            self._spawn(self._kick(connection.id))

    # Time

    async def tick_forever(self, hears_hub: Callable[[], bool]) -> None:
        """Judge by silence, several times a second, while the hub can be heard and the roster be written.

        Whose server is cut off from the rest of a cluster hears nobody there and can write nothing. A verdict of that
        time would be written when the cut is healed, on peers that were there all along.
        """
        while True:
            if hears_hub() and not self._writer.is_failing:
                self._writer.want(self._core.tick(self._is_answering_now()))
            await asyncio.sleep(TICK_SECONDS)

    async def compare_forever(self, wanted: asyncio.Event) -> None:
        """Compare connections now and then, and whenever it is wanted."""
        while True:
            try:
                async with asyncio.timeout(COMPARE_SECONDS):
                    await wanted.wait()
            except TimeoutError:
                pass
            wanted.clear()
            try:
                await self.compare_connections()
            except (RetryableError, ProtocolError) as error:
                logger.warning("the hub did not list its connections; trying again soon: %s", error)

    # Changes of records

    def _member_changed(self, peer: str, member: Member | None) -> None:
        if member is None:
            self._rights.pop(peer, None)
            self.cut(self.connections_of(peer), "no longer a member")
            return
        self._writer.want(self._core.standing(peer, standing_of(member)))
        rights = (member.scopes.coordinates, member.scopes.organiser)
        before = self._rights.get(peer)
        self._rights[peer] = rights
        if before is not None and before != rights:
            self.cut(self._connections.of_peer(peer, "main"), "its rights have changed")

    def _ban_changed(self, _key: str, ban: Ban | None) -> None:
        if ban is not None:
            self.cut(self.connections_of(ban.target), f"{ban.target} is banned")

    def _peers_of_target(self, target: str) -> set[str]:
        if PEER_ID.fullmatch(target):
            return {target}
        return {member.peer for member in self._registry.members_of(target)}

    def _check_link_key(self, peer: str, card: Card) -> str:
        """Why a card's link key is refused; empty when it is not."""
        if not is_link_proven(card, self._run, peer):
            return "the card's link key is not signed by this peer"
        if card.link_key and (other := self._core.user_of_link_key(card.link_key)) not in ("", peer):
            logger.warning("%s hands in the link key of %s as its own: refused", peer, other)
            return f"the link key is that of {other}: each process makes its own"
        return ""

    def _is_answering_now(self) -> Callable[[ConnectionId], bool]:
        """Tells whether the other end of a connection acknowledges what it is sent, as far as can be known here."""
        lost: set[Endpoint] | None = None

        def is_answering(connection_id: ConnectionId) -> bool:
            nonlocal lost
            connection = self._connections.get(connection_id)
            if lost is None:
                lost = unacknowledged()
            return connection is None or (connection.host, connection.port) not in lost

        return is_answering

    def _known_host(self, peer: str) -> str:
        presence = self._core.get(peer)
        return presence.host if presence is not None else ""

    async def _kick(self, connection_id: ConnectionId) -> None:
        await self._system.kick(connection_id)


def standing_of(member: Member) -> Standing:
    """What a member's record contributes to its presence."""
    return Standing(
        person=member.person,
        coordinates=member.scopes.coordinates,
        trusted=member.scopes.trusted,
        pardoned_at=member.pardoned_at,
    )


def check_card(card: Card) -> None:
    """ProtocolError when a card, though of the right types, holds what no peer of ours would write."""
    if not SESSION.fullmatch(card.session):
        raise ProtocolError("a card's session must have 1 to 64 letters, digits, - and _")
    for text in (card.name, card.service, card.version, card.link_key, card.link_proof):
        if len(text) > MAX_NAME_CHARACTERS:
            raise ProtocolError(f"a card's texts have at most {MAX_NAME_CHARACTERS} characters")
    if len(card.addresses) > MAX_ADDRESSES or any(len(a) > MAX_ADDRESS_CHARACTERS for a in card.addresses):
        raise ProtocolError(f"a card names at most {MAX_ADDRESSES} addresses of {MAX_ADDRESS_CHARACTERS} characters")
    for speed in (card.upload_bytes_per_second, card.download_bytes_per_second):
        if speed is not None and not 0 <= speed < 1e15:
            raise ProtocolError("a card's speeds are numbers of bytes per second, 0 or more")
    if len(card.groups) > MAX_GROUPS or len(set(card.groups)) != len(card.groups):
        raise ProtocolError(f"a card names at most {MAX_GROUPS} groups, each once")
    if not all(RUN_NAME.fullmatch(group) for group in card.groups):
        raise ProtocolError("a card's groups have names of lower-case letters, digits and inner hyphens")
