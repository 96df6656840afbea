"""Links to all peers: the one interface that the rest of Potluck sends and receives by.

    links.handle(Greeting, greeted)                                   # messages by kind
    receipt = await links.send(peer, Greeting(...), [frame], timeout_seconds=5)
    answer = await links.request(peer, Question(...), reply=Answer, timeout_seconds=5)
    async with await links.open_stream(peer, Fetch(...), timeout_seconds=5) as stream:
        async for frames in stream: ...

The roster says who lives (`update_peer`), carriers bring packets and paths (`CarrierEvents`), table.py and peerlink.py
do the work. What is left for this module is time and turns: it pumps links that have something to do once per turn of
the event loop, so that what one turn produced travels together, and wakes them when something is overdue. Everything
runs on one event loop, that of the first call.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

from potluck.clock import Clock
from potluck.errors import PeerUnreachableError, ProtocolError
from potluck.hub.presence import Presence
from potluck.link.carrier import Buffer, Carrier
from potluck.link.channel.inbox import ReceivedMessage
from potluck.link.channel.packet import Urgency
from potluck.link.channel.sendreceipt import SendReceipt
from potluck.link.counters import Counters, LinkStatistics
from potluck.link.dispatch import Arrived, Dispatcher, Handler, Incoming
from potluck.link.envelope import Envelope, MessageRole, decode_envelope, encode_envelope
from potluck.link.limits import MIB, LinkConfig
from potluck.link.peerlink import PeerLink
from potluck.link.requests import Requests
from potluck.link.selflink import SelfDelivery, SelfLink
from potluck.link.sendqueue import SendQueue
from potluck.link.stream import Stream
from potluck.link.streams import StreamHandler, Streams
from potluck.link.table import LinkTable
from potluck.messages import Message

__all__ = ["Incoming", "LinkConfig", "Links", "SendReceipt", "Stream"]

M = TypeVar("M", bound=Message)

TOLD_BYTES = 1 * MIB  # what may wait for a peer beyond its queue: answers about streams, which are never delayed
CLOSED = "the links of this process are closed"


class Links:
    """All links of this peer."""

    def __init__(
        self,
        self_id: str,
        session: str,
        clock: Clock,
        config: LinkConfig | None = None,
        carriers: Iterable[Carrier] = (),
    ) -> None:
        self._self_id = self_id
        self._clock = clock
        self._config = config if config is not None else LinkConfig()
        self._table = LinkTable(self_id, session, clock, self._config, self)
        self._requests = Requests(self._post)
        self._dispatcher = Dispatcher(self._config, self._requests.respond)
        self._streams = Streams(self._config, self._table.budget, self._post, self._tell, self._still_seconds)
        self._self_link = SelfLink(self_id, self._self_delivered, lambda: self._self_queue.admit())
        self._self_queue = SendQueue(self._self_link, self._config)
        self._queues: dict[PeerLink, SendQueue] = {}
        self._awake: dict[PeerLink, None] = {}  # in the order in which they woke
        self._active: dict[PeerLink, None] = {}  # have something due later, in the order in which that began
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0  # loop time; kept here since a uvloop handle that is due at once does not know it
        self._closed = False
        for carrier in carriers:
            self.add_carrier(carrier)

    def add_carrier(self, carrier: Carrier) -> None:
        """Use this carrier too; it has to tell its events to this object."""
        self._table.add_carrier(carrier)

    # Messages

    def handle(self, kind: type[M], handler: Handler[M], *, group: str = "") -> None:
        """Call `handler` with each message or request of that kind; see dispatch.py for the order and the limits."""
        self._dispatcher.register(kind, handler, group)

    def handle_stream(self, kind: type[Message], handler: StreamHandler, *, group: str = "") -> None:
        """Call `handler` with each stream that a peer opens with a message of that kind."""
        self._streams.register(kind, handler, group)

    def unhandle(self, kind: type[Message], *, group: str = "") -> None:
        """Take nothing more of that kind, neither messages nor streams."""
        self._dispatcher.unregister(kind, group)
        self._streams.unregister(kind, group)

    async def send(
        self,
        peer: str,
        message: Message,
        frames: Sequence[Buffer] = (),
        *,
        timeout_seconds: float,
        bulk: bool = False,
        group: str = "",
    ) -> SendReceipt:
        """Queue a message for a peer; returns once there is room for it.

        The frames are not copied: leave them unchanged until the receipt is settled. Messages arrive in the order of
        sending, except that those with `bulk` let the others pass. DeadlineExceededError when the queue stays full,
        PeerUnreachableError when there is no such peer.
        """
        return await self.queue_to(peer).send(
            message, frames, group=group, urgency=urgency_of_message(bulk), timeout_seconds=timeout_seconds
        )

    async def flush(self, peer: str, *, timeout_seconds: float) -> None:
        """Return once the peer has all that was queued for it. PeerUnreachableError if some of it may be lost."""
        queue = self.queue_to(peer, must_live=False)
        if peer in self._table.links:
            self._table.links[peer].hurry()
        await queue.flush(timeout_seconds)

    def arrived_at(self, peer: str, *, bulk: bool) -> float:
        """When something came from this peer last, be it a part of a message: of bulk, or of streams.

        So a receiver tells a slow line from a dead one, however long a whole message takes.
        """
        link = self._table.links.get(peer)
        return link.arrived_at(Urgency.BULK if bulk else Urgency.STREAM) if link is not None else -math.inf

    def delivered_at(self, peer: str, *, bulk: bool) -> float:
        """When this peer acknowledged something last: of bulk, or of streams."""
        link = self._table.links.get(peer)
        return link.delivered_at(Urgency.BULK if bulk else Urgency.STREAM) if link is not None else -math.inf

    def _still_seconds(self, peer: str) -> float:
        moved_at = max(self.arrived_at(peer, bulk=False), self.delivered_at(peer, bulk=False))
        return self._clock.monotonic() - moved_at

    def upload_bytes_per_second(self, peer: str) -> float | None:
        """How fast this peer takes what we send, as measured; None: that is not known."""
        link = self._table.links.get(peer)
        return link.upload_bytes_per_second if link is not None else None

    async def request(
        self,
        peer: str,
        message: Message,
        frames: Sequence[Buffer] = (),
        *,
        reply: type[M],
        timeout_seconds: float,
        bulk: bool = False,
        group: str = "",
    ) -> Incoming[M]:
        """Ask a peer and return its answer; what its handler raises is raised here, as far as it may be told."""
        return await self._requests.ask(
            peer,
            message,
            frames,
            reply=reply,
            timeout_seconds=timeout_seconds,
            urgency=urgency_of_message(bulk),
            group=group,
        )

    async def open_stream(
        self, peer: str, message: Message, frames: Sequence[Buffer] = (), *, timeout_seconds: float, group: str = ""
    ) -> Stream:
        """Begin a stream with a peer; its handler for this kind of message gets the other end."""
        return await self._streams.open(peer, message, frames, timeout_seconds=timeout_seconds, group=group)

    async def _post(
        self, peer: str, envelope: Envelope, frames: Sequence[memoryview], *, urgency: Urgency, timeout_seconds: float
    ) -> SendReceipt:
        return await self.queue_to(peer).post(envelope, frames, urgency, timeout_seconds)

    def _tell(self, peer: str, envelope: Envelope, urgency: Urgency) -> None:
        with contextlib.suppress(PeerUnreachableError):  # nobody is left to be told
            self.queue_to(peer).put(encode_envelope(envelope), (), urgency)
            link = self._table.links.get(peer)
            if link is not None and link.queued_bytes > self._config.queue_bytes + TOLD_BYTES:
                link.abandon("it takes nothing of what it makes us say")

    def queue_to(self, peer: str, *, must_live: bool = True) -> SendQueue:
        """The messages to a peer; PeerUnreachableError when there is no such peer (any more)."""
        if self._closed:
            raise PeerUnreachableError(CLOSED)
        if peer == self._self_id:
            return self._self_queue
        link = self._table.links.get(peer)
        if link is None or (must_live and not link.is_alive):
            raise PeerUnreachableError(f"peer {peer} is not in the run (any more): see the roster for who is")
        queue = self._queues.get(link)
        if queue is None:
            queue = self._queues[link] = SendQueue(link, self._config)
        return queue

    # What roster and carriers tell (CarrierEvents)

    def update_peer(self, presence: Presence) -> None:
        """What the roster says about a peer."""
        self._table.update_peer(presence)
        if presence.state in ("dead", "left"):
            for link in [link for link in self._queues if self._table.links.get(link.peer) is not link]:
                del self._queues[link]

    def packet_arrived(self, carrier: Carrier, peer: str, header: memoryview, payload: memoryview | None) -> None:
        """One packet from an authenticated peer."""
        self._table.packet_arrived(carrier, peer, header, payload)

    def path_opened(self, carrier: Carrier, peer: str) -> None:
        """Packets can now be sent to this peer."""
        self._table.path_opened(carrier, peer)

    def path_closed(self, carrier: Carrier, peer: str, reason: str) -> None:
        """The path is gone."""
        self._table.path_closed(carrier, peer, reason)

    def path_writable(self, carrier: Carrier, peer: str) -> None:
        """A path that was congested accepts packets again."""
        self._table.path_writable(carrier, peer)

    # What links tell (LinkOwner)

    def delivered(self, link: PeerLink, delivery: ReceivedMessage) -> None:
        """A message has arrived."""
        self._sort(link.peer, delivery, link.counters)

    def _self_delivered(self, delivery: SelfDelivery) -> None:
        self._sort(self._self_id, delivery, self._self_link.counters)

    def _sort(self, peer: str, delivery: ReceivedMessage | SelfDelivery, counters: Counters) -> None:
        try:
            envelope = decode_envelope(delivery.body)
        except ProtocolError:
            counters.malformed += 1
            delivery.release()
            return
        arrived = Arrived(peer, envelope, delivery.frames, delivery.urgency, delivery.release, counters)
        if envelope.role <= MessageRole.REQUEST:
            self._dispatcher.take(arrived)
        elif envelope.role <= MessageRole.FAILURE:
            self._requests.take(arrived)
        else:
            self._streams.take(arrived)

    def failed(self, link: PeerLink, error: PeerUnreachableError) -> None:
        """A channel is gone, with all that was unanswered in it."""
        if (queue := self._queues.get(link)) is not None:
            queue.fail(error)
        self._requests.fail(link.peer, error)
        self._streams.fail(link.peer, error)

    def woke(self, link: PeerLink) -> None:
        """A link has something to do in this turn."""
        self._awake[link] = None
        if self._soon is None and not self._closed:
            self._soon = asyncio.get_running_loop().call_soon(self._take_turn)

    # Time and turns

    def _take_turn(self) -> None:
        self._soon = None
        awake, self._awake = self._awake, {}
        for link in awake:
            link.pump()
            if link.is_alive and (queue := self._queues.get(link)) is not None:
                queue.admit()
            self._plan(link)

    def tick(self) -> None:
        """Look at everything that may be overdue. A timer calls it; so does a test that has a clock of its own."""
        now = self._clock.monotonic()
        self._table.expire()
        for link in list(self._active):
            due_at = link.next_at()
            if due_at is not None and due_at <= now:
                link.tick()
            self._plan(link)

    def _plan(self, link: PeerLink) -> None:
        soon = asyncio.get_running_loop().time() + self._config.tick_seconds
        if self._timer is not None and self._timer_at <= soon:
            self._active[link] = None  # it will be looked at in a moment anyway
            return
        due_at = link.next_at()
        if due_at is None:
            self._active.pop(link, None)
        else:
            self._active[link] = None
            self._set_timer(due_at)

    def _set_timer(self, due_at: float) -> None:
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + max(due_at - self._clock.monotonic(), self._config.tick_seconds)
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer, self._timer_at = loop.call_at(at, self._on_timer), at

    def _on_timer(self) -> None:
        self._timer = None
        self.tick()

    def statistics(self) -> LinkStatistics:
        """Counters and speeds, per peer and in all."""
        now = self._clock.monotonic()
        total = self._table.counters()
        total.add(self._self_link.counters)
        peers = {peer: link.statistics() for peer, link in self._table.links.items() if link.is_alive}
        uploads = [self._table.upload.bytes_per_second(now), *(p.upload_bytes_per_second for p in peers.values())]
        downloads = [self._table.download.bytes_per_second(now), *(p.download_bytes_per_second for p in peers.values())]
        # A peer that was slow because of a slow partner is still as fast as it is with the fastest.
        return LinkStatistics(
            total=total,
            upload_bytes_per_second=max((speed for speed in uploads if speed is not None), default=None),
            download_bytes_per_second=max((speed for speed in downloads if speed is not None), default=None),
            reserved_bytes=self._table.budget.reserved_bytes,
            peers={**peers, self._self_id: self._self_link.statistics()},
        )

    async def close(self) -> None:
        """Fail what is under way, end handlers and streams, close the carriers. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        await self._dispatcher.close()
        await self._streams.close()
        self._table.close(CLOSED)
        self._requests.fail(self._self_id, PeerUnreachableError(CLOSED))
        for carrier in self._table.carriers.values():
            await carrier.close()


def urgency_of_message(bulk: bool) -> Urgency:
    """What goes first when several messages wait: bulk lets the others pass."""
    return Urgency.BULK if bulk else Urgency.FIRST
