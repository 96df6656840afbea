"""One reliable channel between one life of this peer and one life of another (pure).

Above carriers that lose what is in flight when a path breaks, a channel delivers every message once and in order, or
its sender is told that it could not. It is an outbox and an inbox that share headers: every packet that leaves carries
the acknowledgement and the credit for the other direction.

Which channel a packet belongs to is told by three numbers: the tags of both sessions and a generation. When one side
has to give up a channel (the roster said that the peer had died, and it had not; something undecodable came in order)
it goes on in the next generation, and the other follows as soon as it sees the higher number. Both thereby agree, in
whatever order they learn of it, and packets of older generations are recognised and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from potluck.link.carrier import Buffer
from potluck.link.channel.budget import Ledger, ReceiveBudget
from potluck.link.channel.congestion import CongestionWindow
from potluck.link.channel.inbox import AT_ONCE, Inbox, ReceivedMessage
from potluck.link.channel.outbox import LOADED_BYTES, AdmitsStreams, Outbox, Segment, where_no_bulk_waits
from potluck.link.channel.packet import ACK_NOW, GAP, LOADED, MAX_REASON_BYTES, Kind, Packet, Urgency, encode_header
from potluck.link.channel.sendreceipt import SendReceipt
from potluck.link.counters import Counters
from potluck.link.limits import LinkConfig

FIRST_CREDIT_PROBE_SECONDS = 0.5
LARGEST_CREDIT_PROBE_SECONDS = 5.0

Send = Callable[[bytes, Buffer | None, Urgency], bool]


class Channel:
    """Messages in, packets out; packets in, messages out. Time is what the caller says it is."""

    def __init__(
        self,
        *,
        local_tag: int,
        remote_tag: int,
        generation: int,
        config: LinkConfig,
        budget: ReceiveBudget,
        ledger: Ledger,
        counters: Counters,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`wake` is called when `pump` should be, because the application has taken a message."""
        self.local_tag = local_tag
        self.remote_tag = remote_tag
        self.generation = generation
        self.outbox = Outbox(counters)
        self.inbox = Inbox(config, budget, ledger, counters, wake)
        self._reset_reason: bytes | None = None
        self._hurried = False
        self._since_ack_request_bytes = 0
        self._credit_probe_at: float | None = None
        self._credit_probe_seconds = FIRST_CREDIT_PROBE_SECONDS

    @property
    def is_untouched(self) -> bool:
        """Whether no packet of a message has left or come, so that it may still change its generation."""
        return self.outbox.is_untouched and self.inbox.expected == 0 and not self.inbox.has_gap

    def send(self, body: bytes, frames: Sequence[memoryview] = (), *, urgency: Urgency = Urgency.FIRST) -> SendReceipt:
        """Queue a message. The frames must stay unchanged until the receipt is settled."""
        return self.outbox.add(body, frames, urgency)

    def receive(self, packet: Packet, pace: CongestionWindow, deliveries: list[ReceivedMessage], now: float) -> int:
        """Take in a packet of this channel, append the messages that are complete; bytes of ours it acknowledges.

        ProtocolError: drop the packet. ChannelBrokenError: give up the channel; what was appended is right.
        """
        acked_bytes = self.outbox.acknowledge(packet.ack, bool(packet.flags & GAP), packet.ack_age_seconds, pace, now)
        if self.outbox.grant(packet.credit):
            self._credit_probe_at = None
            self._credit_probe_seconds = FIRST_CREDIT_PROBE_SECONDS
        if packet.kind <= Kind.FRAGMENT:
            self.inbox.receive(packet, deliveries, now)
        return acked_bytes

    def pump(
        self, pace: CongestionWindow, now: float, send: Send, *, admits_streams: AdmitsStreams = where_no_bulk_waits
    ) -> bool:
        """Send all that may leave now. False: `send` refused one, which stays the next.

        `admits_streams` is asked for each packet that streams could have.
        """
        outbox, inbox = self.outbox, self.inbox
        if self._reset_reason is not None:
            if not send(self.header(Kind.RESET, now=now, inline=self._reset_reason), None, Urgency.FIRST):
                return False
            self._reset_reason = None
        outbox.check_timeout(pace, now)
        while (segment := outbox.next_segment(pace, now, admits_streams)) is not None:
            flags = segment.flags | self._flags(segment, pace)
            header = self.header(segment.kind, flags, segment.sequence, segment.inline, len(segment.payload), now=now)
            if not send(header, segment.payload or None, segment.urgency):
                self.acknowledge(now, send)  # it is small, and may be taken where data is not
                return False
            outbox.sent(segment, pace, now)
            inbox.ack_due_at = None
        return self._send_probe(now, send) and self.acknowledge(now, send)

    def acknowledge(self, now: float, send: Send) -> bool:
        """Send an acknowledgement by itself, if one is due. False: `send` refused it."""
        inbox = self.inbox
        if inbox.ack_due_at is None or inbox.ack_due_at > now:
            return True
        if not send(self.header(Kind.ACK, now=now), None, Urgency.FIRST):
            return False
        inbox.ack_due_at = None
        return True

    def header(
        self,
        kind: int,
        flags: int = 0,
        sequence: int = 0,
        inline: bytes = b"",
        payload_bytes: int = 0,
        *,
        now: float,
    ) -> bytes:
        """A header that says all that the peer should know now."""
        inbox = self.inbox
        return encode_header(
            kind,
            flags | GAP if inbox.has_gap else flags,
            self.generation,
            self.local_tag,
            self.remote_tag,
            sequence,
            inbox.expected,
            inbox.credit_bytes(now),
            inbox.ack_age_seconds(now),
            inline,
            payload_bytes,
        )

    def _flags(self, segment: Segment, pace: CongestionWindow) -> int:
        # Four acknowledgements per window are enough; one is needed before the window is full, or it would stand still.
        outbox = self.outbox
        self._since_ack_request_bytes += segment.charge_bytes
        flags = LOADED if outbox.unsent_bytes >= LOADED_BYTES else 0
        full = outbox.in_flight_bytes + segment.charge_bytes + pace.fragment_bytes > pace.window_bytes
        if full or segment.num_sent or self._since_ack_request_bytes * 4 >= pace.window_bytes:
            self._since_ack_request_bytes = 0
            flags |= ACK_NOW
        return flags

    def _send_probe(self, now: float, send: Send) -> bool:
        # The packet that brought the credit may have been lost, and nothing else would make the peer say it again.
        if not self.outbox.wants_credit:
            self._credit_probe_at = None
        elif self._credit_probe_at is None:
            self._credit_probe_at = now + self._credit_probe_seconds
        due = self._credit_probe_at is not None and self._credit_probe_at <= now
        if not due and not self._hurried:
            return True
        if not send(self.header(Kind.PROBE, now=now), None, Urgency.FIRST):
            return False
        self._hurried = False
        self.inbox.ack_due_at = None
        if due:
            self._credit_probe_seconds = min(self._credit_probe_seconds * 2, LARGEST_CREDIT_PROBE_SECONDS)
            self._credit_probe_at = now + self._credit_probe_seconds
        return True

    def hurry(self) -> None:
        """Somebody waits for the acknowledgements: ask for them."""
        if not self.outbox.is_empty:
            self._hurried = True

    def announce_reset(self, reason: str) -> None:
        """Tell the peer why this generation has begun."""
        self._reset_reason = reason.encode()[:MAX_REASON_BYTES]

    def path_changed(self, now: float) -> None:
        """Another path is used from now on, or the same one anew."""
        self.outbox.path_changed(now)
        self.inbox.ack_due_at = AT_ONCE
        if self._credit_probe_at is not None:
            self._credit_probe_at = now

    def tick(self, now: float) -> None:
        """Time has passed. ChannelBrokenError when the peer has left a large message unfinished for too long."""
        self.inbox.tick(now)

    def next_at(self, pace: CongestionWindow) -> float | None:
        """When `tick` and `pump` have something to do though nothing happens; None: never."""
        due = (self.inbox.ack_due_at, self.inbox.tick_at(), self.outbox.timeout_at(pace), self._credit_probe_at)
        return min((at for at in due if at is not None), default=None)

    def fail(self, error: Exception) -> int:
        """The channel is given up: settle all receipts, return memory; how many messages were lost."""
        self.inbox.close()
        return self.outbox.fail(error)
