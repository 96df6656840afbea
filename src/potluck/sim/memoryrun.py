"""A whole run in memory: a hub, a guard that says yes to everybody, and peers with sessions and links.

    run = MemoryRun(clock=LoopClock())            # on a VirtualTimeLoop; SystemClock() where threads take part
    alice = await run.join("alice", coordinates=True)
    averager = Averager(alice, workers=InlineWorkers())
    await run.kill(alice)                         # as SIGKILL: the hub says at once that it is dead
    run.sever(alice); run.reunite(alice)          # nothing from or to it moves, and nobody is told

What the product's own parts do (session, links, lease, rounds) they really do here; only the wires are missing. Keys
and the network's whims come from the seed: with the same one, the same peers get the same ids, in the same order.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence

import msgspec
import nkeys

from potluck.clock import Clock
from potluck.errors import AccessError, HubUnavailableError
from potluck.hub.access.member import Policy, Scopes
from potluck.hub.connection import Delivery
from potluck.hub.presence import Beacon, Card, CardAnswer, Presence, Role, State
from potluck.hub.subjects import MAIN
from potluck.link.limits import LinkConfig
from potluck.link.links import Links
from potluck.messages import decode, encode
from potluck.peer.identity import Identity
from potluck.peer.roster import RosterEvent
from potluck.peer.session import Session
from potluck.sim.memorycarrier import PERFECT, Conditions, MemoryCarrier, MemoryNetwork
from potluck.sim.memoryconnection import MemoryConnection
from potluck.sim.memoryhub import MemoryHub

CARRIERS = ("direct", "relay")


class MemoryPeer:
    """One peer of a MemoryRun; has what an Averager needs."""

    def __init__(self, run: MemoryRun, identity: Identity, card: Card, carriers: Sequence[str]) -> None:
        self.identity = identity
        self.peer_id = identity.peer_id
        self.name = card.name
        self.links = Links(self.peer_id, card.session, run.clock, run.link_config)
        for kind in carriers:
            self.links.add_carrier(MemoryCarrier(run.network, self.peer_id, events=self.links, kind=kind))
        self.session = Session(self._connect, identity, run.hub.subjects, card, run.clock)
        self._run = run

    async def open(self) -> None:
        """Join the run."""
        self.session.roster.listen(self._roster_changed)
        await self.session.open()

    async def close(self) -> None:
        """Leave the run."""
        await self.session.close()
        await self.links.close()

    async def _connect(
        self,
        lane: str,
        *,
        on_connected: Callable[[], None] | None = None,
        on_disconnected: Callable[[], None] | None = None,
        on_refused: Callable[[AccessError], None] | None = None,
    ) -> MemoryConnection:
        return self._run.hub.connect(
            self.peer_id, on_connected=on_connected, on_disconnected=on_disconnected, on_refused=on_refused
        )

    def _roster_changed(self, event: RosterEvent) -> None:
        if event.peer != self.peer_id:
            self.links.update_peer(event.presence)


class MemoryRun:
    """A hub, its guard, and a network between the peers. Made in a running event loop; `open` it."""

    def __init__(self, *, clock: Clock, seed: int = 0, link_config: LinkConfig | None = None) -> None:
        self.clock = clock
        self.hub = MemoryHub()
        self.network = MemoryNetwork(seed=seed)
        self._keys = random.Random(seed)
        self.link_config = link_config
        self.peers: dict[str, MemoryPeer] = {}
        self._presences: dict[str, Presence] = {}
        self._allowed_groups: dict[str, frozenset[str]] = {}  # by peer; none: all
        self._num_sessions = 0
        self._guard = self.hub.connect("GUARD")

    async def open(self) -> None:
        """Start the guard."""
        subjects = self.hub.subjects
        await self._guard.subscribe(subjects.card("*"), self._card_came)
        await self._guard.subscribe(subjects.leave("*"), self._left)
        await self._guard.subscribe(subjects.ask("*", "time"), self._time_asked)

    async def close(self) -> None:
        """Close every peer that is left, and the guard."""
        for peer in list(self.peers.values()):
            await self.leave(peer)
        await self._guard.close()

    @property
    def next_session(self) -> str:
        """The session of the next peer that joins."""
        return f"s{self._num_sessions + 1}"

    async def join(
        self,
        name: str,
        *,
        role: Role = "trainer",
        coordinates: bool = True,
        trusted: bool = True,
        is_client: bool = False,
        identity: Identity | None = None,
        carriers: Sequence[str] = ("direct",),
        groups: Sequence[str] = (MAIN,),
        allowed_groups: Sequence[str] = (),
    ) -> MemoryPeer:
        """A new peer, in these groups; with the identity of one that was killed, its next life.

        It is linked by what others have too. `allowed_groups` are those that it may be in; none named: all.
        """
        identity = identity or Identity(nkeys.encode_seed(self._keys.randbytes(32), nkeys.PREFIX_BYTE_USER))
        session = self.next_session
        self._num_sessions += 1
        card = Card(
            session=session,
            role=role,
            name=name,
            addresses=() if is_client else (f"tcp://127.0.0.1:{self._num_sessions}",),
            groups=tuple(groups),
        )
        for other in self.peers:  # cuts belong to the life before
            for kind in CARRIERS:
                self.network.mend(kind, identity.peer_id, other)
                for pair in ((identity.peer_id, other), (other, identity.peer_id)):
                    self.network.set_conditions(PERFECT, kind=kind, sender=pair[0], receiver=pair[1])
        peer = MemoryPeer(self, identity, card, carriers)
        self._presences[peer.peer_id] = Presence(
            peer=peer.peer_id,
            card=card,
            state="left",
            host="127.0.0.1",
            person=name,
            coordinates=coordinates,
            trusted=trusted,
        )
        self._allowed_groups[peer.peer_id] = frozenset(allowed_groups)
        await peer.open()
        self.peers[peer.peer_id] = peer
        return peer

    async def leave(self, peer: MemoryPeer) -> None:
        """A peer leaves, with a good-bye."""
        self.peers.pop(peer.peer_id, None)
        await peer.close()

    async def kill(self, peer: MemoryPeer, reason: str = "its connection closed") -> None:
        """A peer's process dies. Close what else runs on it afterwards: it cannot tell anybody any more."""
        self.sever(peer)
        self.peers.pop(peer.peer_id, None)
        await peer.links.close()
        await self.tell(peer.peer_id, "dead", reason)
        await peer.session.close()

    async def tell(self, peer: str, state: State, reason: str = "") -> None:
        """What the guard says about a peer."""
        presence = msgspec.structs.replace(self._presences[peer], state=state, reason=reason)
        self._presences[peer] = presence
        await self._guard.store("roster").put(peer, encode(presence))

    async def pardon(self, peer: str) -> None:
        """An organiser forgives a peer what audits have found."""
        self._presences[peer] = msgspec.structs.replace(self._presences[peer], pardoned_at=self.clock.wall())
        await self.tell(peer, self._presences[peer].state)

    def sever(self, peer: MemoryPeer) -> None:
        """From this moment on nothing reaches a peer or leaves it, as if its cable were pulled."""
        self.hub.disconnect(peer.peer_id)
        for other in self.peers.values():
            if other is not peer:
                self.cut(peer, other)

    def reunite(self, peer: MemoryPeer) -> None:
        """The cable is back."""
        self.hub.reconnect(peer.peer_id)
        for other in self.peers.values():
            if other is not peer:
                self.mend(peer, other)

    def muffle(self, one: MemoryPeer, other: MemoryPeer, *, is_silent: bool = True) -> None:
        """What one sends to the other vanishes, and nobody is told."""
        conditions = Conditions(is_silent=True) if is_silent else PERFECT
        for kind in CARRIERS:
            self.network.set_conditions(conditions, kind=kind, sender=one.peer_id, receiver=other.peer_id)

    def cut(self, one: MemoryPeer, other: MemoryPeer) -> None:
        """Nothing moves between the two any more."""
        for kind in CARRIERS:
            self.network.cut(kind, one.peer_id, other.peer_id)

    def mend(self, one: MemoryPeer, other: MemoryPeer) -> None:
        """The path is back."""
        for kind in CARRIERS:
            self.network.mend(kind, one.peer_id, other.peer_id)

    # The guard; while the hub is away its answers are lost, and the peer asks again.

    async def _card_came(self, delivery: Delivery) -> None:
        peer = delivery.subject.rsplit(".", 1)[-1]
        card, scopes = decode(Card, delivery.payload), Scopes(groups=tuple(self._allowed_groups.get(peer) or ()))
        refusals = {group: Policy().refusal_of_group(group, scopes) for group in card.groups}
        refused = tuple(group for group, reason in refusals.items() if reason)
        card = msgspec.structs.replace(card, groups=tuple(group for group in card.groups if group not in refused))
        self._presences[peer] = msgspec.structs.replace(self._presences[peer], card=card)
        answer = CardAnswer(accepted=True, refused_groups=refused, message="; ".join(filter(None, refusals.values())))
        with contextlib.suppress(HubUnavailableError):
            await self.tell(peer, "alive")
            await delivery.respond(encode(answer))

    async def _left(self, delivery: Delivery) -> None:
        peer = delivery.subject.rsplit(".", 1)[-1]
        beacon = decode(Beacon, delivery.payload)
        with contextlib.suppress(HubUnavailableError):
            if self._presences[peer].card.session == beacon.session:
                await self.tell(peer, "left", "it said good-bye")
            await delivery.respond(b"")

    async def _time_asked(self, delivery: Delivery) -> None:
        with contextlib.suppress(HubUnavailableError):
            await delivery.respond(encode(self.clock.wall()))
