"""Packets that came before the roster told of their sender (pure).

Peers learn from the roster of each other's sessions, one sooner than the other. A packet from a session that is not
known yet is kept for a little while; everything beyond the limits is dropped, and the sender will send it again.
"""

from __future__ import annotations

from collections import deque

from potluck.link.channel.packet import Packet
from potluck.link.limits import LinkConfig


class WaitingRoom:
    """A bounded number of packets, for a bounded time."""

    def __init__(self, config: LinkConfig) -> None:
        self._max_bytes = config.held_bytes
        self._max_seconds = config.held_seconds
        self._packets: deque[tuple[float, str, str, Packet]] = deque()
        self.held_bytes = 0

    def hold(self, peer: str, carrier_kind: str, packet: Packet, now: float) -> bool:
        """Keep the packet; False: no room."""
        self.expire(now)
        if self.held_bytes + packet.charge_bytes > self._max_bytes:
            return False
        self._packets.append((now, peer, carrier_kind, packet))
        self.held_bytes += packet.charge_bytes
        return True

    def take(self, peer: str, tag: int, now: float) -> list[tuple[str, Packet]]:
        """The packets of that session, in the order they came, with the kind of carrier each came by."""
        self.expire(now)
        taken, left = [], deque[tuple[float, str, str, Packet]]()
        for entry in self._packets:
            _, sender, carrier_kind, packet = entry
            if sender == peer and packet.sender_tag == tag:
                taken.append((carrier_kind, packet))
                self.held_bytes -= packet.charge_bytes
            else:
                left.append(entry)
        self._packets = left
        return taken

    def expire(self, now: float) -> None:
        """Drop what has waited too long."""
        while self._packets and now - self._packets[0][0] > self._max_seconds:
            self.held_bytes -= self._packets.popleft()[3].charge_bytes
