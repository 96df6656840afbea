"""The direct carrier: every direct path of this process, over ZeroMQ."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from potluck.clock import Clock, SystemClock
from potluck.errors import ConfigurationError
from potluck.hub.presence import Presence
from potluck.link.carrier import Buffer, CarrierEvents
from potluck.link.direct.addresses import Endpoint, Interface, dial_order, local_interfaces
from potluck.link.direct.admission import Admission, Member
from potluck.link.direct.flood import FloodGuard, FloodLimits, warn_if_missing
from potluck.link.direct.greeting import DATA, DATA_MARK, LinkKeys
from potluck.link.direct.listening import Incoming, Listener
from potluck.link.direct.noise import TAG_BYTES
from potluck.link.direct.path import DirectPath, PathConfig, Station
from potluck.link.direct.pulse import ANSWER, ANSWER_MARK, ASK, Pulse
from potluck.link.direct.sealing import Opened, Slabs
from potluck.link.direct.sockets import SocketSettings, make_context, terminate
from potluck.messages import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

SLAB_BYTES = 512 * 1024 + TAG_BYTES  # for the largest packets that links send
MOST_SLABS_KEPT = 36  # a little more than one path's queue is long, so that one path at a time finds enough
ALWAYS_COUNTED = ("packets_sent", "bytes_sent", "packets_received", "bytes_received", "malformed", "shut_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectConfig:
    """How a peer makes and keeps direct paths."""

    listen: tuple[str, ...] = ()
    """Where to accept connections, as tcp://HOST:PORT (port 0: any free one); empty for a client peer."""

    sockets: SocketSettings = field(default_factory=SocketSettings)
    """Limits and timeouts of every connection."""

    paths: PathConfig = field(default_factory=PathConfig)
    """How patiently to dial."""

    eager_peers: int = 64
    """In a roster of up to so many peers everyone is dialled at once; beyond that, at the first packet for it."""

    max_offences: int = 8
    """Malformed packets after which a peer's session is shut out."""

    check_seconds: float = 0.1
    """How often connections are checked for floods."""

    linger_seconds: float = 0.2
    """How long `close` waits for packets to leave."""

    def __post_init__(self) -> None:
        for address in self.listen:
            Endpoint.parse(address, lowest_port=0)
        if self.check_seconds <= 0:
            raise ConfigurationError(f"check_seconds={self.check_seconds} must be positive")
        for name in ("eager_peers", "max_offences", "linger_seconds"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} must not be negative")


