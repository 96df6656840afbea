"""Relayed paths, on a wire in memory and a clock of our own: greeting, signs of life, credit, hostile bytes."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.hub.bulk.wire import WireEvents
from potluck.hub.patterns import covers
from potluck.hub.presence import Card, Presence, State
from potluck.hub.subjects import Subjects
from potluck.link.carrier import Buffer, Carrier
from potluck.link.channel.packet import HUB_PAYLOAD_BYTES
from potluck.link.direct.greeting import LinkKeys
from potluck.link.relay.carrier import RelayCarrier, RelayConfig
from potluck.link.relay.packet import RelayKind, encode_hello, encode_prefix
from potluck.messages import PROTOCOL_VERSION

SUBJECTS = Subjects("test")
PACKET = bytes(range(256)) * 2000  # half a megabyte
KEYS: defaultdict[str, LinkKeys] = defaultdict(LinkKeys.generate)  # everybody's, by name


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class MemoryHub:
    """Delivers what wires publish when `run` is called, in order per wire."""

    def __init__(self) -> None:
        self.wires: dict[str, MemoryWire] = {}
        self.queue: deque[tuple[str, bytes]] = deque()
        self.num_published = 0

    def run(self) -> None:
        while self.queue:
            self.deliver(*self.queue.popleft())

    def deliver(self, subject: str, payload: bytes) -> None:
        wire = self.wires.get(subject.split(".")[-2])
        if wire is not None and wire.connected and wire.events is not None and wire.hears(subject):
            wire.events.message_arrived(subject, memoryview(payload))


class MemoryWire:
    def __init__(self, hub: MemoryHub, peer: str) -> None:
        self.hub = hub
        self.events: WireEvents | None = None
        self.connected = False
        self.congested = False
        self.closed = False
        self.max_payload_bytes = HUB_PAYLOAD_BYTES
        self.subjects: list[str] = []
        hub.wires[peer] = self

    def open(self, subjects: Collection[str], events: WireEvents) -> None:
        self.events = events
        self.listen(subjects)
        self.connect()

    def listen(self, subjects: Collection[str]) -> None:
        self.subjects = list(subjects)

    def hears(self, subject: str) -> bool:
        return any(covers(pattern, subject) for pattern in self.subjects)

    def connect(self) -> None:
        assert self.events is not None
        self.connected = True
        self.events.wire_connected()

    def lose(self) -> None:
        assert self.events is not None
        self.connected = False
        self.events.wire_lost("cut")

    def relieve(self) -> None:
        assert self.events is not None
        self.congested = False
        self.events.wire_writable()

    def is_writable(self) -> bool:
        return self.connected and not self.congested

    def publish(self, subject: str, parts: Sequence[Buffer], *, urgent: bool = False) -> bool:
        if not self.connected or (self.congested and not urgent):
            return False
        self.hub.num_published += 1
        self.hub.queue.append((subject, b"".join(parts)))
        return True

    def statistics(self) -> Mapping[str, int]:
        return {"connected": int(self.connected)}

    async def close(self) -> None:
        self.closed = True


class Owner:
    """Writes down what a carrier tells."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.packets: list[tuple[str, bytes, bytes | None]] = []

    def packet_arrived(self, carrier: Carrier, peer: str, header: memoryview, payload: memoryview | None) -> None:
        self.packets.append((peer, bytes(header), None if payload is None else bytes(payload)))

    def path_opened(self, carrier: Carrier, peer: str) -> None:
        self.log.append(("opened", peer))

    def path_closed(self, carrier: Carrier, peer: str, reason: str) -> None:
        self.log.append(("closed", peer, reason))

    def path_writable(self, carrier: Carrier, peer: str) -> None:
        self.log.append(("writable", peer))


