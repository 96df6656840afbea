"""A peer's links on virtual time, without an event loop: the real table and links, and a record of what came of it.

For tests of links and for simulations. `LinkNode.restart` is the death of a process and its return as another life.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from potluck.errors import PeerUnreachableError
from potluck.hub.presence import Card, Presence, State
from potluck.link.channel.inbox import ReceivedMessage
from potluck.link.channel.packet import Urgency
from potluck.link.channel.sendreceipt import SendReceipt
from potluck.link.limits import LinkConfig
from potluck.link.peerlink import PeerLink
from potluck.link.table import LinkTable
from potluck.sim.memorycarrier import MemoryCarrier, MemoryNetwork
from potluck.sim.virtualclock import Timer, VirtualClock

KINDS = ("direct", "relay")


def presence_of(peer: str, session: str, state: State = "alive", *, reason: str = "") -> Presence:
    """A roster entry with the least that it can say."""
    return Presence(
        peer=peer,
        card=Card(session=session, role="trainer"),
        state=state,
        host="127.0.0.1",
        person="someone",
        reason=reason,
    )


class LinkNode:
    """One peer: sends bodies and frames, keeps what arrives."""

    def __init__(
        self,
        name: str,
        network: MemoryNetwork,
        clock: VirtualClock,
        *,
        config: LinkConfig | None = None,
        kinds: Sequence[str] = KINDS,
        session: str = "1",
    ) -> None:
        self.name = name
        self.session = session
        self.received: list[tuple[str, bytes, list[bytes]]] = []
        self.failures: list[tuple[str, PeerUnreachableError]] = []
        self.keeps = False  # deliveries are not released until `release_all`
        self.kept: list[ReceivedMessage] = []
        self.on_delivered: Callable[[PeerLink, ReceivedMessage], None] | None = None
        self._network = network
        self._clock = clock
        self._config = config if config is not None else LinkConfig()
        self._kinds = kinds
        self._awake: dict[PeerLink, None] = {}
        self._turn: Timer | None = None
        self._tick: Timer | None = None
        self.table = self._begin()

    def _begin(self) -> LinkTable:
        table = LinkTable(self.name, self.session, self._clock, self._config, self)
        for kind in self._kinds:
            table.add_carrier(MemoryCarrier(self._network, self.name, kind=kind, events=table))
        return table

    def presence(self, state: State = "alive") -> Presence:
        """What the roster would say of this node."""
        return presence_of(self.name, self.session, state)

    def restart(self, session: str) -> None:
        """Die at once, with all that is unsaid, and live again knowing nobody."""
        self.table.close("it was killed")
        self._awake.clear()
        self.kept.clear()
        self.session = session
        self.table = self._begin()

    def send(self, peer: str, body: bytes, frames: Sequence[bytes] = (), *, bulk: bool = False) -> SendReceipt:
        """Queue a message."""
        return self.table.links[peer].send(
            body, [memoryview(frame) for frame in frames], urgency=Urgency.BULK if bulk else Urgency.FIRST
        )

    def release_all(self) -> None:
        """The application takes what it has kept."""
        kept, self.kept = self.kept, []
        for delivery in kept:
            delivery.release()

    def delivered(self, link: PeerLink, delivery: ReceivedMessage) -> None:
        """A message has arrived."""
        self.received.append((link.peer, bytes(delivery.body), [bytes(frame) for frame in delivery.frames]))
        if self.on_delivered is not None:
            self.on_delivered(link, delivery)
        if self.keeps:
            self.kept.append(delivery)
        else:
            delivery.release()

    def failed(self, link: PeerLink, error: PeerUnreachableError) -> None:
        """A channel is gone."""
        self.failures.append((link.peer, error))

    def woke(self, link: PeerLink) -> None:
        """A link has something to do."""
        self._awake[link] = None
        if self._turn is None:
            self._turn = self._clock.call_later(0.0, self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        awake, self._awake = self._awake, {}
        for link in awake:
            link.pump()
        self._plan()

    def _plan(self) -> None:
        now = self._clock.monotonic()
        due = [due_at for link in self.table.links.values() if (due_at := link.next_at()) is not None]
        if self._tick is not None:
            self._tick.cancel()
        self._tick = None
        if due:
            self._tick = self._clock.call_at(max(min(due), now + self._config.tick_seconds), self._on_tick)

    def _on_tick(self) -> None:
        self._tick = None
        now = self._clock.monotonic()
        self.table.expire()
        for link in list(self.table.links.values()):
            due_at = link.next_at()
            if due_at is not None and due_at <= now:
                link.tick()
        self._plan()
