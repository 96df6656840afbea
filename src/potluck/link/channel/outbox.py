"""The sending half of a channel (pure): messages become packets, packets stay until they are acknowledged.

Messages of three urgencies share one sequence of packets. The more urgent go first, packet by packet, so that a small
message does not wait behind a large one; within an urgency the order of sending is kept. What has not begun to leave
can be withdrawn: on a slow line it would only delay what replaces it.

What was cut into packets waits in `_to_send`, in the order of sequence numbers; what has left waits in `_unacked`, of
which `_to_send` is a part. So a packet that is to be sent again and one that the carrier refused are one case.

When is a packet lost? A carrier keeps the order and loses nothing while its path lasts, so there are three signs:
the path has changed (all that is unacknowledged goes again), packets beyond it have arrived (it alone goes again), or
nothing was acknowledged for a timeout. After a timeout only the oldest packet goes again. If its acknowledgement comes
so quickly that it must belong to the first sending, the timeout was a false alarm; else everything that left before is
taken for lost. The receiver keeps what came early, so one packet that fills the hole may acknowledge many.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from potluck.errors import ProtocolError
from potluck.link.channel.congestion import LARGEST_TIMEOUT_SECONDS, LEAST_FRAGMENT_BYTES, CongestionWindow, Stamp
from potluck.link.channel.packet import (
    PACKET_BYTES,
    PACKET_OVERHEAD_BYTES,
    Kind,
    Urgency,
    encode_manifest,
    urgency_flag,
)
from potluck.link.channel.sendreceipt import SendReceipt
from potluck.link.counters import Counters
from potluck.link.limits import BULK_RESERVE_BYTES, INITIAL_CREDIT_BYTES, KIB

LOADED_BYTES = 32 * KIB  # with more than this on its way, a path's speed shows
LARGE_MESSAGE_BYTES = 16 * KIB
MESSAGE_OVERHEAD_BYTES = 1024  # what a queued message costs beside its bytes
MAX_UNACKED_PACKETS = 2048
_EMPTY = memoryview(b"")


AdmitsStreams = Callable[[bool], bool]
"""Whether the next packet may be a stream's, where bulk waits on the same link, or none does."""


def where_no_bulk_waits(has_bulk: bool) -> bool:
    """Streams have what bulk leaves, and nothing beside it."""
    return not has_bulk


class Segment:
    """One packet of ours: what does not change between two sendings of it."""

    __slots__ = (
        "acked",
        "charge_bytes",
        "flags",
        "in_flight",
        "inline",
        "kind",
        "last_of",
        "num_sent",
        "payload",
        "sequence",
        "stamp",
        "urgency",
        "waits",
    )

    def __init__(self, sequence: int, message: QueuedMessage, inline: bytes, payload: memoryview) -> None:
        self.sequence = sequence
        self.kind = Kind.MESSAGE if inline else Kind.FRAGMENT
        self.urgency = message.urgency
        self.flags = urgency_flag(message.urgency)
        self.inline = inline
        self.payload = payload
        self.charge_bytes = len(inline) + len(payload) + PACKET_OVERHEAD_BYTES
        self.last_of: QueuedMessage | None = None  # the message that is complete with this packet
        self.stamp: Stamp | None = None
        self.num_sent = 0
        self.waits = False  # is in _to_send
        self.in_flight = False
        self.acked = False


