"""What members and strangers ask, brought to the desk that answers it.

A handler returns at once; what takes longer becomes a task. The hub has checked who speaks, but not where the answer is
wanted: it goes to the sender's own inbox and nowhere else. The guard may publish anywhere, so otherwise it could be
made to speak on a subject that the sender may not use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from potluck.clock import Clock
from potluck.hub.access.application import MAX_APPLICATION_BYTES
from potluck.hub.connection import Delivery, HubConnection, Subscription
from potluck.hub.guard import callout
from potluck.hub.guard.backgroundwork import BackgroundWork
from potluck.hub.guard.connections import Connections
from potluck.hub.guard.door import Door
from potluck.hub.guard.lobbydesk import LobbyDesk
from potluck.hub.guard.organiserdesk import OrganiserDesk
from potluck.hub.guard.presencekeeper import PresenceKeeper
from potluck.hub.guard.queuedesk import QueueDesk
from potluck.hub.guard.storedesk import StoreDesk
from potluck.hub.queues import QueueSubjects
from potluck.hub.ratelimit import RateLimit
from potluck.hub.subjects import PEER_ID, Subjects
from potluck.messages import encode

QUEUE = "guard"
LOBBY_BURST = 20  # messages of one stranger at once, and then one a second; who sends more is cut off


@dataclass(frozen=True, slots=True, kw_only=True)
class Desks:
    """Who answers what."""

    door: Door
    lobby: LobbyDesk
    keeper: PresenceKeeper
    organisers: OrganiserDesk
    stores: StoreDesk
    queues: QueueDesk | None
    """None: the hub has no queues."""


class Reception:
    """Hears everything that is addressed to the guard."""

    def __init__(
        self, subjects: Subjects, desks: Desks, connections: Connections, background: BackgroundWork, clock: Clock
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._subjects = subjects
        self._desks = desks
        self._connections = connections
        self._background = background
        self._clock = clock
        self._lobby_rate = RateLimit(burst=LOBBY_BURST, per_second=1.0, clock=clock)
        self._subscriptions: list[Subscription] = []

    async def open(self, hub: HubConnection, queues_hub: HubConnection | None) -> None:
        """Answer from now on. `queues_hub` is our connection in the queues' account, if there is one."""
        every = self._subjects.every_peer

        async def listen(
            subject: str, handler: Callable[[Delivery], None], queue: str = QUEUE, on: HubConnection = hub
        ) -> None:
            self._subscriptions.append(await on.subscribe(subject, handler, queue=queue))

        for kind, handler in (("card", self._on_card), ("beacon", self._on_beacon), ("leave", self._on_leave)):
            await listen(every(kind), handler, "")  # what concerns the roster all guards hear
        await listen(every("ask") + ".*", self._on_ask)
        await listen(every("read") + ".*", self._on_read)
        await listen(every("write") + ".>", self._on_write)
        await listen(every("organise") + ".*", self._on_organise)
        await listen(every("lobby"), self._on_lobby)
        await listen(callout.SUBJECT, self._on_callout)
        if queues_hub is not None:
            await listen(f"{QueueSubjects(self._subjects.run).root}.ask.*.*", self._on_queues, on=queues_hub)

    async def close(self) -> None:
        """Hear nothing more. Idempotent."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.cancel()

    def _on_callout(self, delivery: Delivery) -> None:
        self._background.spawn(self._answer_callout(delivery))

    async def _answer_callout(self, delivery: Delivery) -> None:
        answer = await self._desks.door.answer(delivery.payload)
        if answer is not None:
            await delivery.respond(answer)

    def _on_lobby(self, delivery: Delivery) -> None:
        peer = self._sender(delivery)
        if peer is None:
            return
        if len(delivery.payload) > MAX_APPLICATION_BYTES or not self._lobby_rate.take(peer):
            # No limit of the hub's own holds for one connection, so those who flood the lobby have to be cut off.
            self.counts["lobby_floods"] += 1
            self._desks.keeper.cut(self._connections.of_peer(peer, "lobby"), "it floods the lobby")
            return
        self._background.spawn(self._answer_application(delivery, peer))

    async def _answer_application(self, delivery: Delivery, peer: str) -> None:
        await self._respond(delivery, peer, encode(await self._desks.lobby.answer(peer, delivery.payload)))

    def _on_card(self, delivery: Delivery) -> None:
        if (peer := self._sender(delivery)) is not None:
            self._background.spawn(self._answer_card(delivery, peer))

    async def _answer_card(self, delivery: Delivery, peer: str) -> None:
        await self._respond(delivery, peer, encode(await self._desks.keeper.card(peer, delivery.payload)))

    def _on_beacon(self, delivery: Delivery) -> None:
        if (peer := self._sender(delivery)) is not None:
            self._desks.keeper.beacon(peer, delivery.payload)

    def _on_leave(self, delivery: Delivery) -> None:
        if (peer := self._sender(delivery)) is not None:
            self._background.spawn(self._answer_leave(delivery, peer))

    async def _answer_leave(self, delivery: Delivery, peer: str) -> None:
        await self._respond(delivery, peer, encode(await self._desks.keeper.leave(peer, delivery.payload)))

    def _on_ask(self, delivery: Delivery) -> None:
        peer = self._sender(delivery)
        if peer is None:
            return
        if delivery.subject.rpartition(".")[2] != "time":
            self.counts["unknown_questions"] += 1
            return
        self._background.spawn(self._respond(delivery, peer, encode(self._clock.wall())))

    def _on_read(self, delivery: Delivery) -> None:
        peer = self._sender(delivery)
        if peer is not None and self._is_own_inbox(delivery, peer):
            self._background.spawn(self._desks.stores.read(delivery))

    def _on_write(self, delivery: Delivery) -> None:
        peer = self._sender(delivery)
        if peer is not None and self._is_own_inbox(delivery, peer):
            self._background.spawn(self._desks.stores.write(delivery))

    def _on_queues(self, delivery: Delivery) -> None:
        assert self._desks.queues is not None, "it is listened for those only where there are queues"
        self._background.spawn(self._desks.queues.answer(delivery))

    def _on_organise(self, delivery: Delivery) -> None:
        if (peer := self._sender(delivery)) is not None:
            self._background.spawn(self._answer_organiser(delivery, peer))

    async def _answer_organiser(self, delivery: Delivery, peer: str) -> None:
        verb = delivery.subject.rpartition(".")[2]
        answer = await self._desks.organisers.answer(peer, verb, delivery.payload)
        await self._respond(delivery, peer, encode(answer))

    def _sender(self, delivery: Delivery) -> str | None:
        """Who published: the token after the kind of message. The hub has checked it."""
        peer = delivery.subject.split(".", 4)[3]
        if PEER_ID.fullmatch(peer):
            return peer
        self.counts["invalid_senders"] += 1
        return None

    async def _respond(self, delivery: Delivery, peer: str, payload: bytes) -> None:
        if self._is_own_inbox(delivery, peer):
            await delivery.respond(payload)

    def _is_own_inbox(self, delivery: Delivery, peer: str) -> bool:
        if not delivery.reply:
            return False
        if delivery.reply.startswith(f"{Subjects.inbox(peer)}."):
            return True
        self.counts["misdirected_replies"] += 1
        return False
