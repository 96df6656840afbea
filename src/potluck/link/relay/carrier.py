"""The relay carrier: every relayed path of this process, over one bulk wire to the hub.

Every peer opens its wire at the start, needed or not. That is one more connection per peer, which costs the hub some
tens of kilobytes; in return a greeting always finds its receiver listening, and no second way of waking peers up is
needed that could fail by itself.

Whom a packet comes from is the last token of its subject: the hub lets nobody publish in another's name.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from potluck.clock import Clock, SystemClock
from potluck.errors import ConfigurationError, ProtocolError
from potluck.hub.bulk.wire import WireEvents
from potluck.hub.presence import Presence
from potluck.hub.subjects import Subjects
from potluck.link.carrier import Buffer, CarrierEvents
from potluck.link.channel.packet import HUB_PAYLOAD_BYTES
from potluck.link.relay.credit import CreditConfig, InboundBudget
from potluck.link.relay.packet import PACKET_OVERHEAD_BYTES, PREFIX_BYTES, RelayKind, decode, encode_prefix
from potluck.link.relay.path import RelayPath, RelayTimes
from potluck.messages import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

ALWAYS_COUNTED = (
    *("packets_sent", "bytes_sent", "packets_received", "bytes_received"),
    *("malformed", "strangers", "stale", "beyond_credit", "waits_for_credit"),
)


class Wire(Protocol):
    """What carries relay packets: hub/bulk/wire.py, or a fake."""

    @property
    def max_payload_bytes(self) -> int:
        """The largest message that the hub takes; 0 while there is no connection."""
        ...

    def open(self, subject: str, events: WireEvents) -> None:
        """Begin to connect, and listen to that subject from then on."""
        ...

    def publish(self, subject: str, parts: Sequence[Buffer], *, urgent: bool = False) -> bool:
        """Hand over one message; False: not connected, or congested."""
        ...

    def statistics(self) -> Mapping[str, int]:
        """Counters."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """How a peer makes and keeps relayed paths."""

    credit: CreditConfig = field(default_factory=CreditConfig)
    """How much may be on its way to this peer."""

    times: RelayTimes = field(default_factory=RelayTimes)
    """How patient paths are."""

    eager_peers: int = 64
    """In a roster of up to so many peers everyone is greeted at once; beyond that, at the first packet for it."""

    tick_seconds: float = 0.1
    """How often paths are looked at while any of them waits for something."""

    def __post_init__(self) -> None:
        if self.eager_peers < 0:
            raise ConfigurationError(f"eager_peers is {self.eager_peers}: it must not be negative")
        if self.tick_seconds <= 0:
            raise ConfigurationError(f"tick_seconds is {self.tick_seconds}: it must be more than 0")


class RelayCarrier:
    """Moves packets through the hub. Lives on one event loop."""

    kind = "relay"

    def __init__(
        self,
        events: CarrierEvents,
        self_id: str,
        subjects: Subjects,
        wire: Wire,
        *,
        config: RelayConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Use this wire, which nobody else uses; `start` opens it and `close` closes it."""
        self._events = events
        self._self_id = self_id
        self._subjects = subjects
        self._wire = wire
        self._config = config or RelayConfig()
        self._clock = clock or SystemClock()
        self._budget = InboundBudget(self._config.credit)
        self._paths: dict[str, RelayPath] = {}
        self._congested: dict[RelayPath, None] = {}  # wait for the wire, in the order in which they will be told
        self._counts: Counter[str] = Counter()
        self._is_connected = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def start(self) -> None:
        """Begin to connect. Paths open as soon as the hub and the peers answer."""
        self._wire.open(self._subjects.relay(self._self_id, "*"), self)

    # What the owner asks (Carrier)

    def update_peer(self, presence: Presence) -> None:
        """The roster's word on a peer: greet it, keep it, or drop its path."""
        peer, card = presence.peer, presence.card
        if self._closed or peer == self._self_id:
            return
        if presence.state in ("dead", "left"):
            self._drop(peer, presence.reason or f"the peer is {presence.state}")
            return
        if card.protocol != PROTOCOL_VERSION:
            self._drop(peer, f"the peer speaks version {card.protocol} of the protocol")
            return
        path = self._paths.get(peer)
        if path is not None and path.session != card.session:
            self._drop(peer, "the peer has started a new session")
            path = None
        if path is None:
            subject = self._subjects.relay(peer, self._self_id)
            path = self._paths[peer] = RelayPath(
                peer,
                card.session,
                subject,
                self,
                self._budget,
                self._config.times,
                self._clock.monotonic,
                wanted=len(self._paths) < self._config.eager_peers,
            )
            if self._is_connected:
                path.wire_connected()
            self._keep_ticking()

    def send(self, peer: str, header: bytes, payload: Buffer | None) -> bool:
        """Hand over one packet; False: no path, no credit, or the wire is congested."""
        path = self._paths.get(peer)
        if path is None:
            return False
        if not path.is_open:
            path.call()
            self._keep_ticking()
            return False
        start = encode_prefix(path.epoch, path.remote_epoch, len(header), has_payload=payload is not None) + header
        parts: list[Buffer] = [start] if payload is None else [start, memoryview(payload).cast("B")]
        num_bytes = sum(map(len, parts))
        size = num_bytes + PACKET_OVERHEAD_BYTES
        if not path.allowance.allows(size):
            self._counts["waits_for_credit"] += 1
            path.want(size)
            self._keep_ticking()
            return False
        if not self._wire.publish(path.subject, parts):
            self._congested[path] = None
            return False
        path.sent(size)
        self._keep_ticking()
        self._counts["packets_sent"] += 1
        self._counts["bytes_sent"] += num_bytes - PREFIX_BYTES
        return True

    def why_no_path(self, peer: str) -> str:
        """What stands in the way of a path, for a person to read; empty when there is one."""
        path = self._paths.get(peer)
        if path is None:
            return "it is not in the roster, or of another version"
        if path.is_open:
            return ""
        return "its relay does not answer" if self._is_connected else "the hub cannot be reached, or refuses us"

    def statistics(self) -> Mapping[str, int | float]:
        """Counters: packets and bytes each way, what was dropped, credit, paths open; `wire_…` are the wire's."""
        counts = Counter(dict.fromkeys(ALWAYS_COUNTED, 0))
        counts.update(self._counts)
        counts["paths"] = sum(path.is_open for path in self._paths.values())
        counts["budget_bytes"] = self._budget.budget_bytes
        counts["credited_bytes"] = self._budget.charged_bytes
        counts["senders_waiting"] = self._budget.num_waiting
        return {**counts, **{f"wire_{name}": value for name, value in self._wire.statistics().items()}}

    async def close(self) -> None:
        """Close the wire; nothing is told any more. Calling it twice does no harm."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._paths.clear()
        self._congested.clear()
        await self._wire.close()

    def _drop(self, peer: str, reason: str) -> None:
        path = self._paths.pop(peer, None)
        if path is not None:
            path.end(reason)

    # What the wire tells (WireEvents)

    def wire_connected(self) -> None:
        """Greet everybody."""
        if self._wire.max_payload_bytes < HUB_PAYLOAD_BYTES:
            logger.error(
                "nothing can be relayed: the hub takes messages of at most %d bytes, and packets need %d. Raise "
                "max_payload in the hub's configuration",
                self._wire.max_payload_bytes,
                HUB_PAYLOAD_BYTES,
            )
            return
        self._is_connected = True
        for path in list(self._paths.values()):
            path.wire_connected()
        self._keep_ticking()

    def wire_lost(self, reason: str) -> None:
        """All paths are gone."""
        self._is_connected = False
        self._congested.clear()
        for path in list(self._paths.values()):
            path.wire_lost(f"the connection to the hub is lost: {reason}")

    def wire_writable(self) -> None:
        """Those that were congested take turns: who is refused again goes to the end of the line."""
        waiting, self._congested = self._congested, {}
        for path in waiting:
            if path.is_open:
                self._events.path_writable(self, path.peer)

    def message_arrived(self, subject: str, payload: memoryview) -> None:
        """One relay packet, from the peer that the subject names."""
        if not self._is_connected:
            return
        path = self._paths.get(subject.rpartition(".")[2])
        if path is None:
            self._counts["strangers"] += 1  # not in the roster yet, or any more: it will greet us again
            return
        try:
            packet = decode(payload)
        except ProtocolError:
            self._counts["malformed"] += 1
            return
        if not path.receive(packet):
            self._counts["stale"] += packet.kind is RelayKind.DATA
            return
        assert packet.header is not None, "a link packet has a header"
        if not self._budget.arrived(path.account, len(payload) + PACKET_OVERHEAD_BYTES, self._clock.monotonic()):
            self._counts["beyond_credit"] += 1
            return
        self._counts["packets_received"] += 1
        self._counts["bytes_received"] += len(payload) - PREFIX_BYTES
        self._events.packet_arrived(self, path.peer, packet.header, packet.payload)

    # What a path tells (PathOwner)

    def send_control(self, path: RelayPath, packet: bytes) -> None:
        """Small, and needed by the other side: it does not wait for its turn."""
        self._wire.publish(path.subject, [packet], urgent=True)

    def opened(self, path: RelayPath) -> None:
        """Packets can be sent."""
        self._events.path_opened(self, path.peer)

    def closed(self, path: RelayPath, reason: str) -> None:
        """Packets cannot be sent any more."""
        self._congested.pop(path, None)
        self._events.path_closed(self, path.peer, reason)

    def credited(self, path: RelayPath) -> None:
        """A packet that waited may leave."""
        self._events.path_writable(self, path.peer)

    # Time

    def tick(self) -> None:
        """Look at everything that may be due. A timer calls it; so does a test that has a clock of its own."""
        now = self._clock.monotonic()
        self._budget.write_off_idle(now)
        for path in list(self._paths.values()):
            path.tick(now)

    def _keep_ticking(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._config.tick_seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.tick()
        if self._budget.num_waiting or any(path.needs_ticks for path in self._paths.values()):
            self._keep_ticking()
