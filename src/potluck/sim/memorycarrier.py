"""Carriers without a network: packets between objects of one process, as reliable as the test wants.

    network = MemoryNetwork(seed=1, schedule=clock.schedule)     # on virtual time; without one, on the event loop's
    links = Links("alice", "s1", clock)
    links.add_carrier(MemoryCarrier(network, "alice", kind="direct", events=links))
    network.set_conditions(Conditions(loss=0.1, bytes_per_second=1e6), kind="relay")
    network.cut("direct", "alice", "bob"); network.mend("direct", "alice", "bob")

A path between two carriers of one kind opens when each has been told by the roster that the other lives, and the path
is not cut. Packets keep their order while a path lasts; when it closes, what was in flight is lost. Everything random
comes from the seed.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from potluck.hub.presence import Presence
from potluck.link.carrier import Buffer, CarrierEvents
from potluck.sim.virtualclock import TimerSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How a path behaves, one way."""

    delay_seconds: float = 0.0
    bytes_per_second: float | None = None  # None: without limit
    queue_bytes: int | None = None  # what waits beyond this is refused as congestion; None: without limit
    loss: float = 0.0  # the share of packets that vanish
    duplication: float = 0.0  # … that arrive twice
    is_silent: bool = False  # everything vanishes, and nobody is told


PERFECT = Conditions()
OpenPath = tuple[str, str, str]  # kind, sender, receiver


class MemoryNetwork:
    """Connects carriers of the same kind."""

    def __init__(self, *, seed: int = 0, schedule: TimerSchedule | None = None) -> None:
        self.random = random.Random(seed)
        self.num_lost = 0
        self.num_duplicated = 0
        self._schedule = schedule
        self._carriers: dict[tuple[str, str], MemoryCarrier] = {}
        self._conditions: dict[OpenPath, Conditions] = {}
        self._defaults: dict[str, Conditions] = {}
        self._cut: set[tuple[str, frozenset[str]]] = set()

    def set_conditions(
        self, conditions: Conditions, *, kind: str, sender: str | None = None, receiver: str | None = None
    ) -> None:
        """Let paths of that kind behave so: one way between two peers, or all of them."""
        if sender is not None and receiver is not None:
            self._conditions[kind, sender, receiver] = conditions
        else:
            self._defaults[kind] = conditions

    def conditions(self, path: OpenPath) -> Conditions:
        """How a path behaves now."""
        return self._conditions.get(path) or self._defaults.get(path[0], PERFECT)

    def cut(self, kind: str, one: str, other: str, reason: str = "cut") -> None:
        """Close the path between two peers, both ways, until it is mended."""
        self._cut.add((kind, frozenset((one, other))))
        self._update(kind, one, other, reason)

    def mend(self, kind: str, one: str, other: str) -> None:
        """Let the path open again."""
        self._cut.discard((kind, frozenset((one, other))))
        self._update(kind, one, other, "")

    def attach(self, carrier: MemoryCarrier) -> None:
        """A carrier is there; one of the same peer and kind from before is gone."""
        before = self._carriers.get((carrier.kind, carrier.peer))
        if before is not None:
            self.detach(before)
        self._carriers[carrier.kind, carrier.peer] = carrier

    def detach(self, carrier: MemoryCarrier) -> None:
        """A carrier is gone: its paths close, as after the death of its process."""
        if self._carriers.get((carrier.kind, carrier.peer)) is carrier:
            del self._carriers[carrier.kind, carrier.peer]
            for other in [c for c in self._carriers.values() if c.kind == carrier.kind]:
                other.set_path(carrier.peer, None, "the other side is gone")

    def _update(self, kind: str, one: str, other: str, reason: str) -> None:
        first, second = self._carriers.get((kind, one)), self._carriers.get((kind, other))
        is_cut = (kind, frozenset((one, other))) in self._cut
        ready = bool(first and second and first.knows(second) and second.knows(first) and not is_cut)
        for carrier, remote in ((first, second), (second, first)):
            if carrier is not None:
                carrier.set_path(other if carrier is first else one, remote if ready else None, reason)

    def roster_changed(self, carrier: MemoryCarrier, peer: str) -> None:
        """A carrier has heard of a peer."""
        self._update(carrier.kind, carrier.peer, peer, "the roster says so")

    def now(self) -> float:
        """The network's time."""
        return self._schedule.now() if self._schedule is not None else asyncio.get_running_loop().time()

    def call_at(self, when: float, callback: Callable[[], None], context: contextvars.Context) -> None:
        """Do something at that time, in somebody's context."""
        if self._schedule is not None:
            self._schedule.call_at(when, callback)
        elif when <= self.now():
            asyncio.get_running_loop().call_soon(callback, context=context)
        else:
            asyncio.get_running_loop().call_at(when, callback, context=context)