class QueuedMessage:
    """A message that is not yet acknowledged, and how far it has been cut."""

    __slots__ = ("frames", "has_begun", "inline", "is_large", "offset", "receipt", "size_bytes", "urgency")

    def __init__(self, body: bytes, frames: Sequence[memoryview], urgency: Urgency, receipt: SendReceipt) -> None:
        self.inline, self.frames = encode_manifest(body, frames)
        self.frames.reverse()  # so that the next one is popped off the end
        self.offset = 0
        self.urgency = urgency
        self.has_begun = False
        self.receipt = receipt
        self.size_bytes = message_bytes(body, frames)
        self.is_large = self.size_bytes >= LARGE_MESSAGE_BYTES

    def next_payload_bytes(self, fragment_bytes: int) -> int:
        """How much of the current frame the next packet should take."""
        if not self.frames:
            return 0
        left = len(self.frames[-1]) - self.offset
        # A tail that is hardly worth a packet goes along.
        return left if left <= min(fragment_bytes * 5 // 4, PACKET_BYTES) else fragment_bytes

    def cut(self, payload_bytes: int) -> tuple[bytes, memoryview]:
        """The next packet's inline part and payload."""
        inline, self.inline = self.inline, b""
        if not payload_bytes:
            return inline, _EMPTY
        frame = self.frames[-1]
        payload = frame[self.offset : self.offset + payload_bytes]
        self.offset += payload_bytes
        if self.offset == len(frame):
            self.frames.pop()
            self.offset = 0
        return inline, payload


def message_bytes(body: bytes, frames: Sequence[memoryview]) -> int:
    """What a message costs in the queue."""
    return MESSAGE_OVERHEAD_BYTES + len(body) + sum(map(len, frames))


class Outbox:
    """All that is queued for, or on its way to, one peer."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._lanes: tuple[deque[QueuedMessage], ...] = tuple(deque() for _ in Urgency)
        self._queued_bytes_by_urgency = [0 for _ in Urgency]
        self._unacked: deque[Segment] = deque()
        self._to_send: deque[Segment] = deque()
        self._next_sequence = 0
        self._end_of_sent = 0  # one more than the highest sequence number that has left
        self._credit_bytes = INITIAL_CREDIT_BYTES
        self._used_bytes = 0
        self._doubtful = False  # a timeout has passed and it is not clear yet what it meant
        self._num_timeouts = 0
        self._waiting_since = 0.0
        self._unanswered_since = 0.0
        self.delivered_at = [-math.inf for _ in Urgency]  # when something was acknowledged last
        self.in_flight_bytes = 0
        self.queued_bytes = 0  # messages that are not yet acknowledged as a whole
        self.unsent_bytes = 0  # what of large messages has not been cut into packets, roughly

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has ever left."""
        return self._end_of_sent == 0

    @property
    def is_empty(self) -> bool:
        """Whether everything is acknowledged."""
        return not self._unacked and not any(self._lanes)

    @property
    def is_loaded(self) -> bool:
        """Whether so much is to arrive, in packets so large, that the time until it does shows the path's speed.

        Many small messages are limited by the processors of both ends, and say nothing about the path.
        """
        if not self.in_flight_bytes:
            return False
        in_large_packets = self.in_flight_bytes >= LEAST_FRAGMENT_BYTES // 2 * len(self._unacked)
        return self.unsent_bytes > 0 or (in_large_packets and self.in_flight_bytes >= LOADED_BYTES)

    @property
    def wants_credit(self) -> bool:
        """Whether there is something to send, nothing in flight, and only credit is missing."""
        if self.in_flight_bytes or self._to_send:
            return False
        return any(self._lanes)

    @property
    def has_bulk(self) -> bool:
        """Whether bulk waits, or is on its way."""
        return self._queued_bytes_by_urgency[Urgency.BULK] > 0

    def add(self, body: bytes, frames: Sequence[memoryview], urgency: Urgency) -> SendReceipt:
        """Queue a message."""
        message = QueuedMessage(body, frames, urgency, SendReceipt())
        message.receipt.withdraw = lambda error: self._withdraw(message, error)
        self._lanes[urgency].append(message)
        self._count(message, 1)
        if message.is_large:
            self.unsent_bytes += message.size_bytes
        return message.receipt

    def _count(self, message: QueuedMessage, sign: int) -> None:
        self.queued_bytes += sign * message.size_bytes
        self._queued_bytes_by_urgency[message.urgency] += sign * message.size_bytes

    def _withdraw(self, message: QueuedMessage, error: Exception) -> bool:
        if message.has_begun or message.receipt.settled:
            return False
        self._lanes[message.urgency].remove(message)
        self._count(message, -1)
        if message.is_large:
            self.unsent_bytes = max(0, self.unsent_bytes - message.size_bytes)
        message.receipt.settle(error)
        return True

    def next_segment(
        self, pace: CongestionWindow, now: float, admits_streams: AdmitsStreams = where_no_bulk_waits
    ) -> Segment | None:
        """The packet that should leave now, if any; it stays the next one until `sent`.

        `admits_streams` is asked where it could be a stream's.
        """
        while self._to_send and self._to_send[0].acked:
            self._to_send.popleft()
        if not self._to_send:
            if not self._unacked:
                self._unanswered_since = now
            if not self._cut(pace, admits_streams):
                return None
        segment = self._to_send[0]
        if self._fits(segment.charge_bytes, pace) or (segment.num_sent and segment is self._unacked[0]):
            return segment  # the oldest packet goes again even if the window is full: all behind it wait for it
        return None

    def _fits(self, charge_bytes: int, pace: CongestionWindow) -> bool:
        return not self.in_flight_bytes or self.in_flight_bytes + charge_bytes <= pace.window_bytes

    def _next_lane(self, admits_streams: AdmitsStreams) -> deque[QueuedMessage] | None:
        first, bulk, streams = self._lanes
        if not first and streams and admits_streams(bool(bulk)):
            return streams
        return first or bulk or None

    def _cut(self, pace: CongestionWindow, admits_streams: AdmitsStreams) -> bool:
        lane = self._next_lane(admits_streams)
        if not lane or len(self._unacked) >= MAX_UNACKED_PACKETS:
            pace.ran_dry(self.in_flight_bytes)
            return False
        message = lane[0]
        payload_bytes = message.next_payload_bytes(pace.fragment_bytes)
        charge = len(message.inline) + payload_bytes + PACKET_OVERHEAD_BYTES
        if not self._fits(charge, pace):
            return False
        reserve = BULK_RESERVE_BYTES if message.urgency else 0
        if self._used_bytes + charge + reserve > self._credit_bytes:
            pace.ran_dry(self.in_flight_bytes)
            return False
        message.has_begun = True
        inline, payload = message.cut(payload_bytes)
        segment = Segment(self._next_sequence, message, inline, payload)
        self._next_sequence += 1
        self._used_bytes += charge
        if message.is_large:
            self.unsent_bytes = max(0, self.unsent_bytes - payload_bytes)
        if not message.frames:
            lane.popleft()
            segment.last_of = message
        self._unacked.append(segment)
        self._put(segment)
        if not any(self._lanes):
            self.unsent_bytes = 0  # bodies and overheads are not taken off
        return True

    def _put(self, segment: Segment) -> None:
        segment.waits = True
        self._to_send.append(segment)

    def sent(self, segment: Segment, pace: CongestionWindow, now: float) -> None:
        """The packet from `next_segment` has left."""
        self._to_send.popleft()
        segment.waits = False
        if self.in_flight_bytes == 0:
            self._waiting_since = now
        segment.stamp = pace.stamp(now, self.in_flight_bytes)
        segment.in_flight = True
        segment.num_sent += 1
        self._counters.packets_resent += segment.num_sent > 1
        self.in_flight_bytes += segment.charge_bytes
        self._end_of_sent = max(self._end_of_sent, segment.sequence + 1)

    def grant(self, credit_bytes: int) -> bool:
        """The receiver lets us send up to here; whether that is news."""
        if credit_bytes <= self._credit_bytes:
            return False
        self._credit_bytes = credit_bytes
        return True

    def acknowledge(self, ack: int, has_gap: bool, ack_age_seconds: float, pace: CongestionWindow, now: float) -> int:
        """Everything below `ack` has arrived; the bytes that this is news of."""
        if ack > self._end_of_sent:
            raise ProtocolError(f"a peer acknowledges packet {ack - 1}, which was never sent")
        num_bytes = 0
        newest: Segment | None = None
        while self._unacked and self._unacked[0].sequence < ack:
            newest = self._unacked.popleft()
            newest.acked = True
            num_bytes += newest.charge_bytes
            self.delivered_at[newest.urgency] = now
            if newest.in_flight:
                self.in_flight_bytes -= newest.charge_bytes
            if newest.last_of is not None:
                self._count(newest.last_of, -1)
                newest.last_of.receipt.settle()
        if newest is not None:
            self._progressed(newest, num_bytes, ack_age_seconds, pace, now)
        if has_gap and self._unacked:
            self._fill_hole(self._unacked[0], pace, now)
        return num_bytes

    def _progressed(
        self, newest: Segment, num_bytes: int, ack_age_seconds: float, pace: CongestionWindow, now: float
    ) -> None:
        self._waiting_since = self._unanswered_since = now
        self._num_timeouts = 0
        stamp = newest.stamp
        assert stamp is not None, "only what was sent is acknowledged"
        if newest.in_flight and newest.num_sent == 1:
            pace.acknowledged(stamp, num_bytes, now, ack_age_seconds)
        else:
            pace.arrived_unmeasured(num_bytes, now)
        if self._doubtful:
            self._doubtful = False
            false_alarm = newest.num_sent == 1 or now - stamp.sent_at < pace.least_rtt_seconds * 0.9
            if not false_alarm:
                self._lose([segment for segment in self._unacked if segment.num_sent])

    def _fill_hole(self, oldest: Segment, pace: CongestionWindow, now: float) -> None:
        if oldest.in_flight and oldest.stamp is not None and now - oldest.stamp.sent_at >= pace.rtt_seconds:
            self._lose([oldest])

    def _lose(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            if segment.in_flight:
                segment.in_flight = False
                self.in_flight_bytes -= segment.charge_bytes
            segment.waits = True
        self._to_send = deque(segment for segment in self._unacked if segment.waits)

    def path_changed(self, now: float) -> None:
        """What was on its way may be gone: all of it goes again."""
        self._lose([segment for segment in self._unacked if segment.num_sent])
        self._doubtful = False
        self._num_timeouts = 0
        self._waiting_since = self._unanswered_since = now

    def unanswered_since(self) -> float | None:
        """Since when packets have been waiting, sent or refused, and nothing was acknowledged."""
        return self._unanswered_since if self._unacked else None

    def wait_anew(self, now: float) -> None:
        """Start counting `unanswered_since` from now."""
        self._unanswered_since = now

    def timeout_at(self, pace: CongestionWindow) -> float | None:
        """When to give up on what is in flight."""
        if not self.in_flight_bytes:
            return None
        timeout = min(pace.timeout_seconds * 2.0**self._num_timeouts, LARGEST_TIMEOUT_SECONDS)
        return self._waiting_since + timeout

    def check_timeout(self, pace: CongestionWindow, now: float) -> bool:
        """Send the oldest packet again if its acknowledgement is overdue; whether it was."""
        at = self.timeout_at(pace)
        if at is None or now < at:
            return False
        self._lose([self._unacked[0]])
        self._doubtful = True
        self._num_timeouts = min(self._num_timeouts + 1, 16)
        self._waiting_since = now
        return True

    def fail(self, error: Exception) -> int:
        """Settle all that is not acknowledged with the error; how many messages that were."""
        messages = [segment.last_of for segment in self._unacked if segment.last_of is not None]
        messages += [message for lane in self._lanes for message in lane]
        self._unacked.clear()
        self._to_send.clear()
        for lane in self._lanes:
            lane.clear()
        self.in_flight_bytes = self.queued_bytes = self.unsent_bytes = 0
        self._queued_bytes_by_urgency = [0 for _ in Urgency]
        for message in messages:
            message.receipt.settle(error)
        return len(messages)
