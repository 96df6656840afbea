"""All peers that the roster and the carriers have spoken of (pure): whose packet is this, and is it of this life?"""

from __future__ import annotations

from potluck.clock import Clock
from potluck.errors import ConfigurationError, ProtocolError
from potluck.hub.presence import Presence
from potluck.link.carrier import Carrier
from potluck.link.channel.budget import ReceiveBudget
from potluck.link.channel.packet import decode, session_tag
from potluck.link.counters import Counters
from potluck.link.limits import LinkConfig
from potluck.link.line import SharedLine
from potluck.link.peerlink import LinkOwner, PeerLink
from potluck.link.speed import SpeedMeter
from potluck.link.throttle import throttle_of
from potluck.link.waitingroom import WaitingRoom

MAX_DEAD_LINKS = 1024  # how many peers that are gone are remembered, should they come back in the same session


class LinkTable:
    """The links of one life of this peer. It is told what carriers tell (CarrierEvents) and what the roster says."""

    def __init__(self, self_id: str, session: str, clock: Clock, config: LinkConfig, owner: LinkOwner) -> None:
        self.carriers: dict[str, Carrier] = {}
        self.links: dict[str, PeerLink] = {}
        self.budget = ReceiveBudget(config)
        self.upload, self.download = SpeedMeter(), SpeedMeter()
        self._self_id = self_id
        self._tag = session_tag(self_id, session)
        self._clock = clock
        self._config = config
        self._owner = owner
        self._waiting_room = WaitingRoom(config)
        self._line = SharedLine(throttle_of(config.send_bytes_per_second), stream_share=config.stream_share)
        self._others = Counters()  # of strangers, and of peers that are forgotten
        self._closed = False

    def add_carrier(self, carrier: Carrier) -> None:
        """Use this carrier too; it tells its events to this table or to the table's owner."""
        if carrier.kind in self.carriers:
            raise ConfigurationError(f"there is a carrier of kind {carrier.kind} already: give this one another kind")
        self.carriers[carrier.kind] = carrier

    def update_peer(self, presence: Presence) -> None:
        """What the roster says about a peer."""
        peer = presence.peer
        if self._closed:
            return
        if peer == self._self_id:
            pass  # carriers want to know how the hub sees this peer
        elif presence.state in ("alive", "suspect"):
            self._link(peer).begin(presence.card.session)
        elif peer in self.links:
            self.links[peer].end(f"peer {peer} is {presence.state} ({presence.reason or 'no reason given'})")
            self._forget_dead()
        for carrier in self.carriers.values():
            carrier.update_peer(presence)
        link = self.links.get(peer)
        if link is not None and link.is_alive:
            for carrier_kind, packet in self._waiting_room.take(peer, link.remote_tag, self._clock.monotonic()):
                link.receive(carrier_kind, packet)

    def _link(self, peer: str) -> PeerLink:
        link = self.links.get(peer)
        if link is None:
            link = self.links[peer] = PeerLink(
                peer,
                local_tag=self._tag,
                carriers=self.carriers,
                config=self._config,
                clock=self._clock,
                budget=self.budget,
                owner=self._owner,
                total_upload=self.upload,
                total_download=self.download,
                line=self._line,
            )
        return link

    def _forget_dead(self) -> None:
        dead = [link for link in self.links.values() if not link.is_alive and not link.ledger.held_bytes]
        for link in dead[: max(0, len(dead) - MAX_DEAD_LINKS)]:
            self._others.add(link.counters)
            del self.links[link.peer]

    def packet_arrived(self, carrier: Carrier, peer: str, header: memoryview, payload: memoryview | None) -> None:
        """One packet from an authenticated peer."""
        link = self.links.get(peer)
        counters = link.counters if link is not None else self._others
        try:
            packet = decode(header, payload)
        except ProtocolError:
            counters.malformed += 1
            return
        if packet.receiver_tag != self._tag or self._closed:
            counters.stale += 1
        elif link is None or link.remote_tag != packet.sender_tag:
            if not self._waiting_room.hold(peer, carrier.kind, packet, self._clock.monotonic()):
                counters.refused += 1
        else:
            link.receive(carrier.kind, packet)

    def path_opened(self, carrier: Carrier, peer: str) -> None:
        """Packets can now be sent to this peer."""
        if not self._closed:
            self._link(peer).path_opened(carrier.kind)

    def path_closed(self, carrier: Carrier, peer: str, reason: str) -> None:
        """The path is gone."""
        if (link := self.links.get(peer)) is not None:
            link.path_closed(carrier.kind)

    def path_writable(self, carrier: Carrier, peer: str) -> None:
        """A path that was congested accepts packets again."""
        if (link := self.links.get(peer)) is not None:
            link.path_writable(carrier.kind)

    def expire(self) -> None:
        """Drop packets that have waited too long for the roster."""
        self._waiting_room.expire(self._clock.monotonic())

    @property
    def waiting_bytes(self) -> int:
        """Packets that wait for the roster."""
        return self._waiting_room.held_bytes

    def counters(self) -> Counters:
        """Of all peers, those that are gone included."""
        total = Counters()
        total.add(self._others)
        for link in self.links.values():
            total.add(link.counters)
        return total

    def close(self, reason: str) -> None:
        """Give up all links."""
        self._closed = True
        for link in self.links.values():
            link.end(reason)
