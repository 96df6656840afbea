"""All that links one peer to this one: its life, its channel, its paths (pure).

Packets, roster entries, path events and the time come in; packets go to carriers, messages and failures to the owner.
Nothing here waits, so a test can run two of these against each other on a virtual clock.

The channel lasts as long as both lives of the two peers do and neither side gives it up; see channel.py for how they
agree on that. Paths, counters and the ledger of untaken bytes belong to the peer and outlast its lives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from potluck.clock import Clock
from potluck.errors import PeerUnreachableError, ProtocolError
from potluck.link.carrier import Buffer, Carrier
from potluck.link.channel.budget import Ledger, ReceiveBudget
from potluck.link.channel.channel import Channel
from potluck.link.channel.congestion import CongestionWindow
from potluck.link.channel.inbox import ChannelBrokenError, ReceivedMessage
from potluck.link.channel.packet import LOADED, MAX_GENERATION, Kind, Packet, Urgency, session_tag, urgency_of
from potluck.link.channel.sendreceipt import SendReceipt
from potluck.link.counters import Counters, PeerStatistics
from potluck.link.limits import LinkConfig
from potluck.link.line import SharedLine
from potluck.link.paths import Paths
from potluck.link.speed import SpeedMeter, Transfer

DEAF_SECONDS = 1.0  # a peer that repeats itself elsewhere for so long does not hear us where we answer


class LinkOwner(Protocol):
    """Who is told what happens on a link."""

    def delivered(self, link: PeerLink, delivery: ReceivedMessage) -> None:
        """A message has arrived; release it when it is taken."""
        ...

    def failed(self, link: PeerLink, error: PeerUnreachableError) -> None:
        """The channel is gone, with all that was unanswered in it."""
        ...

    def woke(self, link: PeerLink) -> None:
        """`pump` has something to do."""
        ...


class PeerLink:
    """The link to one peer."""

    def __init__(
        self,
        peer: str,
        *,
        local_tag: int,
        carriers: Mapping[str, Carrier],
        config: LinkConfig,
        clock: Clock,
        budget: ReceiveBudget,
        owner: LinkOwner,
        total_upload: SpeedMeter,
        total_download: SpeedMeter,
        line: SharedLine,
    ) -> None:
        """`line` is what all links send over."""
        self.peer = peer
        self.session: str | None = None  # as the roster says; kept when the peer is dead
        self.remote_tag = 0
        self.generation = 0
        self.is_alive = False
        self.counters = Counters()
        self.ledger = Ledger()
        self.paths = Paths(config.preference, config.settle_seconds)
        self._local_tag = local_tag
        self._carriers = carriers
        self._config = config
        self._clock = clock
        self._budget = budget
        self._owner = owner
        self._channel: Channel | None = None
        self._path: str | None = None
        self._last_path: str | None = None
        self._paces: dict[str, CongestionWindow] = {}
        self._upload, self._download = SpeedMeter(), SpeedMeter()
        self._sending = Transfer(self._upload, total_upload)
        self._receiving = Transfer(self._download, total_download)
        self._gave_up = False  # a channel of this life that had been used
        self._is_blocked = False  # the carrier is congested
        self._is_pumping = False
        self._line = line
        self._is_refused = False  # by the line; it is asked again later
        self._arrived_at = [-math.inf for _ in Urgency]
        self._repeats_since: float | None = None

    # The peer's life

    def begin(self, session: str) -> None:
        """The roster says that the peer lives, in this session."""
        if self.is_alive and session == self.session:
            return
        is_same_life = session == self.session
        if not is_same_life:
            self._give_up(f"peer {self.peer} has restarted")
            self.session, self.generation = session, 1
            self.remote_tag = session_tag(self.peer, session)
        self.is_alive = True
        if is_same_life and self._gave_up and self.generation < MAX_GENERATION:
            self.generation += 1  # the other side may not know that we had given it up: tell it
            self._open_channel().announce_reset("the roster had said that it was gone")
            self._owner.woke(self)
        self._gave_up = False

    def end(self, reason: str) -> None:
        """The peer is dead or has left, or this process leaves."""
        self.is_alive = False
        self._gave_up = self._gave_up or not (self._channel is None or self._channel.is_untouched)
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        channel, self._channel = self._channel, None
        if channel is None:
            return
        self._budget.add_channels(-1)
        self._leave_line()
        now = self._clock.monotonic()
        self._sending.update(False, now)
        self._receiving.update(False, now)
        error = PeerUnreachableError(f"{reason}: what was not acknowledged may or may not have arrived")
        self.counters.messages_lost += channel.fail(error)
        self._owner.failed(self, error)

    def _restart(self, generation: int, reason: str) -> None:
        if self._channel is not None and self._channel.is_untouched:
            self._channel.generation = self.generation = generation
            return
        self.counters.resets += self._channel is not None
        self.generation = generation
        self._give_up(reason)

    def _open_channel(self) -> Channel:
        if self._channel is None:
            self._budget.add_channels(1)
            self._channel = Channel(
                local_tag=self._local_tag,
                remote_tag=self.remote_tag,
                generation=self.generation,
                config=self._config,
                budget=self._budget,
                ledger=self.ledger,
                counters=self.counters,
                wake=lambda: self._owner.woke(self),
            )
            self._knock(self._channel)
        return self._channel

    def _knock(self, channel: Channel) -> None:
        # A carrier may make a path only when there is something to send; it refuses the packet, and begins.
        for kind, carrier in self._carriers.items():
            if not self.paths.is_open(kind):
                carrier.send(self.peer, channel.header(Kind.PROBE, now=self._clock.monotonic()), None)

    # Messages

    @property
    def queued_bytes(self) -> int:
        """What waits or is on its way."""
        return self._channel.outbox.queued_bytes if self._channel is not None else 0

    def send(self, body: bytes, frames: Sequence[memoryview] = (), *, urgency: Urgency = Urgency.FIRST) -> SendReceipt:
        """Queue a message; the caller has seen that there is room."""
        assert self.is_alive, "only a living peer is sent to"
        self.counters.messages_sent += 1
        self._owner.woke(self)
        return self._open_channel().send(body, frames, urgency=urgency)

    def arrived_at(self, urgency: Urgency) -> float:
        """When a packet of this urgency came last, as a part of a message or all of it."""
        return self._arrived_at[urgency]

    def delivered_at(self, urgency: Urgency) -> float:
        """When the peer acknowledged something of this urgency last."""
        return self._channel.outbox.delivered_at[urgency] if self._channel is not None else -math.inf

    @property
    def upload_bytes_per_second(self) -> float | None:
        """As measured; None: too little was sent to tell."""
        return self._upload.bytes_per_second(self._clock.monotonic())

    def hurry(self) -> None:
        """Somebody waits for acknowledgements."""
        if self._channel is not None:
            self._channel.hurry()
            self._owner.woke(self)

    # Paths

    def path_opened(self, kind: str) -> None:
        """A carrier can send to the peer."""
        self.paths.opened(kind, self._clock.monotonic())
        self._paces[kind] = self._new_pace()
        if kind == self._path:
            self._path = None  # it broke and came back: what was on its way may be gone
        self._owner.woke(self)

    def path_closed(self, kind: str) -> None:
        """A carrier has lost its path."""
        self.paths.closed(kind, self._clock.monotonic())
        if kind == self._path:
            self._path = None
        self._owner.woke(self)

    def path_writable(self, kind: str) -> None:
        """A congested carrier has room again."""
        if kind == self._path:
            self._is_blocked = False
            self._owner.woke(self)

    def _choose_path(self, now: float) -> None:
        if self._channel is None:
            self.paths.current = None  # nothing is under way: the best open path will do, proved or not
        kind = self.paths.choose(now)
        if kind == self._path:
            return
        self._path = kind
        if kind is not None:
            self.counters.path_changes += self._last_path not in (None, kind)
            self._last_path = kind
        self._is_blocked = False
        if self._channel is not None and kind is not None:
            self._channel.path_changed(now)

    def _pace(self, kind: str | None) -> CongestionWindow:
        pace = self._paces.get(kind or "")
        return pace if pace is not None else self._paces.setdefault(kind or "", self._new_pace())

    def _new_pace(self) -> CongestionWindow:
        return CongestionWindow(self._config.max_in_flight_bytes, self._line.bytes_per_second)

    # Packets

    def receive(self, kind: str, packet: Packet) -> None:
        """A packet of the peer's present life, by way of that kind of carrier."""
        now = self._clock.monotonic()
        self.counters.packets_received += 1
        self.counters.bytes_received += packet.charge_bytes
        if not self.is_alive or packet.generation < self.generation:
            self.counters.stale += 1
            if self.is_alive:
                self._transmit_on(kind, self._open_channel().header(Kind.ACK, now=now), None)
            return
        if packet.generation > self.generation:
            reason = (
                bytes(packet.inline).decode(errors="replace") if packet.kind == Kind.RESET else "it had given us up"
            )
            self._restart(packet.generation, f"peer {self.peer} started the channel anew ({reason})")
        channel = self._open_channel()
        self._take_in(channel, kind, packet, now)
        if packet.kind == Kind.PROBE:
            self._transmit_on(kind, channel.header(Kind.ECHO, 0, packet.sequence, now=now), None)
        elif packet.kind == Kind.ECHO:
            self.paths.echoed(kind, packet.sequence)
        self._owner.woke(self)

    def _take_in(self, channel: Channel, kind: str, packet: Packet, now: float) -> None:
        deliveries: list[ReceivedMessage] = []
        num_duplicates = self.counters.duplicates
        try:
            acked_bytes = channel.receive(packet, self._pace(self._path), deliveries, now)
            if acked_bytes:
                self._sending.moved(acked_bytes, now)
                if self._path is not None:
                    self.paths.answered(self._path)
            if packet.kind <= Kind.FRAGMENT:
                self._receiving.moved(packet.charge_bytes, now)
                self._arrived_at[urgency_of(packet.flags)] = now
                self._receiving.update(bool(packet.flags & LOADED) and channel.inbox.is_path_limited, now)
                self._notice_repeats(kind, self.counters.duplicates > num_duplicates, channel, now)
        except ChannelBrokenError as error:
            self.counters.malformed += 1
            self.abandon(str(error))
        except ProtocolError:
            self.counters.malformed += 1
        self.counters.messages_received += len(deliveries)
        for delivery in deliveries:
            self._owner.delivered(self, delivery)

    def abandon(self, reason: str) -> None:
        """Give up the channel, go on in the next generation, and tell the peer why."""
        if self.generation >= MAX_GENERATION:
            self.end(f"peer {self.peer} has used up its channels")
            return
        self._restart(self.generation + 1, reason)
        self._open_channel().announce_reset(reason)
        self._owner.woke(self)

    def _notice_repeats(self, kind: str, is_duplicate: bool, channel: Channel, now: float) -> None:
        # The peer has not heard our acknowledgement, perhaps because our path to it is dead: answer where it speaks.
        if kind == self._path:
            self._repeats_since = None
        elif is_duplicate:
            self._transmit_on(kind, channel.header(Kind.ACK, now=now), None)
            if self._repeats_since is None:
                self._repeats_since = now
            elif now - self._repeats_since > DEAF_SECONDS and self._path is not None:
                self.paths.silent(self._path, now)
                self._repeats_since = None

    def pump(self) -> None:
        """Send all that may leave now."""
        if self._is_pumping or not self.is_alive:
            return
        self._is_pumping = True
        try:
            now = self._clock.monotonic()
            self._choose_path(now)
            self._send_probes(now)
            channel, pace = self._channel, self._pace(self._path)
            if channel is None:
                return
            self._is_refused = False
            if self._path is None:
                channel.inbox.stand_aside()
            elif self._is_blocked:
                channel.acknowledge(now, self._transmit)
            else:
                is_refused = not channel.pump(pace, now, self._transmit, admits_streams=self._admits_streams)
                self._is_blocked = is_refused and not self._is_refused
            if not self._is_refused:
                self._line.left(self)
            elif not channel.outbox.in_flight_bytes:
                channel.outbox.wait_anew(now)  # that nothing is answered is our own doing, and not the path's
            self._line.bulk_waits(self, self._path is not None and channel.outbox.has_bulk)
            self._sending.update(self._path is not None and channel.outbox.is_loaded, now, pace.least_rtt_seconds)
        finally:
            self._is_pumping = False

    def _send_probes(self, now: float) -> None:
        if self._channel is None:
            return
        for kind, number in self.paths.due_probes(now):
            self._transmit_on(kind, self._channel.header(Kind.PROBE, 0, number, now=now), None)

    def _leave_line(self) -> None:
        self._line.left(self)
        self._line.bulk_waits(self, False)

    def _admits_streams(self, has_bulk: bool) -> bool:
        is_admitted = self._line.admits_streams(self._clock.monotonic(), has_bulk=has_bulk)
        self._is_refused = self._is_refused or not (is_admitted or has_bulk)  # with bulk, that is what leaves next
        return is_admitted

    def _transmit(self, header: bytes, payload: Buffer | None, urgency: Urgency) -> bool:
        if self._path is None:
            return False
        now = self._clock.monotonic()
        if payload is not None and not self._line.admits(self, now):
            self._is_refused = True
            return False
        is_sent = self._transmit_on(self._path, header, payload)
        if is_sent:
            self._line.sent(self, len(header), len(payload) if payload is not None else 0, urgency, now)
        return is_sent

    def _transmit_on(self, kind: str, header: bytes, payload: Buffer | None) -> bool:
        carrier = self._carriers.get(kind)
        if carrier is None or not carrier.send(self.peer, header, payload):
            return False
        self.counters.packets_sent += 1
        self.counters.bytes_sent += len(header) + (len(payload) if payload is not None else 0)
        return True

    def tick(self) -> None:
        """Time has passed: look for what is overdue, then pump."""
        now = self._clock.monotonic()
        channel = self._channel
        if channel is not None:
            silent_at = self._silent_at(channel)
            if silent_at is not None and self._path is not None and now >= silent_at:
                self.paths.silent(self._path, now)
                channel.outbox.wait_anew(now)
            try:
                channel.tick(now)
            except ChannelBrokenError as error:
                self.abandon(str(error))
        self.pump()

    def next_at(self) -> float | None:
        """When `tick` has something to do though nothing happens; None: never."""
        if not self.is_alive or self._channel is None:
            return None
        due = [self.paths.next_at(), self._channel.inbox.tick_at()]
        if self._is_refused:
            due.append(self._line.look_again_at(self._clock.monotonic()))
        if self._path is not None:
            due += [self._channel.next_at(self._pace(self._path)), self._silent_at(self._channel)]
        return min((at for at in due if at is not None), default=None)

    def _silent_at(self, channel: Channel) -> float | None:
        """When to stop believing in the path."""
        since = channel.outbox.unanswered_since()
        if since is None or self._path is None:
            return None
        return since + max(self._config.silent_seconds, 2 * self._pace(self._path).timeout_seconds)

    def statistics(self) -> PeerStatistics:
        """How the link does."""
        now = self._clock.monotonic()
        pace = self._pace(self._path)
        outbox = self._channel.outbox if self._channel is not None else None
        return PeerStatistics(
            path=self._path,
            queue_bytes=outbox.queued_bytes if outbox else 0,
            in_flight_bytes=outbox.in_flight_bytes if outbox else 0,
            window_bytes=pace.window_bytes,
            rtt_seconds=pace.rtt_seconds or None,
            upload_bytes_per_second=self._upload.bytes_per_second(now),
            download_bytes_per_second=self._download.bytes_per_second(now),
            counters=self.counters,
        )
