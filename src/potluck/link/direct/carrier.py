"""The direct carrier: every direct path of this process, over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from potluck.clock import Clock, SystemClock
from potluck.errors import ConfigurationError
from potluck.hub.presence import Presence
from potluck.link.carrier import Buffer, CarrierEvents
from potluck.link.direct.addresses import Endpoint, Interface, dial_order, local_interfaces
from potluck.link.direct.admission import Admission, KnownPeer
from potluck.link.direct.connection import Connection, Shared
from potluck.link.direct.greeting import LinkKeys
from potluck.link.direct.listening import Listener
from potluck.link.direct.noise import TAG_BYTES
from potluck.link.direct.path import DirectPath, PathConfig, Station
from potluck.link.direct.pulse import ANSWER, ANSWER_MARK, ASK, DATA, DATA_MARK, Pulse
from potluck.link.direct.sealing import Slabs
from potluck.link.direct.sockets import SocketSettings, warm_up_memory
from potluck.messages import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

SLAB_BYTES = 512 * 1024 + TAG_BYTES  # for the largest packets that links send
MOST_SLABS_KEPT = 36  # some more than one path's queue holds, and as many for what arrives
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
    """How often connections are looked at: who is silent, who does not greet."""

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
        self._shared = Shared(
            settings=config.sockets,
            slabs=Slabs(slab_bytes=SLAB_BYTES, most_kept=MOST_SLABS_KEPT),
            clock=clock,
        )
        self._counts = self._shared.counts
        self._station = Station(
            peer=peer, listens=bool(config.listen), config=config.paths, keys=keys, shared=self._shared
        )
        self._pulse: Pulse[Connection] = Pulse(config.sockets, clock)
        self._paths: dict[str, DirectPath] = {}
        self._presences: dict[str, Presence] = {}
        self._listener: Listener | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def keys(self) -> LinkKeys:
        """The keys of this session, which prove it on relayed paths too."""
        return self._station.keys

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
        warm_up_memory()
        if self._config.listen:
            listener = Listener(self, self._shared, self._admission)
            listener.listen(self._config.listen)
            self._listener = listener
        self._look_around()

    def invite_probe(self, *, seconds: float) -> LinkKeys:
        """Keys with which somebody may try, for a while, whether this peer can be reached, and do nothing else."""
        keys = LinkKeys.generate()
        self._admission.invite_probe(keys.link_key, seconds=seconds)
        return keys

    # What the owner asks

    def update_peer(self, presence: Presence) -> None:
        """What the roster says about a peer: dial it, keep it, or drop its path."""
        if self._closed:
            return
        if presence.peer == self._station.peer:
            self._learn_own_host(presence.host)
            return
        card = presence.card
        member = KnownPeer(peer=presence.peer, session=card.session, key=card.link_key)
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
        # A view of bytes; it also keeps a bytearray from being resized while it waits to be sent.
        view = memoryview(payload).cast("B") if payload is not None else None
        payload_bytes = len(view) if view is not None else 0
        self._check_size(len(header), payload_bytes)
        if path.line is None:
            path.want()
            return False
        if not path.line.send(DATA_MARK + header, view):
            return False
        self._counts["packets_sent"] += 1
        self._counts["bytes_sent"] += len(header) + payload_bytes
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
        """Counters: packets and bytes each way, refusals by reason, connections cut by reason, paths open.

        And what the line carries, by which paths that are busy at the same time are paced; 0: they are not.
        """
        counts: Counter[str] = Counter(dict.fromkeys(ALWAYS_COUNTED, 0))
        counts.update(self._counts)
        counts.update(self._admission.counts)
        counts["line_bytes_per_second"] = round(self._shared.pacer.bytes_per_second or 0)
        counts["connections"] = len(self._shared.connections)
        counts["paths"] = sum(path.line is not None for path in self._paths.values())
        return counts

    async def close(self) -> None:
        """Hang up everywhere; what was sent may leave for a moment, and nothing is told any more."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None:
            self._listener.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.linger_seconds):
                for connection in list(self._shared.connections):
                    await connection.drained()
        for path in self._paths.values():
            path.stop("closed")
        for connection in list(self._shared.connections):
            connection.close()
        self._paths.clear()
        self._presences.clear()

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
        self._counts["shut_out"] += 1
        self._admission.ban(path.peer)
        self._drop(path.peer, reason)

    # What the listener tells

    def accepts(self, member: KnownPeer) -> bool:
        """Whether a connection of this member is wanted now."""
        path = self._paths.get(member.peer)
        return path is not None and path.member == member and path.accepts()

    def owner_of(self, member: KnownPeer) -> DirectPath:
        """The path that a connection of this member is for."""
        return self._paths[member.peer]

    def incoming_opened(self, member: KnownPeer, connection: Connection) -> None:
        """Another peer's dial succeeded."""
        self._paths[member.peer].adopt(connection)

    # What a path tells

    def opened(self, path: DirectPath) -> None:
        """Packets can be sent."""
        if not self._closed:
            self._events.path_opened(self, path.peer)

    def closed(self, path: DirectPath, reason: str) -> None:
        """Packets cannot be sent any more."""
        if not self._closed:
            self._events.path_closed(self, path.peer, reason)

    def writable(self, path: DirectPath) -> None:
        """There is room again."""
        if not self._closed:
            self._events.path_writable(self, path.peer)

    def received(self, path: DirectPath, frame: memoryview, payload: memoryview | None) -> None:
        """What one packet of a peer holds: a packet of links, a sign of life, or an offence."""
        if self._closed:
            return
        mark = frame[0] if frame else None
        if mark == DATA:
            self._counts["packets_received"] += 1
            self._counts["bytes_received"] += len(frame) - 1 + (len(payload) if payload is not None else 0)
            self._events.packet_arrived(self, path.peer, frame[1:], payload)
        elif mark == ASK and len(frame) == 1 and payload is None:
            path.signal(ANSWER_MARK)
        elif mark != ANSWER or len(frame) != 1 or payload is not None:
            self._counts["malformed"] += 1
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

    def _look_around(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._config.check_seconds, self._look_around)
        if self._listener is not None:
            self._listener.check()
        self._shared.pacer.look(self._station.clock.monotonic())
        lines = [path.line for path in self._paths.values() if path.line is not None]
        for line in self._pulse.check(lines):
            line.end(f"silent for {self._config.sockets.silence_seconds:g} s")
