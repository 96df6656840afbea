"""One way of moving packets between two peers: the seam under every link.

A carrier is simple on purpose: it moves single packets, in order while a path lasts, and may lose what was in
flight when a path breaks. Everything a user relies on (no loss, no repeat, flow control, fragments, path changes)
is the channel's work, above. Implementations: direct/ (TCP), relay/ (through the hub), and the fake in
potluck.sim.memorycarrier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from potluck.hub.presence import Presence

Buffer = bytes | bytearray | memoryview


class CarrierEvents(Protocol):
    """What a carrier tells its owner, always on the event loop."""

    def packet_arrived(self, carrier: Carrier, peer: str, header: memoryview, payload: memoryview | None) -> None:
        """One packet from an authenticated peer; its bytes are hostile until decoded. The views stay valid."""
        ...

    def path_opened(self, carrier: Carrier, peer: str) -> None:
        """Packets can now be sent to this peer."""
        ...

    def path_closed(self, carrier: Carrier, peer: str, reason: str) -> None:
        """The path is gone; packets in flight may be lost."""
        ...

    def path_writable(self, carrier: Carrier, peer: str) -> None:
        """A path that was congested accepts packets again."""
        ...


class Carrier(Protocol):
    """Moves single packets to peers."""

    @property
    def kind(self) -> str:
        """How this way is called: direct, relay."""
        ...

    def update_peer(self, presence: Presence) -> None:
        """What the roster says about a peer: dial it, keep it, or (dead, left, another session) drop its path."""
        ...

    def send(self, peer: str, header: bytes, payload: Buffer | None) -> bool:
        """Hand over one packet without blocking or copying the payload, which stays unchanged until acknowledged.

        False: no path, or congested; `path_opened` or `path_writable` follows when it is worth trying again.
        """
        ...

    def statistics(self) -> Mapping[str, int | float]:
        """Counters: packets and bytes each way, refused, dropped, paths open."""
        ...

    async def close(self) -> None:
        """Release sockets, tasks and threads. Idempotent."""
        ...
