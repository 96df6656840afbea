"""The receiving half of a channel (pure): packets become messages, in order, once each, within limits.

Credit is a running total: "all packets of this channel together may cost up to so much". It grows as the application
takes messages, not as packets arrive, so a slow application stops its senders and nothing piles up here. What counts:

    credit = received so far + (window − arrived and untaken) + what is left of messages with memory of their own

A frame that fits one packet is handed on as a view of the carrier's buffer. A larger one is copied, fragment by
fragment, into one buffer of the announced size. That buffer is not cleared, so the system gives it memory page by page
as fragments fill it: an announcement alone costs nothing, and fragments arrive only as credit was given for them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy

from potluck.errors import ProtocolError
from potluck.link.channel.budget import Ledger, ReceiveBudget, reservation_bytes
from potluck.link.channel.packet import (
    ACK_NOW,
    MAX_CHARGE_BYTES,
    Kind,
    MessageStart,
    Packet,
    Urgency,
    decode_manifest,
    urgency_of,
)
from potluck.link.counters import Counters
from potluck.link.limits import INITIAL_CREDIT_BYTES, LinkConfig
from potluck.link.throttle import Throttle

ACK_DELAY_SECONDS = 0.005  # an acknowledgement waits so long for a packet to travel with
MAX_EARLY_PACKETS = 4096
AT_ONCE = 0.0
WORTHWHILE_BYTES = 64 * 1024  # credit under a cap is given in pieces of this size at least


class ChannelBrokenError(ProtocolError):
    """What the peer sent in order cannot be right, so nothing behind it can be: the channel must start anew."""


class ReceivedMessage:
    """A whole message; its bytes count against the sender's credit until it is released."""

    __slots__ = ("_charge_bytes", "_inbox", "_reserved_bytes", "body", "frames", "urgency")

    def __init__(
        self, body: memoryview, frames: list[memoryview], urgency: Urgency, inbox: Inbox, charge: int, reserved: int
    ) -> None:
        self.body = body
        self.frames = frames
        self.urgency = urgency
        self._inbox: Inbox | None = inbox
        self._charge_bytes = charge
        self._reserved_bytes = reserved

    def release(self) -> None:
        """The application has taken the message. Idempotent."""
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            inbox.taken(self._charge_bytes, self._reserved_bytes)


class MessageAssembly:
    """A message of which not everything has arrived."""

    __slots__ = (
        "_buffer",
        "_index",
        "_offset",
        "charge_bytes",
        "last_at",
        "manifest",
        "needs_bytes",
        "reserved_bytes",
        "window_bytes",
    )

    def __init__(self, manifest: MessageStart, window_bytes: int, now: float) -> None:
        self.manifest = manifest
        self.charge_bytes = 0
        self.window_bytes = window_bytes  # when it began
        self.needs_bytes = 0  # memory of its own that it waits for
        self.reserved_bytes = 0  # … or has
        self.last_at = now
        self._index = 0  # the frame that is filled now
        self._offset = 0
        self._buffer: memoryview | None = None
        self._skip_complete()

    @property
    def is_complete(self) -> bool:
        """Whether all frames are there."""
        return self._index == len(self.manifest.frames)

    def add(self, payload: memoryview) -> None:
        """The next piece of the current frame."""
        if self.is_complete:
            raise ChannelBrokenError("a packet carries payload where no frame is missing any")
        size = self.manifest.sizes[self._index]
        if len(payload) > size - self._offset:
            raise ChannelBrokenError("a fragment reaches beyond the frame that was announced")
        if len(payload) == size:
            self.manifest.frames[self._index] = payload
        else:
            if self._buffer is None:
                self._buffer = numpy.empty(size, numpy.uint8).data
            self._buffer[self._offset : self._offset + len(payload)] = payload
            self._offset += len(payload)
            if self._offset < size:
                return
            self.manifest.frames[self._index] = self._buffer
            self._buffer, self._offset = None, 0
        self._skip_complete()

    def _skip_complete(self) -> None:
        frames = self.manifest.frames
        while self._index < len(frames) and frames[self._index] is not None:
            self._index += 1


