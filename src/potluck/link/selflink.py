"""Messages to oneself: the same rules, without packets.

A coordinator that takes part in its own round should not have to treat itself as a special case. The frames are not
copied, so the receipt is settled only when the handler has finished: until then the sender must not change them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from potluck.link.channel.outbox import message_bytes
from potluck.link.channel.packet import Urgency
from potluck.link.channel.sendreceipt import SendReceipt
from potluck.link.counters import Counters, PeerStatistics


class SelfDelivery:
    """A message from oneself."""

    __slots__ = ("_link", "_receipt", "_size_bytes", "body", "frames", "urgency")

    def __init__(self, link: SelfLink, body: bytes, frames: Sequence[memoryview], urgency: Urgency) -> None:
        self._link: SelfLink | None = link
        self._receipt = SendReceipt()
        self._size_bytes = message_bytes(body, frames)
        self.body = memoryview(body)
        self.frames = [frame.toreadonly() for frame in frames]
        self.urgency = urgency

    @property
    def receipt(self) -> SendReceipt:
        """What the sender holds."""
        return self._receipt

    @property
    def size_bytes(self) -> int:
        """What it costs in the queue."""
        return self._size_bytes

    def release(self) -> None:
        """The application has taken the message. Idempotent."""
        link, self._link = self._link, None
        if link is not None:
            link.released(self)


class SelfLink:
    """The link from this peer to itself."""

    def __init__(self, peer: str, deliver: Callable[[SelfDelivery], None], woke: Callable[[], None]) -> None:
        self.peer = peer
        self.is_alive = True
        self.counters = Counters()
        self.queued_bytes = 0
        self._deliver = deliver
        self._woke = woke

    def send(self, body: bytes, frames: Sequence[memoryview] = (), *, urgency: Urgency = Urgency.FIRST) -> SendReceipt:
        """Queue a message."""
        delivery = SelfDelivery(self, body, frames, urgency)
        self.queued_bytes += delivery.size_bytes
        self.counters.messages_sent += 1
        asyncio.get_running_loop().call_soon(self._arrive, delivery)
        return delivery.receipt

    def _arrive(self, delivery: SelfDelivery) -> None:
        self.counters.messages_received += 1
        self._deliver(delivery)

    def released(self, delivery: SelfDelivery) -> None:
        """A message was taken."""
        self.queued_bytes -= delivery.size_bytes
        delivery.receipt.settle()
        self._woke()

    def hurry(self) -> None:
        """Nothing can be faster."""

    def statistics(self) -> PeerStatistics:
        """How the link does."""
        return PeerStatistics(
            path="self",
            queue_bytes=self.queued_bytes,
            in_flight_bytes=0,
            window_bytes=0,
            rtt_seconds=None,
            upload_bytes_per_second=None,
            download_bytes_per_second=None,
            counters=self.counters,
        )
