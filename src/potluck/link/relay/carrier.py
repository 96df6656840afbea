"""The relay carrier: every relayed path of this process, over one bulk wire to the hub.

Every peer opens its wire at the start, needed or not. That is one more connection per peer, which costs the hub some
tens of kilobytes; in return a greeting always finds its receiver listening, and no second way of waking peers up is
needed that could fail by itself.

The last token of a packet's subject is its sender: the hub lets nobody publish in another's name. The hub itself
cannot do so either: packets are sealed end to end under link keys, and what does not open is counted and ends the path.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from potluck.clock import Clock, SystemClock
from potluck.errors import ConfigurationError, ProtocolError
from potluck.hub.bulk.wire import WireEvents
from potluck.hub.presence import Presence
from potluck.hub.subjects import Subjects
from potluck.link.carrier import Buffer, CarrierEvents
from potluck.link.channel.packet import HUB_PAYLOAD_BYTES, PACKET_BYTES
from potluck.link.direct.greeting import LinkKeys, is_key
from potluck.link.direct.noise import TAG_BYTES
from potluck.link.direct.sealing import Opened, Slabs
from potluck.link.relay.credit import CreditConfig, InboundBudget
from potluck.link.relay.greeting import RelayGreeting
from potluck.link.relay.packet import PACKET_OVERHEAD_BYTES, RelayKind, decode
from potluck.link.relay.path import RelayPath, RelayTimes
from potluck.link.relay.penalties import Penalties, PenaltyConfig
from potluck.link.relay.sealing import LostError, ReplayedError, sealing_bytes
from potluck.messages import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

ALWAYS_COUNTED = (
    *("packets_sent", "bytes_sent", "packets_received", "bytes_received"),
    *("malformed", "strangers", "stale", "beyond_credit", "waits_for_credit", "floods"),
    *("forged", "replayed", "lost"),
)
SLAB_BYTES = PACKET_BYTES + TAG_BYTES
MOST_SLABS_KEPT = 16
NO_KEY = "it has no link key that it signed"
MOST_SUBSCRIPTIONS = 1000  # fewer than the hub permits to a connection (configuration.py)


class Wire(Protocol):
    """What carries relay packets: hub/bulk/wire.py, or a fake."""

    @property
    def max_payload_bytes(self) -> int:
        """The largest message that the hub takes; 0 while there is no connection."""
        ...

    def open(self, subjects: Collection[str], events: WireEvents) -> None:
        """Begin to connect, and listen to these subjects from then on."""
        ...

    def listen(self, subjects: Collection[str]) -> None:
        """Listen to these subjects instead."""
        ...

    def is_writable(self) -> bool:
        """Whether a message would be taken now; if not, `wire_connected` or `wire_writable` follow."""
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

    penalties: PenaltyConfig = field(default_factory=PenaltyConfig)
    """How much may come without credit, before a peer is not listened to any more."""

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


SUSPICIOUS_PACKETS = 16


class RelayCarrier:
    """Moves packets through the hub. Lives on one event loop."""

    kind = "relay"

    def __init__(
        self,
        events: CarrierEvents,
        self_id: str,
        subjects: Subjects,
        wire: Wire,
        keys: LinkKeys,
        *,
        config: RelayConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Use this wire, which nobody else uses; `start` opens it and `close` closes it. `keys` are this peer's own."""
        self._events = events
        self._self_id = self_id
        self._subjects = subjects
        self._wire = wire
        self._keys = keys
        self._slabs = Slabs(slab_bytes=SLAB_BYTES, most_kept=MOST_SLABS_KEPT)
        self._config = config or RelayConfig()
        self._clock = clock or SystemClock()
        self._budget = InboundBudget(self._config.credit)
        self._penalties = Penalties(self._config.penalties)
        self._roster: dict[str, Presence] = {}  # all who are there and speak our version
        self._paths: dict[str, RelayPath] = {}
        self._listened = self._whom_to_hear()
        self._congested: dict[RelayPath, None] = {}  # wait for the wire, in the order in which they will be told
        self._counts: Counter[str] = Counter()
        self._is_connected = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def start(self) -> None:
        """Begin to connect. Paths open as soon as the hub and the peers answer."""
        self._wire.open(self._listened, self)

    # What the owner asks (Carrier)

    def update_peer(self, presence: Presence) -> None:
        """What the roster says about a peer: greet it, keep it, or drop its path."""
        peer, card = presence.peer, presence.card
        if self._closed or peer == self._self_id:
            return
        if presence.state in ("dead", "left"):
            self._forget(peer, presence.reason or f"the peer is {presence.state}")
            return
        if card.protocol != PROTOCOL_VERSION:
            self._forget(peer, f"the peer speaks version {card.protocol} of the protocol")
            return
        if not is_key(card.link_key):
            self._forget(peer, NO_KEY)
            return
        is_new = peer not in self._roster
        self._roster[peer] = presence
        if is_new:
            self._listen_anew()
        if self._penalties.is_shut_out(peer):
            return
        path = self._paths.get(peer)
        if path is not None and (path.session, path.link_key) != (card.session, card.link_key):
            self._drop(peer, "the peer has started a new session")
            path = None
        if path is None:
            self._make_path(peer, card.session, card.link_key)

    def _make_path(self, peer: str, session: str, link_key: str) -> None:
        path = self._paths[peer] = RelayPath(
            peer,
            session,
            link_key,
            self._subjects.relay(peer, self._self_id),
            self,
            self._budget,
            self._config.times,
            self._clock.monotonic,
            lambda: RelayGreeting(self._keys, self._self_id, peer, link_key, self._slabs),
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
        assert path.seal is not None, "an open path has keys"
        view = None if payload is None else memoryview(payload).cast("B")
        num_bytes = len(header) + (0 if view is None else len(view))
        size = num_bytes + sealing_bytes(len(header), view) + PACKET_OVERHEAD_BYTES
        if not path.allowance.allows(size):
            self._counts["waits_for_credit"] += 1
            path.want(size)
            self._keep_ticking()
            return False
        if not self._wire.is_writable():  # before it is sealed: a number that was used is used
            self._congested[path] = None
            return False
        parts = path.seal.seal(path.epochs, header, view)
        if not self._wire.publish(path.subject, parts):
            self._congested[path] = None
            return False
        path.sent(size)
        self._penalties.earned(peer, self._clock.monotonic())
        self._keep_ticking()
        self._counts["packets_sent"] += 1
        self._counts["bytes_sent"] += num_bytes
        return True

    def why_no_path(self, peer: str) -> str:
        """What stands in the way of a path, for a person to read; empty when there is one."""
        path = self._paths.get(peer)
        if self._penalties.is_shut_out(peer):
            return "it sent more through the hub than it was allowed to, and is not listened to for a while"
        if path is None:
            return f"it is not in the roster, of another version, or {NO_KEY}"
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
        counts["shut_out"] = len(self._penalties.shut_out)
        return {**counts, **{f"wire_{name}": value for name, value in self._wire.statistics().items()}}

    async def close(self) -> None:
        """Close the wire; nothing is told any more. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._paths.clear()
        self._roster.clear()
        self._congested.clear()
        await self._wire.close()

    def _forget(self, peer: str, reason: str) -> None:
        self._drop(peer, reason)
        if self._roster.pop(peer, None) is not None:
            self._listen_anew()

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
        peer = subject.rpartition(".")[2]
        if self._penalties.is_shut_out(peer):
            return  # it was on its way
        size = len(payload) + PACKET_OVERHEAD_BYTES
        opened = self._credited(peer, payload, size)
        if opened is None:
            self._unbidden(peer, size)
            return
        self._penalties.earned(peer, self._clock.monotonic())
        self._counts["packets_received"] += 1
        self._counts["bytes_received"] += len(opened[0]) + (0 if opened[1] is None else len(opened[1]))
        self._events.packet_arrived(self, peer, *opened)

    def message_skipped(self, subject: str, num_bytes: int) -> None:
        """A message larger than any packet."""
        peer = subject.rpartition(".")[2]
        if self._is_connected and not self._penalties.is_shut_out(peer):
            self._unbidden(peer, num_bytes)

    def _credited(self, peer: str, payload: memoryview, size: int) -> Opened | None:
        """Take in what a peer says: the link packet that it had credit for, opened; None for all else."""
        path = self._paths.get(peer)
        if path is None:
            self._counts["strangers"] += 1  # not in the roster yet, or any more: it will greet us again
            return None
        try:
            packet = decode(payload)
        except ProtocolError:
            self._counts["malformed"] += 1
            return None
        if not path.receive(packet):
            self._counts["stale"] += packet.kind is RelayKind.DATA
            return None
        if not self._budget.arrived(path.account, size, self._clock.monotonic()):
            self._counts["beyond_credit"] += 1
            return None
        assert path.seal is not None, "an open path has keys"
        try:
            return path.seal.open(packet)
        except ReplayedError as error:
            self.forged(path, error)
        except LostError as error:  # the link has to send it again, which it does on a new path
            self.forged(path, error)
            path.abandon(str(error))
        except ProtocolError as error:
            self.forged(path, error)
            path.mistrust(str(error))
        self._keep_ticking()
        return None

    # The senders that we listen to

    def _unbidden(self, peer: str, size: int) -> None:
        """Something came without credit: small words do, but there is a limit."""
        if self._penalties.spent(peer, size, self._clock.monotonic()):
            return
        self._counts["floods"] += 1
        logger.warning(
            "%s sends more through the hub than it is allowed to: it is not listened to for a while, but over direct "
            "links. If it goes on, an organiser should ban it",
            peer,
        )
        self._listen_anew()
        self._drop(peer, "it floods us")
        self._keep_ticking()

    def _listen_anew(self) -> None:
        subjects = self._whom_to_hear()
        if subjects != self._listened:
            self._listened = subjects
            self._wire.listen(subjects)

    def _whom_to_hear(self) -> list[str]:
        """Everybody; or, while somebody is shut out, all others one by one. Those with a path come first."""
        shut_out = self._penalties.shut_out
        if not shut_out:
            return [self._subjects.relay(self._self_id, "*")]
        peers = [peer for peer in dict.fromkeys((*self._paths, *self._roster)) if peer not in shut_out]
        return [self._subjects.relay(self._self_id, peer) for peer in peers[:MOST_SUBSCRIPTIONS]]

    def _let_in(self, now: float) -> None:
        """Those whose time is over are met again."""
        for peer in self._penalties.let_in(now):
            self._listen_anew()
            if peer in self._roster:
                self.update_peer(self._roster[peer])

    # What a path tells (PathOwner)

    def send_control(self, path: RelayPath, packet: bytes) -> None:
        """Small, and needed by the other side: it does not wait for its turn."""
        self._wire.publish(path.subject, [packet], urgent=True)

    def opened(self, path: RelayPath) -> None:
        """Packets can be sent."""
        self._events.path_opened(self, path.peer)

    def given_up(self, path: RelayPath, granted_bytes: int) -> None:
        """What was granted may still come."""
        self._penalties.given_up(path.peer, granted_bytes, self._clock.monotonic())

    def closed(self, path: RelayPath, reason: str) -> None:
        """Packets cannot be sent any more."""
        self._congested.pop(path, None)
        self._events.path_closed(self, path.peer, reason)

    def credited(self, path: RelayPath) -> None:
        """A packet that waited may leave."""
        self._events.path_writable(self, path.peer)

    def forged(self, path: RelayPath, error: ProtocolError) -> None:
        """It may have been the peer, but rather the hub that carries the packets, or an attacker in its place."""
        name = "replayed" if isinstance(error, ReplayedError) else "lost" if isinstance(error, LostError) else "forged"
        self._counts[name] += 1
        if name == "forged" and self._counts[name].bit_count() == 1:  # the 1st, 2nd, 4th, …
            # Packets of a path that has just ended do not open under the keys of the next one: a few are no news.
            logger.log(
                logging.WARNING if self._counts[name] >= SUSPICIOUS_PACKETS else logging.INFO,
                "the hub delivered something in the name of %s that this peer did not send like this (%s; %d times so "
                "far): it was thrown away. Who runs the hub?",
                path.peer,
                error,
                self._counts[name],
            )

    # Time

    def tick(self) -> None:
        """Look at everything that may be due. A timer calls it; so does a test that has a clock of its own."""
        now = self._clock.monotonic()
        self._budget.write_off_idle(now)
        self._let_in(now)
        for path in list(self._paths.values()):
            path.tick(now)

    def _keep_ticking(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._config.tick_seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.tick()
        is_waiting = self._budget.num_waiting or self._penalties.shut_out
        if is_waiting or any(path.needs_ticks for path in self._paths.values()):
            self._keep_ticking()
