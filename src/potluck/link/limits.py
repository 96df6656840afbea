"""How much of everything a link may use: one frozen configuration, and the constants both ends must agree on.

A limit that only protects this process is a field of LinkConfig. A number that the other end counts on without having
been told (how much it may send before the first credit arrives) is a constant of the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass

from potluck.errors import ConfigurationError
from potluck.link.throttle import throttle_of

KIB = 1024
MIB = 1024 * KIB

INITIAL_CREDIT_BYTES = 1 * MIB  # what a sender may send before its receiver has said anything; fits any single packet
BULK_RESERVE_BYTES = 128 * KIB  # credit that bulk leaves alone, so that a small message is never stuck behind it
STREAM_ITEM_BYTES = 4 * MIB  # the largest item of a stream, and the credit that a stream starts with


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """What links may use and how patient they are. The defaults suit a laptop and a server alike."""

    preference: tuple[str, ...] = ("direct", "relay")
    """Kinds of carriers, the best first; kinds that are not named come last."""

    max_frame_bytes: int = 64 * MIB
    """The largest single frame that is sent or accepted."""

    max_frames: int = 1024
    """The most frames in one message."""

    max_message_bytes: int = 64 * MIB
    """The largest message, body and frames together."""

    queue_bytes: int = 64 * MIB
    """What may wait for one peer, unacknowledged; a sender beyond it waits for room."""

    window_bytes: int = 32 * MIB
    """What one peer may have arrived and not yet handled here; less when many peers share `receive_bytes`."""

    receive_bytes: int = 512 * MIB
    """What all peers together may have arrived here: half for windows, half for large messages and streams."""

    max_in_flight_bytes: int = 32 * MIB
    """The most that is ever on its way to one peer, however fast the path seems."""

    max_handlers: int = 64
    """Asynchronous handlers at work for one peer; further messages wait, in order, on the peer's credit."""

    max_streams: int = 64
    """Streams open with one peer, both ways together."""

    stream_window_bytes: int = 8 * MIB
    """What one stream may have arrived and not yet been read here."""

    stream_idle_seconds: float = 60.0
    """How long `async for` on a stream waits for the next item."""

    held_bytes: int = 4 * MIB
    """Packets of sessions that the roster does not know yet, all peers together."""

    held_seconds: float = 5.0
    """How long such packets are kept."""

    stalled_seconds: float = 30.0
    """A large message of which nothing arrives for so long, though there was credit, costs the peer its channel."""

    silent_seconds: float = 2.0
    """A path on which data is in flight and nothing is acknowledged for so long is considered broken."""

    settle_seconds: float = 0.5
    """How long a path that has failed once must stay open before it is preferred again; doubles per failure."""

    send_bytes_per_second: float | None = None
    """The most that leaves to all peers together; None: whatever the line takes."""

    receive_bytes_per_second: float | None = None
    """The most that all peers together may send here, beyond what each may send unasked; None: no cap."""

    stream_share: float = 1 / 3
    """What streams get of the bytes that leave while a round has bulk to send, on all links together. A newcomer hears
    the rounds while it loads: with a third, and Adam, it has the state within a dozen rounds
    (optim/epochlistener.py)."""

    tick_seconds: float = 0.005
    """How often waiting acknowledgements and timeouts are looked at while there are any."""

    def __post_init__(self) -> None:
        """Refuse what could not work."""
        for name in ("max_frame_bytes", "max_frames", "max_message_bytes", "max_handlers", "max_streams"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("held_seconds", "stalled_seconds", "silent_seconds", "tick_seconds", "stream_idle_seconds"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "more than 0")
        for bytes_per_second in (self.send_bytes_per_second, self.receive_bytes_per_second):
            throttle_of(bytes_per_second)
        _require(self.settle_seconds >= 0, "settle_seconds", self.settle_seconds, "0 or more")
        _require(0 < self.stream_share < 1, "stream_share", self.stream_share, "more than 0 and less than 1")
        _require(self.held_bytes >= 0, "held_bytes", self.held_bytes, "0 or more")
        _require(self.max_frames <= 1024, "max_frames", self.max_frames, "at most 1024, to fit one packet's header")
        _require(
            self.queue_bytes >= self.max_message_bytes,
            "queue_bytes",
            self.queue_bytes,
            f"at least max_message_bytes ({self.max_message_bytes}), or the largest message could never be queued",
        )
        _require(
            self.window_bytes >= INITIAL_CREDIT_BYTES, "window_bytes", self.window_bytes, "at least the initial credit"
        )
        _require(
            self.stream_window_bytes >= STREAM_ITEM_BYTES,
            "stream_window_bytes",
            self.stream_window_bytes,
            f"at least {STREAM_ITEM_BYTES}, the largest item of a stream",
        )
        needed = 2 * max(self.window_bytes, self.stream_window_bytes, self.max_message_bytes * 9 // 8)
        _require(self.receive_bytes >= needed, "receive_bytes", self.receive_bytes, f"at least {needed} with these")
        _require(
            self.max_in_flight_bytes >= INITIAL_CREDIT_BYTES,
            "max_in_flight_bytes",
            self.max_in_flight_bytes,
            "at least one packet",
        )


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise ConfigurationError(f"LinkConfig.{name} is {value}: set it to {remedy}")