class Node:
    def __init__(self, hub: MemoryHub, peer: str, clock: ManualClock, config: RelayConfig | None = None) -> None:
        self.peer = peer
        self.owner = Owner()
        self.wire = MemoryWire(hub, peer)
        self.carrier = RelayCarrier(self.owner, peer, SUBJECTS, self.wire, KEYS[peer], config=config, clock=clock)

    def meet(
        self,
        peer: str,
        state: State = "alive",
        *,
        session: str = "s1",
        protocol: int = PROTOCOL_VERSION,
        link_key: str | None = None,
    ) -> None:
        key = KEYS[peer].link_key if link_key is None else link_key
        card = Card(session=session, role="trainer", protocol=protocol, link_key=key)
        self.carrier.update_peer(Presence(peer=peer, card=card, state=state, host="127.0.0.1", person="p"))

    def is_open(self, peer: str) -> bool:
        return self.carrier.why_no_path(peer) == ""

    @property
    def kinds(self) -> list[str]:
        return [entry[0] for entry in self.owner.log]


class Pair:
    def __init__(self, config: RelayConfig | None = None) -> None:
        self.clock = ManualClock()
        self.hub = MemoryHub()
        self.alice = Node(self.hub, "ALICE", self.clock, config)
        self.bob = Node(self.hub, "BOB", self.clock, config)

    async def start(self, *, meet: bool = True) -> None:
        for node, other in ((self.alice, self.bob), (self.bob, self.alice)):
            await node.carrier.start()
            if meet:
                node.meet(other.peer)
        self.hub.run()

    def pass_time(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now += 0.1
            for node in (self.alice, self.bob):
                node.carrier.tick()
            self.hub.run()

    def transfer(self, number: int) -> int:
        """Send up to so many packets from alice to bob, without delivering anything in between."""
        for sent in range(number):
            if not self.alice.carrier.send("BOB", b"h%d" % sent, PACKET):
                return sent
        return number

    async def close(self) -> None:
        await self.alice.carrier.close()
        await self.bob.carrier.close()


@pytest.fixture
async def pair():
    pair = Pair()
    yield pair
    await pair.close()


async def test_a_path_opens_when_both_have_heard_each_other(pair: Pair) -> None:
    await pair.start(meet=False)
    assert not pair.alice.carrier.send("BOB", b"h", None)
    pair.alice.meet("BOB")
    pair.hub.run()
    assert not pair.alice.is_open("BOB")
    assert pair.bob.carrier.statistics()["strangers"] >= 1
    pair.bob.meet("ALICE")
    pair.hub.run()
    assert pair.alice.owner.log == [("opened", "BOB")]
    assert pair.bob.owner.log == [("opened", "ALICE")]
    assert pair.alice.carrier.statistics()["paths"] == 1


async def test_in_a_large_roster_a_peer_is_greeted_when_there_is_something_to_send(pair: Pair) -> None:
    await pair.start(meet=False)
    for node in (pair.alice, pair.bob):
        for number in range(RelayConfig().eager_peers):
            node.meet(f"OTHER{number}")
    pair.pass_time(60)
    published = pair.hub.num_published
    pair.alice.meet("BOB")
    pair.bob.meet("ALICE")
    pair.hub.run()
    pair.alice.wire.lose()
    pair.alice.wire.connect()
    pair.hub.run()
    assert pair.hub.num_published == published + RelayConfig().eager_peers  # all but bob are greeted once more
    assert not pair.alice.is_open("BOB")
    assert not pair.alice.carrier.send("BOB", b"h", None)
    pair.hub.run()
    assert pair.alice.is_open("BOB")
    assert pair.bob.is_open("ALICE")
    assert pair.alice.carrier.send("BOB", b"h", None)


async def test_packets_arrive_in_order_with_and_without_payload(pair: Pair) -> None:
    await pair.start()
    sent: list[tuple[bytes, bytes | None]] = [
        (b"one", None),
        (b"", b"two"),
        (b"three", b""),
        (b"4" * 300, PACKET[:999]),
    ]
    for header, payload in sent:
        assert pair.alice.carrier.send("BOB", header, payload)
    pair.hub.run()
    assert pair.bob.owner.packets == [("ALICE", header, payload) for header, payload in sent]
    figures = pair.alice.carrier.statistics()
    assert figures["packets_sent"] == 4
    assert figures["bytes_sent"] == pair.bob.carrier.statistics()["bytes_received"] == 3 + 3 + 5 + 300 + 999


async def test_a_payload_of_wide_items_is_sent_as_bytes(pair: Pair) -> None:
    await pair.start()
    wide = memoryview(bytearray(range(80))).cast("d")
    assert pair.alice.carrier.send("BOB", b"h", wide)
    pair.hub.run()
    assert pair.bob.owner.packets == [("ALICE", b"h", bytes(range(80)))]


async def test_an_idle_path_is_silent(pair: Pair) -> None:
    await pair.start()
    published = pair.hub.num_published
    pair.pass_time(60)
    assert pair.hub.num_published == published


async def test_a_peer_that_is_not_there_is_greeted_ever_more_seldom(pair: Pair) -> None:
    pair.bob.wire.connected = False
    await pair.alice.carrier.start()
    pair.alice.meet("BOB")
    pair.hub.run()
    pair.pass_time(60)
    assert 5 <= pair.hub.num_published <= 14
    await pair.bob.carrier.start()
    pair.bob.meet("ALICE")
    pair.hub.run()
    assert pair.alice.is_open("BOB")


async def test_in_a_large_roster_a_path_is_made_when_it_is_wanted() -> None:
    pair = Pair(RelayConfig(eager_peers=0))
    await pair.start()
    pair.pass_time(30)
    assert pair.hub.num_published == 0
    assert not pair.alice.carrier.send("BOB", b"h", None)  # it refuses, and begins
    pair.hub.run()
    assert pair.alice.kinds == pair.bob.kinds == ["opened"]
    pair.bob.wire.lose()
    pair.bob.wire.connect()
    pair.hub.run()
    assert pair.alice.kinds == pair.bob.kinds == ["opened", "closed", "opened"]
    await pair.close()


async def test_who_wants_to_send_does_not_wait_for_a_greeting_of_long_ago(pair: Pair) -> None:
    await pair.alice.carrier.start()
    pair.alice.meet("BOB")
    pair.hub.run()
    pair.pass_time(60)  # greetings have become rare
    await pair.bob.carrier.start()
    pair.bob.meet("ALICE")
    pair.hub.queue.clear()  # its own greeting gets lost
    assert not pair.alice.carrier.send("BOB", b"h", None)
    pair.hub.run()
    assert pair.alice.is_open("BOB")


async def test_the_loss_of_our_wire_closes_all_paths_and_its_return_opens_them(pair: Pair) -> None:
    await pair.start()
    pair.bob.wire.lose()
    assert pair.bob.kinds == ["opened", "closed"]
    assert "hub is lost: cut" in pair.bob.owner.log[1][2]
    assert not pair.bob.carrier.send("ALICE", b"h", None)
    assert pair.alice.kinds == ["opened"]  # it cannot know yet
    pair.bob.wire.connect()
    pair.hub.run()
    assert pair.bob.kinds == ["opened", "closed", "opened"]
    assert pair.alice.kinds == ["opened", "closed", "opened"]
    assert pair.alice.carrier.send("BOB", b"h", None)
    pair.hub.run()
    assert pair.bob.owner.packets == [("ALICE", b"h", None)]


async def test_a_path_that_has_gone_silent_is_closed(pair: Pair) -> None:
    await pair.start()
    pair.hub.wires["BOB"].connected = False  # the hub has lost it, and nobody says so
    assert pair.alice.carrier.send("BOB", b"h", None)
    pair.pass_time(9.5)
    assert pair.alice.kinds == ["opened"]
    pair.pass_time(1)
    assert pair.alice.kinds == ["opened", "closed"]
    pair.bob.wire.connected = True
    pair.pass_time(11)
    assert pair.alice.is_open("BOB")
    assert pair.bob.is_open("ALICE")


async def test_a_path_on_which_the_other_answers_stays_open(pair: Pair) -> None:
    await pair.start()
    for _ in range(20):
        assert pair.alice.carrier.send("BOB", b"h", None)
        pair.pass_time(3)
    assert pair.alice.kinds == pair.bob.kinds == ["opened"]


@pytest.mark.parametrize("state", ["dead", "left"])
async def test_the_roster_ends_a_path(pair: Pair, state: State) -> None:
    await pair.start()
    pair.alice.meet("BOB", state)
    assert pair.alice.kinds == ["opened", "closed"]
    assert not pair.alice.carrier.send("BOB", b"h", None)
    pair.bob.carrier.send("ALICE", b"h", None)
    pair.hub.run()
    assert pair.alice.owner.packets == []
    pair.alice.meet("BOB")
    pair.hub.run()
    assert pair.alice.is_open("BOB")


async def test_a_suspect_keeps_its_path_and_a_new_session_gets_a_new_one(pair: Pair) -> None:
    await pair.start()
    pair.alice.meet("BOB", "suspect")
    pair.alice.meet("BOB")
    pair.hub.run()
    assert pair.alice.kinds == ["opened"]
    pair.alice.meet("BOB", session="s2")
    pair.hub.run()
    assert pair.alice.kinds == pair.bob.kinds == ["opened", "closed", "opened"]


async def test_a_peer_of_another_version_gets_no_path(pair: Pair) -> None:
    await pair.start(meet=False)
    pair.bob.meet("ALICE")
    pair.alice.meet("BOB", protocol=PROTOCOL_VERSION + 1)
    pair.hub.run()
    assert not pair.alice.is_open("BOB")


async def test_a_hub_that_takes_only_small_messages_is_not_used(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.bob.wire.max_payload_bytes = 1000
    await pair.start()
    assert not pair.alice.is_open("BOB")
    assert "max_payload" in caplog.text


# Congestion and credit


async def test_a_congested_wire_refuses_and_says_when_it_is_free(pair: Pair) -> None:
    await pair.start()
    pair.alice.wire.congested = True
    assert not pair.alice.carrier.send("BOB", b"h", b"x")
    assert pair.alice.kinds == ["opened"]
    pair.alice.wire.relieve()
    assert pair.alice.kinds == ["opened", "writable"]
    pair.alice.wire.relieve()
    assert pair.alice.kinds == ["opened", "writable"]


async def test_a_sender_without_credit_waits_and_goes_on(pair: Pair) -> None:
    await pair.start()
    assert pair.transfer(1) == 0
    pair.hub.run()
    assert pair.alice.kinds == ["opened", "writable"]
    sent = pair.transfer(100)
    assert 4 <= sent <= 9  # the least budget
    assert pair.bob.owner.packets == []
    pair.hub.run()
    assert len(pair.bob.owner.packets) == sent
    assert pair.transfer(1) == 1
    assert pair.alice.carrier.statistics()["waits_for_credit"] == 2


async def test_unused_credit_is_given_back(pair: Pair) -> None:
    await pair.start()
    pair.transfer(1)
    pair.hub.run()
    assert pair.bob.carrier.statistics()["credited_bytes"] > 0
    pair.pass_time(1)
    assert pair.bob.carrier.statistics()["credited_bytes"] == 0
    assert pair.transfer(1) == 0  # it has to ask again
    pair.hub.run()
    assert pair.transfer(1) == 1


async def test_a_want_that_got_lost_is_repeated(pair: Pair) -> None:
    await pair.start()
    assert pair.transfer(1) == 0
    pair.hub.queue.clear()
    pair.pass_time(1.5)
    assert "writable" in pair.alice.kinds


async def test_a_packet_that_got_lost_ends_the_path_and_another_begins(pair: Pair) -> None:
    """So the link learns of it, and sends again; and no credit is used up for good."""
    await pair.start()
    for _ in range(5):
        pair.pass_time(60)
        pair.transfer(1)
        pair.hub.run()
        assert pair.transfer(3) == 3
        pair.hub.queue.popleft()
        pair.hub.run()
        assert len(pair.bob.owner.packets) <= 1  # of an earlier credit
        pair.pass_time(0.5)
        pair.transfer(1)
        pair.hub.run()
        assert pair.transfer(2) == 2
        pair.hub.run()
        assert pair.bob.owner.packets[-1] == ("ALICE", b"h1", PACKET)
        pair.bob.owner.packets.clear()
    assert pair.bob.carrier.statistics()["lost"] == 5
    assert pair.bob.carrier.statistics()["floods"] == 0


async def test_who_ignores_credit_is_not_heard(pair: Pair) -> None:
    await pair.start()
    pair.transfer(1)
    [(subject, want)] = pair.hub.queue
    sender, receiver = int.from_bytes(want[4:8], "little"), int.from_bytes(want[8:12], "little")
    pair.hub.queue.clear()
    packet = encode_prefix(RelayKind.DATA, sender, receiver, 0, flags=2, header_bytes=1) + b"h" + PACKET
    for _ in range(8):
        pair.hub.deliver(subject, packet)
    assert pair.bob.owner.packets == []
    assert pair.bob.carrier.statistics()["beyond_credit"] == 8
    assert pair.bob.is_open("ALICE")


# Floods


def flood(pair: Pair, packet: bytes, sender: str = "ALICE") -> int:
    """Have Bob hear the same again and again until he does not listen; how many bytes that took."""
    for number in range(1, 100_000):
        pair.hub.deliver(SUBJECTS.relay("BOB", sender), packet)
        if not pair.bob.wire.hears(SUBJECTS.relay("BOB", sender)):
            return number * len(packet)
    raise AssertionError("Bob listens for ever")


def path_numbers(pair: Pair) -> tuple[int, int]:
    """Alice's and Bob's numbers of their open path."""
    pair.hub.queue.clear()
    pair.transfer(1)
    [(_, want)] = pair.hub.queue
    pair.hub.queue.clear()
    return int.from_bytes(want[4:8], "little"), int.from_bytes(want[8:12], "little")


@pytest.mark.parametrize("what", ["beyond credit", "malformed", "stale", "hello", "a stranger", "want"])
async def test_who_floods_is_not_listened_to_and_all_others_are(pair: Pair, what: str) -> None:
    await pair.start()
    for other in ("CAROL", "DAVE"):
        pair.bob.meet(other)
    sender = "STRANGER" if what == "a stranger" else "ALICE"
    numbers = path_numbers(pair)
    packet = {
        "malformed": bytes(len(PACKET)),
        "stale": encode_prefix(RelayKind.DATA, 1, 1, 0) + b"h" + PACKET,
        "hello": encode_hello(encode_prefix(RelayKind.HELLO, *numbers, 0, flags=1), 0, b""),
        "a stranger": b"x" * len(PACKET),
        "want": encode_prefix(RelayKind.WANT, *numbers, 1) + bytes(36),
        "beyond credit": encode_prefix(RelayKind.DATA, *numbers, 0) + b"h" + PACKET,
    }[what]
    assert flood(pair, packet, sender) < 6 * 2**20
    assert pair.bob.wire.subjects == [
        SUBJECTS.relay("BOB", peer) for peer in ("ALICE", "CAROL", "DAVE") if peer != sender
    ]
    assert pair.bob.carrier.statistics()["floods"] == pair.bob.carrier.statistics()["shut_out"] == 1
    if sender == "ALICE":
        assert pair.bob.kinds == ["opened", "closed"]
        assert "more through the hub than it was allowed to" in pair.bob.carrier.why_no_path("ALICE")
    pair.bob.meet("EVE")
    assert SUBJECTS.relay("BOB", "EVE") in pair.bob.wire.subjects
    pair.bob.meet("DAVE", "left")
    assert SUBJECTS.relay("BOB", "DAVE") not in pair.bob.wire.subjects


async def test_a_message_too_large_to_be_a_packet_counts_too(pair: Pair) -> None:
    await pair.start()
    assert pair.bob.wire.events is not None
    pair.bob.wire.events.message_skipped(SUBJECTS.relay("BOB", "ALICE"), 3 * 2**20)
    assert pair.bob.is_open("ALICE")
    pair.bob.wire.events.message_skipped(SUBJECTS.relay("BOB", "ALICE"), 3 * 2**20)
    assert pair.bob.kinds == ["opened", "closed"]


async def test_who_was_shut_out_is_met_again_and_shut_out_for_longer_the_next_time(pair: Pair) -> None:
    await pair.start()
    for seconds in (60, 120):
        flood(pair, bytes(len(PACKET)))
        pair.bob.meet("ALICE")  # the roster's word changes nothing
        pair.pass_time(seconds - 1)
        assert not pair.bob.is_open("ALICE")
        pair.pass_time(12)
        assert pair.bob.wire.subjects == [SUBJECTS.relay("BOB", "*")]
        assert pair.bob.is_open("ALICE")
        assert pair.alice.carrier.send("BOB", b"h", None)
        pair.hub.run()
        assert pair.bob.owner.packets[-1] == ("ALICE", b"h", None)


async def test_what_was_on_its_way_when_we_gave_up_the_path_is_no_flood(pair: Pair) -> None:
    """A laptop that slept: the hub has kept all that was granted, and none of it belongs to a path any more."""
    await pair.start()
    pair.transfer(1)
    pair.hub.run()
    sent = pair.transfer(100)
    for _ in range(8):  # as if the line had been fast, and a great deal granted
        pair.hub.queue.extend(list(pair.hub.queue)[:sent])
    waiting = len(pair.hub.queue) * len(PACKET)
    assert waiting > 20 * 2**20
    pair.bob.carrier._paths["ALICE"].account.limit_bytes += waiting
    pair.bob.wire.lose()
    pair.bob.wire.connect()
    pair.hub.run()
    assert pair.bob.carrier.statistics()["stale"] > 50
    assert pair.bob.carrier.statistics()["floods"] == 0


async def test_a_long_busy_transfer_both_ways_is_no_flood(pair: Pair) -> None:
    """Tens of thousands of small packets, with a word about credit for each, within seconds."""
    await pair.start()
    for number in range(20_000):
        for node, other in ((pair.alice, "BOB"), (pair.bob, "ALICE")):
            node.carrier.send(other, b"h" * 4000, None)
        pair.hub.run()
        if number % 1000 == 0:
            pair.pass_time(0.1)
    assert len(pair.bob.owner.packets) > 19_000
    for node in (pair.alice, pair.bob):
        assert node.carrier.statistics()["floods"] == 0


# A hub that is not to be trusted


async def opened_credit(pair: Pair) -> None:
    await pair.start()
    pair.transfer(1)
    pair.hub.run()


async def test_the_hub_can_read_nothing(pair: Pair) -> None:
    await opened_credit(pair)
    secret = b"what nobody else should know"
    heard: list[bytes] = []
    for header, payload in ((secret, None), (b"h", secret), (secret, PACKET + secret)):
        assert pair.alice.carrier.send("BOB", header, payload)
        heard += [packet for _, packet in pair.hub.queue]
        pair.hub.run()
    assert [packets[1:] for packets in pair.bob.owner.packets] == [
        (secret, None),
        (b"h", secret),
        (secret, PACKET + secret),
    ]
    assert len(heard) == 3
    assert not any(secret in packet or PACKET[:256] in packet for packet in heard)


@pytest.mark.parametrize("payload", [None, b"small", PACKET])
@pytest.mark.parametrize("place", [13, 16, 24, -1])  # size of the header, number, the seal's first and last byte
async def test_a_changed_packet_is_counted_and_the_path_begins_anew(
    pair: Pair, payload: bytes | None, place: int
) -> None:
    await opened_credit(pair)
    assert pair.alice.carrier.send("BOB", b"header", payload)
    subject, packet = pair.hub.queue.popleft()
    changed = bytearray(packet)
    changed[place] ^= 1
    pair.hub.deliver(subject, bytes(changed))
    figures = pair.bob.carrier.statistics()
    assert figures["forged"] + figures["lost"] == 1
    assert pair.bob.owner.packets == []
    assert pair.bob.kinds == ["opened", "closed"]
    pair.pass_time(1)
    assert pair.bob.kinds == pair.alice.kinds[:1] + pair.alice.kinds[-2:] == ["opened", "closed", "opened"]
    pair.transfer(1)
    pair.hub.run()
    assert pair.transfer(1) == 1
    pair.hub.run()
    assert pair.bob.owner.packets == [("ALICE", b"h0", PACKET)]


async def test_a_repeated_packet_is_dropped_and_counted(pair: Pair) -> None:
    await opened_credit(pair)
    for number in range(3):
        assert pair.alice.carrier.send("BOB", b"%d" % number, b"x")
    first = pair.hub.queue[0]
    pair.hub.queue.append(first)
    pair.hub.run()
    assert [header for _, header, _ in pair.bob.owner.packets] == [b"0", b"1", b"2"]
    assert pair.bob.carrier.statistics()["replayed"] == 1
    assert pair.bob.kinds == ["opened"]


async def test_packets_out_of_order_end_the_path(pair: Pair) -> None:
    await opened_credit(pair)
    for number in range(2):
        assert pair.alice.carrier.send("BOB", b"%d" % number, b"x")
    pair.hub.queue.rotate(1)
    pair.hub.run()
    assert pair.bob.owner.packets == []
    assert pair.bob.carrier.statistics()["lost"] == 1
    pair.pass_time(1)
    assert pair.bob.kinds == ["opened", "closed", "opened"]


async def test_forged_words_about_credit_are_counted_and_change_nothing(pair: Pair) -> None:
    await pair.start()
    assert pair.transfer(1) == 0
    subject, want = pair.hub.queue.popleft()
    pair.hub.deliver(subject, want[:-1] + bytes([want[-1] ^ 1]))
    assert pair.bob.carrier.statistics()["forged"] == 1
    pair.pass_time(1.5)  # it is said again
    assert "writable" in pair.alice.kinds
    assert pair.bob.kinds == ["opened"]


async def test_whoever_has_not_the_key_opens_no_path_in_anothers_name(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    """The hub shows Bob the right key of Alice, and plays Alice itself."""
    usurper = RelayCarrier(pair.alice.owner, "ALICE", SUBJECTS, pair.alice.wire, LinkKeys.generate(), clock=pair.clock)
    pair.alice.carrier = usurper
    await pair.start()
    pair.pass_time(20)
    assert not pair.bob.is_open("ALICE")
    assert pair.bob.owner.log == pair.alice.owner.log == []
    assert 1 <= pair.bob.carrier.statistics()["forged"] <= 20  # the usurper is tried ever more seldom
    assert "in the name of ALICE that this peer did not send" in caplog.text


async def test_a_greeting_that_was_overheard_opens_nothing(pair: Pair) -> None:
    overheard: list[tuple[str, bytes]] = []
    await pair.alice.carrier.start()
    await pair.bob.carrier.start()
    pair.alice.meet("BOB")
    pair.bob.meet("ALICE")
    while pair.hub.queue:
        overheard.append(pair.hub.queue[0])
        pair.hub.deliver(*pair.hub.queue.popleft())
    assert pair.bob.is_open("ALICE")
    pair.bob.wire.lose()
    pair.bob.wire.connect()
    pair.hub.queue.clear()
    for message in overheard:
        if message[0].endswith("ALICE"):
            pair.hub.deliver(*message)
    assert pair.bob.kinds == ["opened", "closed"]


async def test_a_peer_whose_link_key_is_not_signed_gets_no_path(pair: Pair) -> None:
    await pair.start(meet=False)
    pair.bob.meet("ALICE")
    pair.alice.meet("BOB", link_key="")
    pair.hub.run()
    assert not pair.alice.is_open("BOB")
    assert "no link key that it signed" in pair.alice.carrier.why_no_path("BOB")


# Hostile bytes


async def test_malformed_packets_are_counted_and_change_nothing(pair: Pair) -> None:
    await pair.start()
    subject = SUBJECTS.relay("BOB", "ALICE")
    good = encode_prefix(RelayKind.DATA, 1, 1, 0, header_bytes=5) + b"hello"
    wrong = [b"", b"x", good[:20], b"\x00" + good[1:], good[:1] + b"\x01" + good[2:], good[:3] + b"\x08" + good[4:]]
    wrong += [good[:2] + bytes([kind]) + good[3:] for kind in (0, 6, 255)]
    wrong += [encode_prefix(RelayKind.CREDIT, 1, 1, 0, flags=1) + bytes(36), encode_prefix(RelayKind.HELLO, 1, 1, 0)]
    wrong += [encode_hello(encode_prefix(RelayKind.HELLO, 0, 0, 0), 0, b"")]
    wrong += [encode_hello(encode_prefix(RelayKind.HELLO, 1, 0, 0), 0, bytes(65))]
    for packet in wrong:
        pair.hub.deliver(subject, packet)
    assert pair.bob.carrier.statistics()["malformed"] == len(wrong)
    pair.hub.deliver(subject, good)  # of no path that there is
    assert pair.bob.carrier.statistics()["stale"] == 1
    assert pair.bob.owner.packets == []
    assert pair.bob.kinds == ["opened"]


@given(st.lists(st.one_of(st.binary(max_size=60), st.binary(max_size=40).map(lambda b: b"\xa7\x02" + b)), max_size=20))
@settings(max_examples=200)
def test_no_bytes_do_harm(packets: list[bytes]) -> None:
    import asyncio

    async def run() -> None:
        pair = Pair()
        await pair.start()
        for packet in packets:
            pair.hub.deliver(SUBJECTS.relay("BOB", "ALICE"), packet)
        pair.pass_time(30)
        assert pair.alice.is_open("BOB")
        assert pair.bob.is_open("ALICE")
        assert pair.bob.owner.packets == []
        await pair.close()

    asyncio.run(run())


@given(st.integers(0, 2**32))
@settings(max_examples=60)
def test_two_peers_find_each_other_again_whatever_gets_lost_or_comes_late(seed: int) -> None:
    """Wires come and go, messages get lost or arrive late; when all is calm, both ends are open and agree."""
    import asyncio

    async def run() -> None:
        chance = random.Random(seed)
        pair = Pair()
        await pair.start()
        hub = pair.hub
        for _ in range(100):
            node = chance.choice((pair.alice, pair.bob))
            match chance.randrange(6):
                case 0 if node.wire.connected:
                    node.wire.lose()
                case 1 if not node.wire.connected:
                    node.wire.connect()
                case 2 if hub.queue:
                    hub.queue.popleft()
                case 3 if hub.queue:
                    hub.queue.rotate(-chance.randrange(len(hub.queue)))
                case 4:
                    other = "BOB" if node is pair.alice else "ALICE"
                    node.carrier.send(other, b"h", PACKET)
                case _:
                    if hub.queue:
                        hub.deliver(*hub.queue.popleft())
            if chance.random() < 0.1:
                pair.clock.now += chance.random()
                pair.alice.carrier.tick()
                pair.bob.carrier.tick()
        for node in (pair.alice, pair.bob):
            if not node.wire.connected:
                node.wire.connect()
        hub.run()
        for node, other in ((pair.alice, "BOB"), (pair.bob, "ALICE")):
            node.carrier.send(other, b"last", None)  # somebody uses the path: else nobody has to notice
        pair.pass_time(75)  # who came so late so often that it looked like a flood is heard again after 60 s
        for node, other in ((pair.alice, pair.bob), (pair.bob, pair.alice)):
            before, lost = len(other.owner.packets), other.carrier.statistics()["lost"]
            assert node.carrier.send(other.peer, b"after all", None)
            hub.run()
            if other.carrier.statistics()["lost"] > lost:  # what got lost before shows now, and ends that path
                pair.pass_time(1)
                assert node.carrier.send(other.peer, b"after all", None)
                hub.run()
            assert other.owner.packets[before:] == [(node.peer, b"after all", None)]
        await pair.close()

    asyncio.run(run())


async def test_after_close_nothing_is_told(pair: Pair) -> None:
    await pair.start()
    await pair.alice.carrier.close()
    await pair.alice.carrier.close()
    assert pair.alice.wire.closed
    pair.bob.carrier.send("ALICE", b"h", None)
    pair.hub.run()
    pair.alice.meet("CAROL")
    assert pair.alice.owner.packets == []
    assert pair.alice.kinds == ["opened"]
    assert not pair.alice.carrier.send("BOB", b"h", None)
