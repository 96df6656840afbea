"""What links count, per peer and in all."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Counters:
    """Grow only, through all channels and lives of a peer."""

    messages_sent: int = 0
    messages_received: int = 0
    messages_lost: int = 0  # failed: the sender was told that they may not have arrived
    bytes_sent: int = 0  # payload and headers, repeats included
    bytes_received: int = 0
    packets_sent: int = 0
    packets_received: int = 0
    packets_resent: int = 0
    duplicates: int = 0  # packets that had arrived before
    stale: int = 0  # packets of another life or generation
    malformed: int = 0  # packets and messages that do not decode
    refused: int = 0  # beyond a limit: size, credit, number of streams
    unknown_kinds: int = 0  # messages that nobody here handles
    handler_errors: int = 0
    path_changes: int = 0
    resets: int = 0  # channels given up while the peer lived

    def add(self, other: Counters) -> None:
        """Count the other's along."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatistics:
    """One peer's link, as it is now."""

    path: str | None  # the kind of carrier in use; None: no path
    queue_bytes: int
    in_flight_bytes: int
    window_bytes: int
    rtt_seconds: float | None
    upload_bytes_per_second: float | None
    download_bytes_per_second: float | None
    counters: Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatistics:
    """All links of this process."""

    total: Counters  # peers that are gone included
    upload_bytes_per_second: float | None
    download_bytes_per_second: float | None
    reserved_bytes: int  # memory for large messages and streams
    peers: dict[str, PeerStatistics] = field(default_factory=dict)
