"""The direct carrier: every direct path of this process, over ZeroMQ."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import zmq

from potluck.clock import Clock, SystemClock
from potluck.errors import ConfigurationError
from potluck.hub.presence import Presence
from potluck.link.carrier import Buffer, CarrierEvents
from potluck.link.direct.addresses import Endpoint, Interface, dial_order, local_interfaces
from potluck.link.direct.admission import Admission, Member
from potluck.link.direct.flood import FloodGuard, FloodLimits, warn_if_missing
from potluck.link.direct.greeting import DATA, DATA_MARK, LinkKeys
from potluck.link.direct.listening import Incoming, Listener
from potluck.link.direct.loopsocket import Outgoing, Parts
from potluck.link.direct.path import DirectPath, PathConfig, Station
from potluck.link.direct.pulse import ANSWER, ANSWER_MARK, ASK, Pulse
from potluck.link.direct.sockets import SocketSettings, make_context, terminate
from potluck.messages import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

# ZeroMQ reads small parts into one buffer of 8 KiB that lives until the last of them is gone: whoever keeps one keeps
# all. So parts of up to that size are copied out; larger ones have memory of their own.
SHARED_BUFFER_BYTES = 8192
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
        session: str,
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
        plain = config.sockets.trusted_lan
        self._admission = Admission(clock, plain=plain)
        limits = FloodLimits(held_bytes=config.sockets.held_bytes, ungreeted_seconds=config.sockets.handshake_seconds)
        self._station = Station(
            peer=peer,
            session=session,
            listens=bool(config.listen),
            config=config.paths,
            settings=config.sockets,
            keys=LinkKeys.generate(),
            context=make_context(config.sockets),
            guard=FloodGuard(limits, clock, encrypted=not plain),
            clock=clock,
            counts=Counter(),
        )
        self._pulse: Pulse[DirectPath] = Pulse(config.sockets, clock)
        self._paths: dict[str, DirectPath] = {}
        self._presences: dict[str, Presence] = {}
        self._congested: set[DirectPath] = set()  # those that hold a packet for a connection on the listening socket
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
            listener = Listener(self, station.context, station.settings, station.keys, station.guard, self._admission)
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
        parts = self._packet(header, payload)
        if not path.send(parts):
            return False
        if path.held is not None:
            self._congested.add(path)
        self._station.counts["packets_sent"] += 1
        self._station.counts["bytes_sent"] += len(header) + (len(parts[1]) if len(parts) == 2 else 0)
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

    def incoming_message(self, incoming: Incoming, parts: Parts, surplus_parts: int) -> None:
        """A message from a peer that dialled us."""
        path = self._paths.get(incoming.peer)
        if path is not None and path.line is incoming:
            self.received(path, parts, surplus_parts)

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

    def writable(self, path: DirectPath) -> None:
        """There is room again."""
        self._events.path_writable(self, path.peer)

    def flooded(self, path: DirectPath) -> None:
        """A peer sent bytes without end that form no message."""
        self._shut_out(path, "it sent bytes without end that form no packet")

    def received(self, path: DirectPath, parts: Parts, surplus_parts: int) -> None:
        """One message from a peer: a packet, a sign of life, or an offence."""
        path.heard_at = self._station.clock.monotonic()
        frame = parts[0].buffer if parts else memoryview(b"")
        if len(parts) == 1 and len(frame) == 1 and frame[0] in (ASK, ANSWER):
            if frame[0] == ASK:
                path.signal(ANSWER_MARK)
            return
        if surplus_parts or not 1 <= len(frame) <= self._config.sockets.max_header_bytes + 1 or frame[0] != DATA:
            self._station.counts["malformed"] += 1
            path.offences += 1
            if path.offences > self._config.max_offences:
                self._shut_out(path, f"it sent {path.offences} malformed packets")
            return
        payload = _unpinned(parts[1]) if len(parts) == 2 else None
        self._station.counts["packets_received"] += 1
        self._station.counts["bytes_received"] += len(frame) - 1 + (len(payload) if payload is not None else 0)
        self._events.packet_arrived(self, path.peer, _unpinned(parts[0])[1:], payload)

    def _packet(self, header: bytes, payload: Buffer | None) -> list[Outgoing]:
        settings = self._config.sockets
        if len(header) > settings.max_header_bytes:
            raise ConfigurationError(f"a header of {len(header)} bytes exceeds {settings.max_header_bytes}")
        if payload is None:
            return [DATA_MARK + header]
        # A view of bytes; it also keeps a bytearray from being resized while ZeroMQ reads it.
        view = memoryview(payload).cast("B")
        if len(view) > settings.max_payload_bytes:
            raise ConfigurationError(
                f"a payload of {len(view)} bytes exceeds {settings.max_payload_bytes}: send it in smaller pieces"
            )
        return [DATA_MARK + header, view]

    def _check_floods(self) -> None:
        loop = asyncio.get_running_loop()
        self._check_timer = loop.call_later(self._config.check_seconds, self._check_floods)
        self._station.guard.check()
        for path in self._pulse.check([path for path in self._paths.values() if path.line is not None]):
            if path.line is not None:
                path.lose(path.line, f"silent for {self._config.sockets.silence_seconds:g} s")


def _unpinned(part: zmq.Frame) -> memoryview:
    """The bytes of a part, such that keeping them keeps nothing else alive."""
    return memoryview(part.bytes) if len(part) <= SHARED_BUFFER_BYTES else part.buffer
