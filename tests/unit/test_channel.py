"""Channels and all that they are made of, on virtual time: two real link tables, a memory network between them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from potluck.errors import ConfigurationError, ProtocolError
from potluck.hub.presence import State
from potluck.link.channel.budget import Ledger, ReceiveBudget
from potluck.link.channel.channel import Channel
from potluck.link.channel.congestion import INITIAL_WINDOW_BYTES, CongestionWindow
from potluck.link.channel.inbox import ChannelBrokenError, ReceivedMessage
from potluck.link.channel.packet import ACK_NOW, PACKET_BYTES, Kind, Packet, Urgency, decode
from potluck.link.channel.sendreceipt import SendReceipt
from potluck.link.counters import Counters, PeerStatistics
from potluck.link.limits import BULK_RESERVE_BYTES, INITIAL_CREDIT_BYTES, KIB, MIB, LinkConfig
from potluck.sim.linknode import LinkNode, presence_of
from potluck.sim.memorycarrier import Conditions, MemoryCarrier, MemoryNetwork
from potluck.sim.virtualclock import VirtualClock

CONFIG = LinkConfig()
SMALL = LinkConfig(
    window_bytes=2 * MIB,
    max_message_bytes=8 * MIB,
    max_frame_bytes=8 * MIB,
    queue_bytes=64 * MIB,
    receive_bytes=48 * MIB,
)


class Wire:
    """Two channels, and what they have sent; the test decides what becomes of it."""

    def __init__(self, config: LinkConfig = CONFIG) -> None:
        self.now = 100.0
        self.budget = ReceiveBudget(config)
        self.counters = (Counters(), Counters())
        self.ledgers = (Ledger(), Ledger())
        self.ends = tuple(self._channel(side, config) for side in (0, 1))
        self.paces = (CongestionWindow(config.max_in_flight_bytes), CongestionWindow(config.max_in_flight_bytes))
        self.sent: tuple[list[tuple[bytes, object]], list[tuple[bytes, object]]] = ([], [])
        self.deliveries: tuple[list[ReceivedMessage], list[ReceivedMessage]] = ([], [])

    def _channel(self, side: int, config: LinkConfig) -> Channel:
        return Channel(
            local_tag=1 + side,
            remote_tag=2 - side,
            generation=1,
            config=config,
            budget=self.budget,
            ledger=self.ledgers[side],
            counters=self.counters[side],
        )

    def pump(self, side: int = 0, *, accept: int = 1_000_000) -> list[Packet]:
        """What that side sends now, at most so many packets before the carrier is congested."""
        packets: list[Packet] = []

        def send(header: bytes, payload: object, _urgency: Urgency) -> bool:
            if len(packets) == accept:
                return False
            view = payload if isinstance(payload, memoryview) else None
            packets.append(decode(memoryview(header), view))
            return True

        self.ends[side].pump(self.paces[side], self.now, send)
        return packets

    def receive(self, side: int, *packets: Packet) -> list[ReceivedMessage]:
        """Hand packets to that side; the messages that came of it."""
        deliveries: list[ReceivedMessage] = []
        for packet in packets:
            self.ends[side].receive(packet, self.paces[side], deliveries, self.now)
        return deliveries

    def run(self, rounds: int = 200, seconds: float = 0.01) -> list[ReceivedMessage]:
        """Let everything arrive that is sent from now on; what arrives at the second end."""
        arrived: list[ReceivedMessage] = []
        for _ in range(rounds):
            for side in (0, 1):
                arrived += self.receive(1 - side, *self.pump(side)) if side == 0 else []
                if side == 1:
                    self.receive(0, *self.pump(1))
            self.now += seconds
        return arrived


def bodies(deliveries: list[ReceivedMessage]) -> list[bytes]:
    return [bytes(delivery.body) for delivery in deliveries]


# Messages and packets


def test_a_message_with_small_frames_is_one_packet() -> None:
    wire = Wire()
    receipt = wire.ends[0].send(b"body", [memoryview(b"one"), memoryview(b""), memoryview(b"three")])
    [packet] = wire.pump()
    [delivery] = wire.receive(1, packet)
    assert packet.kind == Kind.MESSAGE
    assert bytes(delivery.body) == b"body"
    assert [bytes(frame) for frame in delivery.frames] == [b"one", b"", b"three"]
    assert not receipt.settled
    wire.now += 1.0
    wire.receive(0, *wire.pump(1))
    assert receipt.acknowledged


def test_a_frame_of_one_packet_is_never_copied() -> None:
    wire = Wire()
    frame = bytearray(random.Random(1).randbytes(30 * KIB))
    wire.ends[0].send(b"body", [memoryview(frame)])
    [packet] = wire.pump()
    assert packet.payload.obj is frame, "sent as a slice of the caller's buffer"
    [delivery] = wire.receive(1, packet)
    assert delivery.frames[0].obj is packet.payload.obj, "received as a view of the carrier's"


def test_large_frames_are_cut_into_slices_and_joined_in_one_buffer() -> None:
    wire = Wire()
    frames = [random.Random(seed).randbytes(size) for seed, size in enumerate((3 * MIB + 1, 10, 700 * KIB, 20 * KIB))]
    wire.ends[0].send(b"body", [memoryview(frame) for frame in frames])
    packets: list[Packet] = []
    arrived: list[ReceivedMessage] = []
    for _ in range(100):
        batch = wire.pump()
        packets += batch
        arrived += wire.receive(1, *batch)
        wire.receive(0, *wire.pump(1))
        wire.now += 0.01
    [delivery] = arrived
    assert [bytes(frame) for frame in delivery.frames] == frames
    assert len({id(frame.obj) for frame in delivery.frames[:1]}) == 1
    assert all(len(packet.payload) <= PACKET_BYTES for packet in packets)
    large = [packet.payload for packet in packets if packet.payload]
    assert sum(map(len, large)) == sum(map(len, frames)) - 10, "nothing was sent twice; the small one stood in a header"


def test_lanes_keep_their_order_and_bulk_lets_the_others_pass() -> None:
    wire = Wire()
    for index in range(3):
        wire.ends[0].send(f"bulk {index}".encode(), [memoryview(bytes(200 * KIB))], urgency=Urgency.BULK)
    first = wire.pump()
    assert len(first) > 1, "the first bulk message is under way"
    for index in range(3):
        wire.ends[0].send(f"quick {index}".encode())
    arrived = wire.receive(1, *first) + wire.run()
    quick = [body for body in bodies(arrived) if body.startswith(b"quick")]
    assert bodies(arrived)[:3] == quick == [b"quick 0", b"quick 1", b"quick 2"]
    assert bodies(arrived)[3:] == [b"bulk 0", b"bulk 1", b"bulk 2"]


def test_a_packet_that_the_carrier_refused_is_the_next_to_leave() -> None:
    wire = Wire()
    for index in range(5):
        wire.ends[0].send(f"{index}".encode())
    arrived: list[ReceivedMessage] = []
    for _ in range(5):
        arrived += wire.receive(1, *wire.pump(accept=1))
    assert bodies(arrived) == [b"0", b"1", b"2", b"3", b"4"]
    assert wire.counters[0].packets_resent == 0


# Acknowledgements


def test_an_acknowledgement_waits_a_moment_for_company_then_goes_alone() -> None:
    wire = Wire()
    wire.ends[0].send(b"ping")
    wire.receive(1, *wire.pump())
    assert wire.pump(1) == [], "not at once"
    assert wire.ends[1].next_at(wire.paces[1]) == pytest.approx(wire.now + 0.005)
    wire.ends[1].send(b"pong")
    [packet] = wire.pump(1)
    assert (packet.kind, packet.ack) == (Kind.MESSAGE, 1)
    wire.now += 0.1
    assert wire.pump(1) == [], "it has gone with the message"


def test_a_full_window_asks_for_acknowledgements_at_once() -> None:
    wire = Wire()
    wire.ends[0].send(b"", [memoryview(bytes(4 * MIB))])
    packets = wire.pump()
    assert packets[-1].flags & ACK_NOW
    wire.receive(1, *packets)
    assert [packet.kind for packet in wire.pump(1)] == [Kind.ACK]
    assert sum(bool(packet.flags & ACK_NOW) for packet in packets) <= 5, "a few per window"


def test_an_acknowledgement_leaves_even_where_data_is_refused() -> None:
    wire = Wire()
    wire.ends[1].send(b"", [memoryview(bytes(100 * KIB))])
    wire.ends[0].send(b"", [memoryview(bytes(4 * MIB))])
    wire.receive(1, *wire.pump())
    taken: list[Packet] = []

    def take_small(header: bytes, payload: object, _urgency: Urgency) -> bool:
        if payload is None:
            taken.append(decode(memoryview(header), None))
        return payload is None

    assert not wire.ends[1].pump(wire.paces[1], wire.now, take_small)
    assert [packet.kind for packet in taken] == [Kind.ACK]
    assert wire.ends[1].acknowledge(wire.now, take_small)
    assert len(taken) == 1, "once"


def test_hurry_asks_for_what_is_not_acknowledged() -> None:
    wire = Wire()
    receipt = wire.ends[0].send(b"ping")
    wire.ends[0].hurry()
    packets = wire.pump()
    assert [packet.kind for packet in packets] == [Kind.MESSAGE, Kind.PROBE]
    assert packets[-1].sequence == 0
    wire.receive(1, *packets)
    echo = wire.ends[1].header(Kind.ECHO, now=wire.now)
    wire.receive(0, decode(memoryview(echo), None))
    assert receipt.acknowledged
    wire.ends[0].hurry()
    assert wire.pump() == [], "nothing is missing any more"


def test_acknowledging_what_was_never_sent_is_refused() -> None:
    wire = Wire()
    wire.ends[0].send(b"ping")
    wire.pump()
    [packet] = (decode(memoryview(wire.ends[1].header(Kind.ACK, now=0.0)), None),)
    with pytest.raises(ProtocolError, match="never sent"):
        wire.receive(0, replace(packet, ack=2))


# Loss


def test_a_lost_packet_alone_is_sent_again() -> None:
    wire = Wire()
    receipts = [wire.ends[0].send(f"{index}".encode()) for index in range(6)]
    packets = wire.pump()
    arrived = wire.receive(1, *packets[:2], *packets[3:])
    assert bodies(arrived) == [b"0", b"1"], "the rest waits for the hole to be filled"
    [ack] = wire.pump(1)
    wire.now += 0.5
    wire.receive(0, ack)
    [again] = wire.pump()
    assert again.sequence == 2
    arrived = wire.receive(1, again)
    assert bodies(arrived) == [b"2", b"3", b"4", b"5"]
    wire.receive(0, *wire.pump(1))
    assert all(receipt.acknowledged for receipt in receipts)
    assert wire.counters[0].packets_resent == 1
    assert wire.counters[1].duplicates == 0


def test_if_all_is_lost_the_oldest_goes_first_and_then_the_rest() -> None:
    wire = Wire()
    receipts = [wire.ends[0].send(f"{index}".encode()) for index in range(4)]
    assert len(wire.pump()) == 4
    wire.now += 1.5
    [again] = wire.pump()
    assert again.sequence == 0
    wire.now += 0.1
    wire.receive(1, again)
    wire.receive(0, *wire.pump(1))
    rest = wire.pump()
    assert [packet.sequence for packet in rest] == [1, 2, 3]
    wire.receive(1, *rest)
    wire.now += 0.1
    wire.receive(0, *wire.pump(1))
    assert all(receipt.acknowledged for receipt in receipts)


def test_an_acknowledgement_that_was_only_late_is_recognised() -> None:
    wire = Wire()
    wire.paces[0].least_rtt_seconds = wire.paces[0].rtt_seconds = 0.4
    for index in range(4):
        wire.ends[0].send(f"{index}".encode())
    packets = wire.pump()
    wire.now += 5.0
    assert [packet.sequence for packet in wire.pump()] == [0], "a timeout"
    wire.receive(1, packets[0])
    wire.now += 0.01
    wire.receive(0, *wire.pump(1))
    assert wire.pump() == [], "too early to be the answer to the repeat, so the others are under way as well"


def test_timeouts_become_longer() -> None:
    wire = Wire()
    wire.ends[0].send(b"anyone?")
    times = []
    for _ in range(6000):
        if wire.pump():
            times.append(wire.now)
        wire.now += 0.01
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps[0] == pytest.approx(1.0, abs=0.02)
    assert gaps == sorted(gaps, key=lambda gap: round(gap, 1))
    assert gaps[-1] == pytest.approx(8.0, abs=0.02)


def test_after_a_change_of_path_all_that_is_unacknowledged_goes_again_and_arrives_once() -> None:
    wire = Wire()
    receipts = [wire.ends[0].send(f"{index}".encode()) for index in range(5)]
    packets = wire.pump()
    arrived = wire.receive(1, *packets[:3])
    wire.ends[0].path_changed(wire.now)
    again = wire.pump()
    assert [packet.sequence for packet in again] == [0, 1, 2, 3, 4]
    arrived += wire.receive(1, *again, *packets[3:])
    assert bodies(arrived) == [b"0", b"1", b"2", b"3", b"4"]
    assert wire.counters[1].duplicates == 5
    wire.receive(0, *wire.pump(1))
    assert all(receipt.acknowledged for receipt in receipts)


# Credit


def test_a_slow_application_stops_its_sender() -> None:
    wire = Wire(SMALL)
    for _ in range(100):
        wire.ends[0].send(b"", [memoryview(bytes(100 * KIB))])
    arrived = wire.run()
    assert SMALL.window_bytes - 300 * KIB <= wire.ledgers[1].held_bytes <= SMALL.window_bytes
    assert wire.run() == [], "not one more while nothing is taken"
    for delivery in arrived[:5]:
        delivery.release()
        delivery.release()
    assert len(wire.run()) == 5
    arrived += wire.run()
    for delivery in arrived:
        delivery.release()


def test_credit_that_got_lost_is_asked_for() -> None:
    wire = Wire(SMALL)
    for _ in range(40):
        wire.ends[0].send(b"", [memoryview(bytes(100 * KIB))])
    arrived = wire.run()
    for delivery in arrived:
        delivery.release()
    assert [packet.kind for packet in wire.pump(1)] == [Kind.ACK], "the credit, which nobody receives"
    wire.now += 5.0
    [probe] = wire.pump()
    assert probe.kind == Kind.PROBE
    echo = wire.ends[1].header(Kind.ECHO, now=wire.now)
    wire.receive(0, decode(memoryview(echo), None))
    assert wire.pump()


def test_bulk_leaves_some_credit_for_the_others() -> None:
    wire = Wire(SMALL)
    for _ in range(60):
        wire.ends[0].send(b"bulk", [memoryview(bytes(60 * KIB))], urgency=Urgency.BULK)
    wire.run()
    assert wire.ledgers[1].held_bytes <= SMALL.window_bytes - BULK_RESERVE_BYTES
    wire.ends[0].send(b"urgent", [memoryview(bytes(60 * KIB))])
    assert bodies(wire.run()) == [b"urgent"]


def test_a_message_larger_than_the_window_gets_memory_of_its_own() -> None:
    wire = Wire(SMALL)
    receipt = wire.ends[0].send(b"large", [memoryview(bytes(8 * MIB - 100))])
    [delivery] = wire.run()
    assert receipt.acknowledged
    assert wire.budget.reserved_bytes >= 8 * MIB
    assert wire.ledgers[1].held_bytes == 0
    delivery.release()
    assert wire.budget.reserved_bytes == 0
    assert wire.ledgers[1].reserved_bytes == 0


def test_one_peer_does_not_get_all_the_memory_for_large_messages() -> None:
    wire = Wire(SMALL)
    for index in range(4):
        wire.ends[0].send(f"{index}".encode(), [memoryview(bytes(6 * MIB))])

    def ticking() -> list[ReceivedMessage]:
        arrived: list[ReceivedMessage] = []
        for _ in range(100):
            wire.ends[1].tick(wire.now)
            arrived += wire.run(1)
        return arrived

    arrived = ticking()
    assert bodies(arrived) == [b"0"]
    for index in (1, 2, 3):
        arrived[-1].release()
        arrived += ticking()
        assert bodies(arrived)[-1] == f"{index}".encode()


def test_large_messages_of_several_peers_take_turns_and_all_complete() -> None:
    clock, network = VirtualClock(), MemoryNetwork()
    network = MemoryNetwork(schedule=clock.schedule)
    network.set_conditions(Conditions(delay_seconds=0.005, bytes_per_second=50e6), kind="direct")
    receiver = LinkNode("receiver", network, clock, config=SMALL)
    senders = [LinkNode(f"sender {index}", network, clock, config=SMALL) for index in range(8)]
    receipts = []
    for sender in senders:
        receiver.table.update_peer(sender.presence())
        sender.table.update_peer(receiver.presence())
        receipts.append(sender.send("receiver", b"large", [bytes(8 * MIB - 100)]))
    for _ in range(100):
        clock.advance(0.05)
        assert receiver.table.budget.reserved_bytes <= SMALL.receive_bytes // 2
    assert all(receipt.acknowledged for receipt in receipts)
    assert receiver.table.budget.reserved_bytes == 0


def test_who_dies_waiting_for_memory_leaves_the_queue() -> None:
    budget, ledger = ReceiveBudget(SMALL), Ledger()
    assert budget.try_reserve(SMALL.receive_bytes // 2)
    wire = Wire(SMALL)
    channel = wire.ends[1]
    channel.inbox._budget = budget  # all of whose memory is taken
    wire.ends[0].send(b"large", [memoryview(bytes(4 * MIB))])
    wire.receive(1, *wire.pump())
    assert not budget.try_reserve(0), "somebody waits"
    channel.fail(ConnectionError("gone"))
    budget.release(1 * MIB)
    assert budget.reserve(ledger, 1 * MIB)


def test_a_message_that_began_in_a_large_window_ends_in_a_small_one() -> None:
    wire = Wire(replace(SMALL, window_bytes=8 * MIB))
    wire.ends[0].send(b"", [memoryview(bytes(2 * MIB - 100))])
    wire.receive(1, *wire.pump())
    wire.budget.add_channels(1000)
    assert wire.budget.window_bytes == INITIAL_CREDIT_BYTES
    assert len(wire.run()) == 1


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [([bytes(9 * MIB)], "too large"), ([b"x"] * 5, "5 frames"), ([bytes(3 * MIB)] * 3, "exceeds the limit")],
)
def test_a_message_beyond_the_receivers_limits_breaks_the_channel(frames: list[bytes], complaint: str) -> None:
    wire = Wire(replace(SMALL, max_frames=4))
    wire.ends[0].send(b"", [memoryview(frame) for frame in frames])
    with pytest.raises(ChannelBrokenError, match=complaint):
        wire.receive(1, *wire.pump())
    assert wire.counters[1].refused == 1


def test_giving_up_settles_every_receipt_and_returns_all_memory() -> None:
    wire = Wire(SMALL)
    receipts = [wire.ends[0].send(b"", [memoryview(bytes(4 * MIB))], urgency=urgency) for urgency in Urgency]
    wire.receive(1, *wire.pump())
    error = ConnectionError("gone")
    assert wire.ends[0].fail(error) == len(Urgency)
    assert [receipt.error for receipt in receipts] == [error, error, error]
    assert wire.budget.reserved_bytes
    wire.ends[1].fail(error)
    assert wire.budget.reserved_bytes == wire.ledgers[1].held_bytes == wire.ledgers[1].reserved_bytes == 0


# Pace


def rush(
    conditions: Conditions, total: int, *, message: int = 4 * MIB, seconds: float = 600.0, config: LinkConfig = CONFIG
) -> tuple[float, list[PeerStatistics], PeerStatistics]:
    """Send so many bytes over such a path: how long it took, the sender's statistics on the way, the receiver's."""
    clock = VirtualClock()
    network = MemoryNetwork(schedule=clock.schedule, seed=3)
    network.set_conditions(conditions, kind="relay")
    one, other = (LinkNode(name, network, clock, kinds=["relay"], config=config) for name in ("one", "other"))
    one.table.update_peer(other.presence())
    other.table.update_peer(one.presence())
    frame = bytes(message)
    receipts = [one.send("other", b"", [frame]) for _ in range(total // message)]
    start, seen = clock.monotonic(), []
    while not all(receipt.settled for receipt in receipts) and clock.monotonic() - start < seconds:
        clock.advance(0.02)
        seen.append(one.table.links["other"].statistics())
    assert all(receipt.acknowledged for receipt in receipts)
    return clock.monotonic() - start, seen, other.table.links["one"].statistics()


@pytest.mark.parametrize(
    ("rate", "delay", "total"),
    [(125e3, 0.05, 2 * MIB), (500e3, 0.02, 8 * MIB), (12.5e6, 0.025, 64 * MIB), (1e9, 0.0002, 256 * MIB)],
)
def test_the_window_fills_the_path_and_little_more(rate: float, delay: float, total: int) -> None:
    conditions = Conditions(delay_seconds=delay, bytes_per_second=rate)
    seconds, seen, receiver = rush(conditions, total, message=1 * MIB)
    assert seconds < 1.15 * total / rate + 10 * delay
    longest_queue = max(statistics.in_flight_bytes for statistics in seen) / rate - 2 * delay
    assert longest_queue < max(0.4, 1.1 * INITIAL_WINDOW_BYTES / rate)
    assert seen[-1].upload_bytes_per_second == pytest.approx(rate, rel=0.05)
    assert receiver.download_bytes_per_second == pytest.approx(rate, rel=0.05)
    assert seen[-1].counters.packets_resent == 0


def test_the_queue_does_not_grow_with_time() -> None:
    """Two minutes on a full path: our own queue must not be taken for the path's length."""
    conditions = Conditions(delay_seconds=0.02, bytes_per_second=1.25e6)
    _, seen, _ = rush(conditions, 128 * MIB, seconds=200.0, config=replace(CONFIG, queue_bytes=256 * MIB))
    half = len(seen) // 2
    early, late = (max(s.in_flight_bytes for s in part) for part in (seen[half // 2 : half], seen[half:]))
    assert late <= 1.2 * early
    assert late / 1.25e6 < 0.4


def test_a_path_that_becomes_longer_is_filled_again() -> None:
    pair = Pair(replace(CONFIG, queue_bytes=512 * MIB))
    pair.network.set_conditions(Conditions(delay_seconds=0.005, bytes_per_second=12.5e6), kind="direct")
    pair.meet()
    for _ in range(120):
        pair.send(b"", 4 * MIB)
    pair.clock.advance(5.0)
    pair.network.set_conditions(Conditions(delay_seconds=0.2, bytes_per_second=12.5e6), kind="direct")
    pair.clock.advance(20.0)
    before = pair.other.table.counters().bytes_received
    pair.clock.advance(8.0)
    assert pair.other.table.counters().bytes_received - before > 0.8 * 8.0 * 12.5e6


def test_a_congested_carrier_is_not_a_broken_one() -> None:
    conditions = Conditions(delay_seconds=0.01, bytes_per_second=5e6, queue_bytes=100 * KIB)
    _, seen, receiver = rush(conditions, 16 * MIB, message=1 * MIB)
    assert seen[-1].counters.path_changes == 0
    assert receiver.counters.messages_received == 16


def test_one_percent_loss_is_survived_without_repeating_much() -> None:
    conditions = Conditions(delay_seconds=0.025, bytes_per_second=12.5e6, loss=0.01)
    _, seen, receiver = rush(conditions, 64 * MIB, message=1 * MIB)
    assert 0 < seen[-1].counters.packets_resent < 0.05 * seen[-1].counters.packets_sent
    assert receiver.counters.messages_received == 64


# Lives and paths


class Pair:
    """Two nodes that know each other."""

    def __init__(self, config: LinkConfig = CONFIG) -> None:
        self.clock = VirtualClock()
        self.network = MemoryNetwork(schedule=self.clock.schedule)
        for kind in ("direct", "relay"):
            self.network.set_conditions(Conditions(delay_seconds=0.01, bytes_per_second=50e6), kind=kind)
        self.one = LinkNode("one", self.network, self.clock, config=config)
        self.other = LinkNode("other", self.network, self.clock, config=config)

    def meet(self) -> None:
        self.one.table.update_peer(self.other.presence())
        self.other.table.update_peer(self.one.presence())

    def send(self, body: bytes = b"hello", size: int = 0) -> SendReceipt:
        return self.one.send("other", body, [bytes(size)])

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> float:
        """Let time pass until the condition holds; how much that was."""
        start = self.clock.monotonic()
        while not condition():
            assert self.clock.monotonic() - start < seconds, "it never came true"
            self.clock.advance(0.005)
        return self.clock.monotonic() - start

    @property
    def path(self) -> str | None:
        return self.one.table.links["other"].statistics().path


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    pair.meet()
    return pair


def test_packets_may_come_before_the_roster_knows_their_sender() -> None:
    pair = Pair()
    pair.other.table.update_peer(presence_of("one", "another life"))
    pair.one.table.update_peer(pair.other.presence())
    receipt = pair.send()
    pair.clock.advance(0.1)
    assert pair.other.received == []
    assert pair.other.table.waiting_bytes > 0, "they are kept"
    pair.other.table.update_peer(pair.one.presence())
    pair.clock.advance(0.1)
    assert receipt.acknowledged


def test_packets_for_an_earlier_life_of_ours_are_dropped(pair: Pair) -> None:
    receipt = pair.send(b"to the first life")
    pair.clock.advance(0.5)
    header = pair.one.table.links["other"]._open_channel().header(Kind.PROBE, now=0.0)
    pair.other.restart("2")
    pair.other.table.update_peer(pair.one.presence())
    before = pair.other.table.counters()
    pair.other.table.packet_arrived(pair.other.table.carriers["direct"], "one", memoryview(header), None)
    after = pair.other.table.counters()
    assert (after.stale, after.packets_received) == (before.stale + 1, before.packets_received)
    assert receipt.acknowledged


def test_a_restart_fails_what_is_pending_and_the_next_life_starts_clean(pair: Pair) -> None:
    delivered = pair.send(b"first")
    pair.clock.advance(1.0)
    pending = pair.send(b"pending", 8 * MIB)
    pair.clock.advance(0.02)
    pair.other.restart("2")
    assert not pending.settled, "one does not know it yet"
    pair.one.table.update_peer(pair.other.presence())
    assert delivered.acknowledged
    assert pending.error is not None
    assert "restarted" in str(pending.error)
    receipt = pair.send(b"second")
    pair.clock.advance(0.2)
    assert not receipt.settled, "the new life does not know us yet"
    pair.other.table.update_peer(pair.one.presence())
    pair.clock.advance(2.0)
    assert receipt.acknowledged
    assert [body for _, body, _ in pair.other.received] == [b"first", b"second"]


def test_a_peer_that_was_not_dead_after_all_is_told_that_we_had_given_it_up(pair: Pair) -> None:
    there = pair.other.send("one", b"from other", [bytes(8 * MIB)])
    pair.clock.advance(0.05)
    pair.one.table.update_peer(presence_of("other", "1", "dead", reason="silent"))
    pair.clock.advance(0.5)
    assert not there.settled
    pair.one.table.update_peer(pair.other.presence())
    pair.until(lambda: there.settled)
    assert "anew" in str(there.error)
    assert pair.send(b"again").settled is False
    assert pair.other.send("one", b"again").settled is False
    pair.clock.advance(1.0)
    assert [body for _, body, _ in pair.other.received] == [b"again"]
    assert [body for _, body, _ in pair.one.received] == [b"again"]


def test_a_refusal_reaches_the_sender_with_its_reason() -> None:
    pair = Pair()
    pair.other = LinkNode("other", pair.network, pair.clock, config=replace(CONFIG, max_message_bytes=1 * MIB))
    pair.meet()
    receipt = pair.send(b"", 2 * MIB)
    pair.until(lambda: receipt.settled)
    assert "exceeds the limit" in str(receipt.error)
    assert pair.other.table.counters().refused == 1
    after = pair.send(b"fine")
    pair.until(lambda: after.acknowledged)


def test_death_and_leaving_fail_what_is_pending(pair: Pair) -> None:
    states: tuple[State, ...] = ("dead", "left")
    for state in states:
        pair.meet()
        receipt = pair.send(b"", 8 * MIB)
        pair.one.table.update_peer(presence_of("other", "1", state, reason="its connection closed"))
        assert f"{state} (its connection closed)" in str(receipt.error)


def test_direct_is_preferred_and_relay_takes_over_without_loss_or_repeat(pair: Pair) -> None:
    receipts = [pair.send(f"{index}".encode(), 1 * MIB) for index in range(40)]
    pair.clock.advance(0.2)
    assert pair.path == "direct"
    pair.network.cut("direct", "one", "other")
    pair.clock.advance(0.1)
    assert pair.path == "relay"
    pair.network.mend("direct", "one", "other")
    pair.until(lambda: pair.path == "direct", 5.0)
    pair.until(lambda: all(receipt.acknowledged for receipt in receipts))
    assert [int(body) for _, body, _ in pair.other.received] == list(range(40))
    counters = pair.one.table.counters()
    assert counters.path_changes == 2
    assert counters.packets_resent > 0
    assert pair.other.table.counters().duplicates <= counters.packets_resent


def test_a_path_that_goes_silent_is_left_and_found_again(pair: Pair) -> None:
    first = pair.send()
    pair.until(lambda: first.acknowledged)
    silent = Conditions(is_silent=True)
    pair.network.set_conditions(silent, kind="direct", sender="one", receiver="other")
    second = pair.send()
    assert pair.until(lambda: second.acknowledged) < 2 * CONFIG.silent_seconds
    assert pair.path == "relay"
    pair.network.set_conditions(Conditions(delay_seconds=0.01), kind="direct", sender="one", receiver="other")
    pair.until(lambda: pair.path == "direct", 40.0)
    assert len(pair.other.received) == 2


def test_a_path_that_is_deaf_one_way_only_is_noticed_by_both(pair: Pair) -> None:
    """Data arrives, its acknowledgements vanish: the receiver must learn to answer elsewhere."""
    pair.network.set_conditions(Conditions(is_silent=True), kind="direct", sender="other", receiver="one")
    for index in range(10):
        pair.send(f"{index}".encode())
        pair.until(lambda: not pair.one.table.links["other"].queued_bytes, 10.0)
    assert [int(body) for _, body, _ in pair.other.received] == list(range(10))
    last = pair.send(b"10")
    assert pair.until(lambda: last.acknowledged) < 0.2


def test_a_flapping_path_does_not_hurt() -> None:
    pair = Pair()
    pair.meet()
    receipts = []
    for index in range(200):
        receipts.append(pair.send(f"{index}".encode(), 50 * KIB))
        if index % 4 == 0:
            pair.network.cut("direct", "one", "other")
        elif index % 4 == 1:
            pair.network.mend("direct", "one", "other")
        pair.clock.advance(0.1)
    pair.clock.advance(1.0)
    assert all(receipt.acknowledged for receipt in receipts)
    assert [int(body) for _, body, _ in pair.other.received] == list(range(200))
    assert pair.one.table.counters().path_changes <= 15, "of a hundred that there could have been"


def test_without_any_path_messages_wait(pair: Pair) -> None:
    for kind in ("direct", "relay"):
        pair.network.cut(kind, "one", "other")
    receipt = pair.send()
    pair.clock.advance(30.0)
    assert not receipt.settled
    assert pair.path is None
    pair.network.mend("relay", "one", "other")
    pair.until(lambda: receipt.acknowledged, 1.0)


def test_peers_that_are_gone_are_forgotten_in_time() -> None:
    clock = VirtualClock()
    node = LinkNode("one", MemoryNetwork(schedule=clock.schedule), clock)
    for index in range(1500):
        node.table.update_peer(presence_of(f"peer {index}", "1"))
        node.send(f"peer {index}", b"hello")
        node.table.update_peer(presence_of(f"peer {index}", "1", "left"))
    assert len(node.table.links) <= 1024
    assert node.table.counters().messages_lost == 1500


def test_two_carriers_of_one_kind_are_refused(pair: Pair) -> None:
    carrier = MemoryCarrier(MemoryNetwork(), "one", kind="direct", events=pair.one.table)
    with pytest.raises(ConfigurationError, match="already"):
        pair.one.table.add_carrier(carrier)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_frames": 0},
        {"max_frames": 2000},
        {"queue_bytes": 1 * MIB},
        {"window_bytes": 1000},
        {"stream_window_bytes": 1000},
        {"receive_bytes": 100 * MIB},
        {"max_in_flight_bytes": 1},
        {"held_bytes": -1},
        {"silent_seconds": 0.0},
        {"settle_seconds": -1.0},
    ],
)
def test_a_configuration_that_could_not_work_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        LinkConfig(**wrong)  # type: ignore[arg-type]