class Inbox:
    """All that has arrived from one peer and is not yet taken."""

    def __init__(
        self,
        config: LinkConfig,
        budget: ReceiveBudget,
        ledger: Ledger,
        counters: Counters,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`wake` is called when the application has taken so much that the sender should be told."""
        self._config = config
        self._budget = budget
        self._ledger = ledger
        self._counters = counters
        self._wake = wake
        self._early: dict[int, Packet] = {}
        self._early_bytes = 0
        self._assemblies: list[MessageAssembly | None] = [None for _ in Urgency]
        self._received_bytes = 0
        self._granted_bytes = INITIAL_CREDIT_BYTES
        self._last_arrival_at = 0.0
        self._credit_due_at: float | None = None  # when the cap lets more credit pass
        self._closed = False
        self.expected = 0
        self.ack_due_at: float | None = None

    @property
    def has_gap(self) -> bool:
        """Whether packets beyond the next one have arrived."""
        return bool(self._early)

    @property
    def has_credit(self) -> bool:
        """Whether the sender can send, as far as our credit goes."""
        return self._granted_bytes - self._received_bytes >= MAX_CHARGE_BYTES

    @property
    def is_path_limited(self) -> bool:
        """Whether a sender with much to send is as fast as the way allows; a cap is part of the way."""
        return self._budget.throttle is not None or self.has_credit

    def ack_age_seconds(self, now: float) -> float:
        """How long ago the newest packet that an acknowledgement covers came."""
        return max(0.0, now - self._last_arrival_at) if self.expected else 0.0

    def credit_bytes(self, now: float = 0.0) -> int:
        """The credit to announce now; it never shrinks, and under a cap grows no faster than that."""
        news = self._grantable_bytes() - self._granted_bytes
        if self._budget.throttle is not None:
            self._granted_bytes += self._allowed(news, self._budget.throttle, now)
        elif news > 0:
            self._granted_bytes += news
        return self._granted_bytes

    def _allowed(self, news: int, throttle: Throttle, now: float) -> int:
        """As much of new credit as the cap lets pass; an acknowledgement brings the rest later.

        A channel that is not used takes none from the others: its sender has all that it may have unasked.
        """
        wanted = min(news, INITIAL_CREDIT_BYTES - (self._granted_bytes - self._received_bytes))
        if wanted < min(WORTHWHILE_BYTES, max(news, 1)):
            throttle.leave(self)
            self._credit_due_at = None
            return 0
        allowed = min(wanted, throttle.admits(self, min(wanted, WORTHWHILE_BYTES), now))
        if allowed:
            throttle.leave(self)
            throttle.spent(allowed)
        self._credit_due_at = throttle.available_at(WORTHWHILE_BYTES, now) if allowed < wanted else None
        return allowed

    def stand_aside(self) -> None:
        """Nothing can be told to the sender now: let others have their turn at the cap."""
        if self._budget.throttle is not None:
            self._budget.throttle.leave(self)

    def _grantable_bytes(self) -> int:
        window, extra = self._budget.window_bytes, 0
        for assembly in self._assemblies:
            if assembly is None:
                continue
            if assembly.reserved_bytes:
                extra += max(0, assembly.reserved_bytes - assembly.charge_bytes)
            else:  # what has begun in a window must be able to end, even if windows have shrunk since
                window = max(window, assembly.window_bytes)
        return self._received_bytes + max(0, window - self._ledger.held_bytes) + extra

    def receive(self, packet: Packet, deliveries: list[ReceivedMessage], now: float) -> None:
        """Take in a packet with a sequence number; append the messages that are complete now, in order.

        ChannelBrokenError when it cannot be right; what was appended before is right nevertheless.
        """
        sequence = packet.sequence
        if sequence < self.expected or sequence in self._early:
            self._counters.duplicates += 1
            self.ack_due_at = AT_ONCE
            return
        if not self._is_within_credit(packet, early=sequence > self.expected):
            self._counters.refused += 1
            self.ack_due_at = AT_ONCE
            return
        if sequence > self.expected:
            self._early[sequence] = packet
            self._early_bytes += packet.charge_bytes
            self.ack_due_at = AT_ONCE
            return
        self._last_arrival_at = now
        if packet.flags & ACK_NOW or self._early:
            self.ack_due_at = AT_ONCE
        elif self.ack_due_at is None:
            self.ack_due_at = now + ACK_DELAY_SECONDS
        following: Packet | None = packet
        while following is not None:
            self.expected += 1
            self._accept(following, deliveries, now)
            following = self._early.pop(self.expected, None)
            if following is not None:
                self._early_bytes -= following.charge_bytes

    def _is_within_credit(self, packet: Packet, early: bool) -> bool:
        charge = packet.charge_bytes
        if self._received_bytes + (self._early_bytes if early else 0) + charge > self._granted_bytes:
            return False
        if early:
            return packet.sequence - self.expected <= MAX_EARLY_PACKETS
        # Only a peer that keeps starting anew, each time with an initial credit, can get here.
        assembly = self._assemblies[urgency_of(packet.flags)]
        has_own_memory = assembly is not None and assembly.reserved_bytes > 0
        return (
            has_own_memory
            or self._ledger.held_bytes + charge <= self._budget.largest_window_bytes + INITIAL_CREDIT_BYTES
        )

    def _accept(self, packet: Packet, deliveries: list[ReceivedMessage], now: float) -> None:
        charge = packet.charge_bytes
        urgency = urgency_of(packet.flags)
        assembly = self._assemblies[urgency]
        if packet.kind == Kind.MESSAGE:
            if assembly is not None:
                raise ChannelBrokenError("a message starts in the middle of another")
            assembly = self._start(packet, now)
            self._assemblies[urgency] = assembly
        elif assembly is None:
            raise ChannelBrokenError("a fragment belongs to no message")
        self._received_bytes += charge
        assembly.charge_bytes += charge
        assembly.last_at = now
        if not assembly.reserved_bytes:
            self._ledger.held_bytes += charge
        if packet.payload:
            assembly.add(packet.payload)
        if assembly.is_complete:
            self._assemblies[urgency] = None
            deliveries.append(self._deliver(assembly, urgency))

    def _start(self, packet: Packet, now: float) -> MessageAssembly:
        try:
            manifest = decode_manifest(packet.inline)
        except ProtocolError as error:
            raise ChannelBrokenError(str(error)) from error
        config = self._config
        total = manifest.total_bytes
        largest = max(manifest.sizes, default=0)
        if len(manifest.sizes) > config.max_frames or largest > config.max_frame_bytes:
            self._counters.refused += 1
            raise ChannelBrokenError(f"a message of {len(manifest.sizes)} frames of up to {largest} bytes is too large")
        if total > config.max_message_bytes:
            self._counters.refused += 1
            raise ChannelBrokenError(f"a message of {total} bytes exceeds the limit of {config.max_message_bytes}")
        assembly = MessageAssembly(manifest, self._budget.window_bytes, now)
        if total > self._budget.window_bytes // 4:
            assembly.needs_bytes = reservation_bytes(total)
            self._reserve(assembly)
        return assembly

    def _reserve(self, assembly: MessageAssembly) -> bool:
        needed = assembly.needs_bytes
        if self._ledger.reserved_bytes + needed > self._budget.peer_bytes:
            self._budget.forget(assembly)  # it waits for its own peer's messages to be taken, so others may pass
            return False
        if not self._budget.reserve(assembly, needed):
            return False
        assembly.reserved_bytes, assembly.needs_bytes = needed, 0
        self._ledger.reserved_bytes += needed
        self._ledger.held_bytes -= assembly.charge_bytes
        return True

    def _unreserve(self, reserved_bytes: int) -> None:
        self._ledger.reserved_bytes -= reserved_bytes
        self._budget.release(reserved_bytes)

    def _deliver(self, assembly: MessageAssembly, urgency: Urgency) -> ReceivedMessage:
        frames = [frame for frame in assembly.manifest.frames if frame is not None]
        if assembly.needs_bytes:
            self._budget.forget(assembly)
        charge = 0 if assembly.reserved_bytes else assembly.charge_bytes
        return ReceivedMessage(assembly.manifest.body, frames, urgency, self, charge, assembly.reserved_bytes)

    def taken(self, charge_bytes: int, reserved_bytes: int) -> None:
        """The application has taken a message: its memory is free again, and the sender may get credit for it."""
        self._ledger.held_bytes -= charge_bytes
        if reserved_bytes:
            self._unreserve(reserved_bytes)
        if self._closed:
            return
        news = self._grantable_bytes() - self._granted_bytes
        if news >= self._budget.window_bytes // 4 or (news > 0 and not self.has_credit):
            self.ack_due_at = AT_ONCE
            self._wake()

    def tick(self, now: float) -> None:
        """Ask again for memory that was not free; give up large messages without progress."""
        if self._credit_due_at is not None and now >= self._credit_due_at:
            self._credit_due_at = None
            self.ack_due_at = AT_ONCE
        for assembly in self._assemblies:
            if assembly is None:
                continue
            if assembly.needs_bytes:
                assembly.last_at = now
                if self._reserve(assembly):
                    self.ack_due_at = AT_ONCE
            elif assembly.reserved_bytes and now - assembly.last_at > self._config.stalled_seconds:
                raise ChannelBrokenError(f"a large message has made no progress for {self._config.stalled_seconds:g} s")

    def tick_at(self) -> float | None:
        """When `tick` has something to do."""
        due: list[float] = [self._credit_due_at] if self._credit_due_at is not None else []
        for assembly in self._assemblies:
            if assembly is not None and assembly.needs_bytes:
                due.append(AT_ONCE)
            elif assembly is not None and assembly.reserved_bytes:
                due.append(assembly.last_at + self._config.stalled_seconds)
        return min(due, default=None)

    def close(self) -> None:
        """Nothing more is received; what was delivered stays counted until it is taken."""
        self._closed = True
        self.stand_aside()
        self._early.clear()
        for assembly in self._assemblies:
            if assembly is not None:
                self._budget.forget(assembly)
                if assembly.reserved_bytes:
                    self._unreserve(assembly.reserved_bytes)
                else:
                    self._ledger.held_bytes -= assembly.charge_bytes
        self._assemblies = [None for _ in Urgency]