class DirectCarrier:
    """Moves packets over connections between the peers themselves. Lives on one event loop."""

    kind = "direct"

    def __init__(
        self,
        *,
        peer: str,
        events: CarrierEvents,
        config: DirectConfig,
        clock: Clock | None = None,
        interfaces: Sequence[Interface] | None = None,
    ) -> None:
        """Make the keys; `start` opens the sockets. `interfaces` are this machine's unless given."""
        self._events = events
        self._config = config
        self._interfaces = local_interfaces() if interfaces is None else interfaces
        self._own_host = ""
        clock = clock or SystemClock()
        keys = LinkKeys.generate()
        self._admission = Admission(clock, keys, plain=config.sockets.trusted_lan)
        limits = FloodLimits(held_bytes=config.sockets.held_bytes, ungreeted_seconds=config.sockets.handshake_seconds)
        self._station = Station(
            peer=peer,
            listens=bool(config.listen),
            config=config.paths,
            settings=config.sockets,
            keys=keys,
            context=make_context(config.sockets),
            guard=FloodGuard(limits, clock),
            slabs=Slabs(slab_bytes=SLAB_BYTES, most_kept=MOST_SLABS_KEPT),
            clock=clock,
            counts=Counter(),
        )
        self._pulse: Pulse[DirectPath] = Pulse(config.sockets, clock)
        self._paths: dict[str, DirectPath] = {}
        self._presences: dict[str, Presence] = {}
        self._congested: set[DirectPath] = set()  # those that hold a packet; one that dialled sees to it itself too
        self._listener: Listener | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def link_key(self) -> str:
        """The public key of this session, for the card."""
        return self._station.keys.link_key

    @property
    def is_plain(self) -> bool:
        """Whether bytes go in the clear, on a trusted LAN."""
        return self._config.sockets.trusted_lan

    @property
    def bound(self) -> tuple[Endpoint, ...]:
        """Where this peer accepts connections."""
        return self._listener.bound if self._listener is not None else ()

    def start(self) -> None:
        """Open the sockets, on the running loop; ConfigurationError when an address to listen on cannot be used."""
        warn_if_missing()
        station = self._station
        if self._config.listen:
            listener = Listener(self, station.context, station.settings, station.guard, self._admission, station.slabs)
            listener.listen(self._config.listen)
            self._listener = listener
        self._check_floods()

    def invite_probe(self, *, seconds: float) -> LinkKeys:
        """Keys with which somebody may try, for a while, whether this peer can be reached, and do nothing else."""
        keys = LinkKeys.generate()
        self._admission.invite_probe(keys.link_key, seconds=seconds)
        return keys

    # What the owner asks

    def update_peer(self, presence: Presence) -> None:
        """The roster's word on a peer: dial it, keep it, or drop its path."""
        if self._closed:
            return
        if presence.peer == self._station.peer:
            self._learn_own_host(presence.host)
            return
        card = presence.card
        member = Member(peer=presence.peer, session=card.session, key=card.link_key)
        path = self._paths.get(presence.peer)
        if presence.state in ("dead", "left"):
            self._drop(presence.peer, presence.reason or f"the peer is {presence.state}")
            return
        if path is not None and path.member != member:
            self._drop(presence.peer, "the peer has started a new session")
            path = None
        if card.protocol != PROTOCOL_VERSION or not self._admission.admit(member):
            self._drop(presence.peer, "the peer's card does not allow direct links")
            return
        if path is None:
            wanted = len(self._paths) < self._config.eager_peers
            path = self._paths[presence.peer] = DirectPath(self, self._station, member, wanted=wanted)
        self._presences[presence.peer] = presence
        self._set_addresses(path)

    def send(self, peer: str, header: bytes, payload: Buffer | None) -> bool:
        """Hand over one packet; False: no path, or congested."""
        path = self._paths.get(peer)
        if path is None:
            return False
        # A view of bytes; it also keeps a bytearray from being resized while ZeroMQ reads it.
        view = memoryview(payload).cast("B") if payload is not None else None
        payload_bytes = len(view) if view is not None else 0
        self._check_size(len(header), payload_bytes)
        if not path.send(DATA_MARK + header, view):
            return False
        self._station.counts["packets_sent"] += 1
        self._station.counts["bytes_sent"] += len(header) + payload_bytes
        return True

    def why_no_path(self, peer: str) -> str:
        """What stands in the way of a path, for a person to read; empty when there is one."""
        path = self._paths.get(peer)
        if path is None:
            return "it is not in the roster, or shut out"
        if path.line is not None:
            return ""
        if path.last_failure:
            return path.last_failure
        return "it is being dialled" if path.addresses else "it accepts no connections; waiting for it to dial"

    def statistics(self) -> Mapping[str, int | float]:
        """Counters: packets and bytes each way, refusals by reason, connections cut by reason, paths open."""
        counts = Counter(dict.fromkeys(ALWAYS_COUNTED, 0))
        for more in (self._station.counts, self._admission.counts, self._station.guard.counts):
            counts.update(more)
        if self._listener is not None:
            counts.update(self._listener.counts)
        counts["connections"] = len(self._station.guard)
        counts["paths"] = sum(path.line is not None for path in self._paths.values())
        return counts

    async def close(self) -> None:
        """Hang up everywhere and release sockets and threads; nothing is told any more."""
        if self._closed:
            return
        self._closed = True
        linger = int(self._config.linger_seconds * 1000)
        if self._check_timer is not None:
            self._check_timer.cancel()
        if self._listener is not None:
            self._listener.close(linger_milliseconds=linger)
        for path in self._paths.values():
            path.stop("", linger_milliseconds=linger)
        self._paths.clear()
        self._presences.clear()
        self._congested.clear()
        await terminate(self._station.context)

    # What the roster means

    def _learn_own_host(self, host: str) -> None:
        if host != self._own_host:
            self._own_host = host
            for path in list(self._paths.values()):
                self._set_addresses(path)

    def _set_addresses(self, path: DirectPath) -> None:
        presence = self._presences[path.peer]
        path.set_addresses(
            dial_order(
                (*presence.card.addresses, *presence.card.lan_addresses),
                own_host=self._own_host,
                their_host=presence.host,
                interfaces=self._interfaces,
                near_only=self._config.sockets.trusted_lan,
            )
        )

    def _drop(self, peer: str, reason: str) -> None:
        """Refuse a peer's key from now on and end its path."""
        self._admission.withdraw(peer)
        self._presences.pop(peer, None)
        path = self._paths.pop(peer, None)
        if path is not None:
            path.stop(reason)
            if self._listener is not None:
                self._listener.drop_key(path.member.key)

    def _shut_out(self, path: DirectPath, reason: str) -> None:
        """Have nothing more to do with this session of a peer."""
        logger.warning("%s is shut out from direct links until it restarts: %s", path.peer, reason)
        self._station.counts["shut_out"] += 1
        self._admission.ban(path.peer)
        self._drop(path.peer, reason)

    # What the listener tells

    def accepts(self, member: Member) -> bool:
        """Whether a connection of this member is wanted now."""
        path = self._paths.get(member.peer)
        return path is not None and path.member == member and path.accepts()

    def incoming_opened(self, incoming: Incoming) -> None:
        """Another peer's dial succeeded."""
        self._paths[incoming.peer].adopt(incoming)

    def incoming_ended(self, incoming: Incoming, reason: str) -> None:
        """A path over another peer's dial broke."""
        path = self._paths.get(incoming.peer)
        if path is not None:
            path.lose(incoming, reason)

    def incoming_packet(self, incoming: Incoming, packet: Opened) -> None:
        """A packet from a peer that dialled us."""
        path = self._paths.get(incoming.peer)
        if path is not None and path.line is incoming:
            self.received(path, packet)

    def listener_served(self) -> None:
        """Some peer that dialled us may have room again."""
        for path in list(self._congested):
            path.send_held()
            if path.held is None:
                self._congested.discard(path)

    # What a path tells

    def opened(self, path: DirectPath) -> None:
        """Packets can be sent."""
        self._events.path_opened(self, path.peer)

    def closed(self, path: DirectPath, reason: str) -> None:
        """Packets cannot be sent any more."""
        self._congested.discard(path)
        self._events.path_closed(self, path.peer, reason)

    def congested(self, path: DirectPath) -> None:
        """It has a packet for which there is no room now."""
        self._congested.add(path)

    def writable(self, path: DirectPath) -> None:
        """There is room again."""
        self._events.path_writable(self, path.peer)

    def flooded(self, path: DirectPath) -> None:
        """A peer sent bytes without end that form no message."""
        self._shut_out(path, "it sent bytes without end that form no packet")

    def received(self, path: DirectPath, packet: Opened) -> None:
        """What one message of a peer holds: a packet, a sign of life, or an offence."""
        path.heard_at = self._station.clock.monotonic()
        frame, payload = packet
        mark = frame[0] if frame else None
        if mark == DATA and len(frame) <= self._config.sockets.max_header_bytes + 1:
            self._station.counts["packets_received"] += 1
            self._station.counts["bytes_received"] += len(frame) - 1 + (len(payload) if payload is not None else 0)
            self._events.packet_arrived(self, path.peer, frame[1:], payload)
        elif mark == ASK and len(frame) == 1 and payload is None:
            path.signal(ANSWER_MARK)
        elif mark != ANSWER or len(frame) != 1 or payload is not None:
            self._station.counts["malformed"] += 1
            path.offences += 1
            if path.offences > self._config.max_offences:
                self._shut_out(path, f"it sent {path.offences} malformed packets")

    def _check_size(self, header_bytes: int, payload_bytes: int) -> None:
        settings = self._config.sockets
        if header_bytes > settings.max_header_bytes:
            raise ConfigurationError(f"a header of {header_bytes} bytes exceeds {settings.max_header_bytes}")
        if payload_bytes > settings.max_payload_bytes:
            raise ConfigurationError(
                f"a payload of {payload_bytes} bytes exceeds {settings.max_payload_bytes}: send it in smaller pieces"
            )

    def _check_floods(self) -> None:
        loop = asyncio.get_running_loop()
        self._check_timer = loop.call_later(self._config.check_seconds, self._check_floods)
        self._station.guard.check()
        for path in self._pulse.check([path for path in self._paths.values() if path.line is not None]):
            if path.line is not None:
                path.lose(path.line, f"silent for {self._config.sockets.silence_seconds:g} s")