class _Path:
    """One way from one carrier to another, for as long as it is open."""

    def __init__(self, remote: MemoryCarrier) -> None:
        self.remote = remote
        self.is_open = True
        self.is_congested = False
        self.waiting_bytes = 0
        self.free_at = 0.0


class MemoryCarrier:
    """A Carrier whose packets stay in this process."""

    def __init__(self, network: MemoryNetwork, peer: str, *, events: CarrierEvents, kind: str = "direct") -> None:
        self.peer = peer
        self._network = network
        self._events = events
        self._kind = kind
        self._alive: dict[str, str] = {}  # sessions, by peer
        self._paths: dict[str, _Path] = {}
        self._counts: Counter[str] = Counter()
        self.context = contextvars.copy_context()  # what arrives belongs to the maker of the carrier
        network.attach(self)

    @property
    def kind(self) -> str:
        """How this way is called."""
        return self._kind

    def knows(self, other: MemoryCarrier) -> bool:
        """Whether the roster has told us that the other lives."""
        return other.peer in self._alive

    def update_peer(self, presence: Presence) -> None:
        """What the roster says about a peer."""
        peer, session = presence.peer, presence.card.session
        lives = presence.state in ("alive", "suspect")
        if peer == self.peer or self._alive.get(peer) == (session if lives else None):
            return
        self._alive.pop(peer, None)
        self._network.roster_changed(self, peer)
        if lives:
            self._alive[peer] = session
            self._network.roster_changed(self, peer)

    def set_path(self, peer: str, remote: MemoryCarrier | None, reason: str) -> None:
        """Open or close the path to a peer; nothing happens if it is that way already."""
        path = self._paths.get(peer)
        if path is not None and path.remote is not remote:
            path.is_open = False
            del self._paths[peer]
            self.context.copy().run(self._events.path_closed, self, peer, reason)
            path = None
        if path is None and remote is not None:
            self._paths[peer] = _Path(remote)
            self.context.copy().run(self._events.path_opened, self, peer)

    def send(self, peer: str, header: bytes, payload: Buffer | None) -> bool:
        """Hand over one packet."""
        path = self._paths.get(peer)
        if path is None:
            self._counts["packets_refused"] += 1
            return False
        network = self._network
        conditions = network.conditions((self._kind, self.peer, peer))
        size = len(header) + (len(payload) if payload is not None else 0)
        if (
            conditions.queue_bytes is not None
            and path.waiting_bytes
            and path.waiting_bytes + size > conditions.queue_bytes
        ):
            path.is_congested = True
            self._counts["packets_refused"] += 1
            return False
        self._counts["packets_sent"] += 1
        self._counts["bytes_sent"] += size
        now = network.now()
        seconds = size / conditions.bytes_per_second if conditions.bytes_per_second else 0.0
        path.free_at = max(path.free_at, now) + seconds
        path.waiting_bytes += size
        network.call_at(path.free_at, lambda: self._left(path, peer, size), self.context)
        self._deliver_later(path, header, payload, conditions, path.free_at + conditions.delay_seconds)
        return True

    def _deliver_later(
        self, path: _Path, header: bytes, payload: Buffer | None, conditions: Conditions, when: float
    ) -> None:
        network = self._network
        if conditions.is_silent or network.random.random() < conditions.loss:
            network.num_lost += 1
            return
        copies = 2 if network.random.random() < conditions.duplication else 1
        network.num_duplicated += copies - 1
        for _ in range(copies):
            network.call_at(when, lambda: self._arrive(path, header, payload), path.remote.context)

    def _arrive(self, path: _Path, header: bytes, payload: Buffer | None) -> None:
        if path.is_open:
            # A copy, as a network makes one: the receiver must not see what the sender does to its buffer later.
            body = memoryview(bytes(payload)) if payload is not None else None
            path.remote.received(self.peer, memoryview(header), body)
        else:
            self._network.num_lost += 1

    def received(self, sender: str, header: memoryview, payload: memoryview | None) -> None:
        """A packet has come."""
        self._counts["packets_received"] += 1
        self._counts["bytes_received"] += len(header) + (len(payload) if payload is not None else 0)
        self._events.packet_arrived(self, sender, header, payload)

    def _left(self, path: _Path, peer: str, size: int) -> None:
        path.waiting_bytes -= size
        if path.is_congested and path.is_open and not path.waiting_bytes:
            path.is_congested = False
            self._events.path_writable(self, peer)

    def statistics(self) -> Mapping[str, int | float]:
        """Counters."""
        return {**self._counts, "paths_open": len(self._paths)}

    async def close(self) -> None:
        """Leave the network. Idempotent."""
        self._network.detach(self)
        for path in self._paths.values():
            path.is_open = False
        self._paths.clear()
