"""Links under whatever a network and a roster can do to them: each message arrives once and in order, or its sender is
told; memory stays within its limits; nothing that arrives, whatever its bytes, does harm."""

from __future__ import annotations

import asyncio
import random
import struct
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from potluck.clock import SystemClock
from potluck.errors import ProtocolError
from potluck.hub.presence import Presence, State
from potluck.link.channel.packet import (
    BULK,
    HEADER_BYTES,
    MAX_CHARGE_BYTES,
    PACKET_BYTES,
    Kind,
    decode,
    decode_manifest,
    encode_header,
    encode_manifest,
    session_tag,
)
from potluck.link.channel.sendreceipt import SendReceipt
from potluck.link.envelope import Envelope, MessageRole, encode_envelope
from potluck.link.limits import INITIAL_CREDIT_BYTES, KIB, MIB, LinkConfig
from potluck.link.links import Links, Stream
from potluck.messages import Message, encode
from potluck.sim.linknode import KINDS, LinkNode, presence_of
from potluck.sim.memorycarrier import Conditions, MemoryCarrier, MemoryNetwork
from potluck.sim.virtualclock import VirtualClock

CONFIG = LinkConfig(
    window_bytes=1 * MIB,
    max_message_bytes=3 * MIB,
    max_frame_bytes=3 * MIB,
    queue_bytes=16 * MIB,
    receive_bytes=16 * MIB,
    held_bytes=1 * MIB,
)
SIZES = (0, 100, 20 * KIB, 300 * KIB, 2 * MIB)
RATE = 20e6
FAIR = Conditions(delay_seconds=0.01, bytes_per_second=RATE)


@dataclass
class World:
    """Two peers on a bad network, with a roster that each of them reads when it is told to."""

    seed: int
    clock: VirtualClock = field(default_factory=VirtualClock)
    sent: list[tuple[bytes, SendReceipt]] = field(default_factory=list)
    next_index: dict[tuple[str, str, bool], int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.network = MemoryNetwork(seed=self.seed, schedule=self.clock.schedule)
        self.set_conditions(FAIR)
        self.nodes = [LinkNode(name, self.network, self.clock, config=CONFIG) for name in ("a", "b")]
        for reader in (0, 1):
            self.read_roster(reader)

    def set_conditions(self, conditions: Conditions, kinds: Sequence[str] = KINDS) -> None:
        for kind in kinds:
            self.network.set_conditions(conditions, kind=kind, sender="a", receiver="b")
            self.network.set_conditions(conditions, kind=kind, sender="b", receiver="a")

    def read_roster(self, reader: int, state: State = "alive") -> None:
        self.nodes[reader].table.update_peer(self.nodes[1 - reader].presence(state))

    def send(self, sender: int, size: int, bulk: bool) -> None:
        node, other = self.nodes[sender], self.nodes[1 - sender].name
        link = node.table.links.get(other)
        if link is None or not link.is_alive or link.queued_bytes > CONFIG.queue_bytes // 2:
            return
        key = (node.name, node.session, bulk)
        body = f"{node.name} {node.session} {bulk:d} {self.next_index[key]}".encode()
        self.next_index[key] += 1
        frame = body + self.random.randbytes(size) if size else b""
        self.sent.append((body, node.send(other, body, [frame, b"small"], bulk=bulk)))

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.check_memory()

    def check_memory(self) -> None:
        for node in self.nodes:
            budget = node.table.budget
            assert 0 <= budget.reserved_bytes <= CONFIG.receive_bytes // 2
            assert node.table.waiting_bytes <= CONFIG.held_bytes
            for link in node.table.links.values():
                assert 0 <= link.ledger.held_bytes <= CONFIG.window_bytes + INITIAL_CREDIT_BYTES + MAX_CHARGE_BYTES

    def heal(self) -> None:
        """Let everything work again, and give it time."""
        self.set_conditions(FAIR)
        for kind in KINDS:
            self.network.mend(kind, "a", "b")
        for reader, node in enumerate(self.nodes):
            node.keeps = False
            node.release_all()
            self.read_roster(reader)
        self.advance(60.0)

    def check_promises(self) -> None:
        bodies = [body for node in self.nodes for _, body, _ in node.received]
        assert len(bodies) == len(set(bodies)), "a message was delivered twice"
        orders: dict[str, list[int]] = defaultdict(list)
        for node in self.nodes:
            for _, body, frames in node.received:
                life, index = body.decode().rsplit(" ", 1)
                orders[life].append(int(index))
                assert not frames[0] or frames[0].startswith(body), "a frame of another message"
                assert frames[1] == b"small"
        for life, indices in orders.items():
            assert indices == sorted(indices), f"{life} arrived out of order"
        arrived = set(bodies)
        for body, receipt in self.sent:
            assert receipt.settled, f"{body!r} was neither delivered nor given up"
            assert not receipt.acknowledged or body in arrived, f"{body!r} was acknowledged and is not there"
        for node in self.nodes:
            assert node.table.budget.reserved_bytes == 0
            assert all(link.ledger.held_bytes == 0 for link in node.table.links.values())
            assert all(link.ledger.reserved_bytes == 0 for link in node.table.links.values())


side = st.integers(0, 1)
kind = st.sampled_from(KINDS)
chance = st.sampled_from((0.0, 0.05, 0.3))
step = st.one_of(
    st.tuples(st.just("send"), side, st.sampled_from(SIZES), st.booleans()),
    st.tuples(st.just("send"), side, st.sampled_from(SIZES), st.booleans()),
    st.tuples(st.just("advance"), st.sampled_from((0.0, 0.003, 0.02, 0.2, 1.0, 4.0))),
    st.tuples(st.just("advance"), st.sampled_from((0.0, 0.003, 0.02, 0.2, 1.0, 4.0))),
    st.tuples(st.just("cut"), kind),
    st.tuples(st.just("mend"), kind),
    st.tuples(st.just("weather"), kind, chance, chance, st.booleans()),
    st.tuples(st.just("deaf"), kind, side),
    st.tuples(st.just("restart"), side),
    st.tuples(st.just("roster"), side, st.sampled_from(("alive", "suspect"))),
    st.tuples(st.just("roster"), side, st.sampled_from(("alive", "suspect", "dead", "left"))),
    st.tuples(st.just("keep"), side, st.booleans()),
)


def perform(world: World, action: tuple[object, ...]) -> None:
    match action:
        case ("send", int(sender), int(size), bool(bulk)):
            world.send(sender, size, bulk)
        case ("advance", float(seconds)):
            world.advance(seconds)
        case ("cut", str(of)):
            world.network.cut(of, "a", "b")
        case ("mend", str(of)):
            world.network.mend(of, "a", "b")
        case ("weather", str(of), float(loss), float(duplication), bool(congested)):
            queue_bytes = 600 * KIB if congested else None
            weather = replace(FAIR, loss=loss, duplication=duplication, queue_bytes=queue_bytes)
            world.set_conditions(weather, kinds=(of,))
        case ("deaf", str(of), int(sender)):
            names = ("a", "b")
            world.network.set_conditions(
                Conditions(is_silent=True), kind=of, sender=names[sender], receiver=names[1 - sender]
            )
        case ("restart", int(who)):
            node = world.nodes[who]
            node.restart(f"{int(node.session) + 1}")
        case ("roster", int(reader), str(state)):
            world.read_roster(reader, state)  # type: ignore[arg-type]
        case ("keep", int(who), bool(keeps)):
            world.nodes[who].keeps = keeps
            if not keeps:
                world.nodes[who].release_all()
        case _:
            raise AssertionError(action)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**16), steps=st.lists(step, max_size=40))
def test_each_message_arrives_once_in_order_or_its_sender_is_told(seed: int, steps: list[tuple[object, ...]]) -> None:
    world = World(seed)
    for action in steps:
        perform(world, action)
        world.check_memory()
    world.heal()
    world.check_promises()
    # What is sent once all is well again arrives.
    before = len(world.sent)
    for sender in (0, 1):
        for bulk in (False, True):
            world.send(sender, 2 * MIB, bulk)
            world.send(sender, 100, bulk)
    world.advance(30.0)
    assert len(world.sent) == before + 8
    assert all(receipt.acknowledged for _, receipt in world.sent[before:])
    world.check_promises()


@pytest.mark.parametrize("seed", range(4))
def test_a_long_storm_breaks_no_promise_and_really_was_one(seed: int) -> None:
    world = World(seed)
    draw = world.random
    happened: Counter[str] = Counter()
    for _ in range(400):
        for _ in range(draw.randrange(3)):
            world.send(draw.randrange(2), draw.choice(SIZES), draw.random() < 0.5)
        fault, of = draw.random(), draw.choice(KINDS)
        if fault < 0.06:
            perform(world, ("cut", of))
        elif fault < 0.20:
            perform(world, ("mend", of))
        elif fault < 0.30:
            perform(world, ("weather", of, draw.choice((0.0, 0.1)), draw.choice((0.0, 0.1)), draw.random() < 0.5))
        elif fault < 0.32:
            perform(world, ("deaf", of, draw.randrange(2)))
        elif fault < 0.33:
            perform(world, ("restart", draw.randrange(2)))
        elif fault < 0.35:
            perform(world, ("roster", draw.randrange(2), draw.choice(("dead", "left"))))
        elif fault < 0.70:
            perform(world, ("roster", draw.randrange(2), draw.choice(("alive", "suspect"))))
        elif fault < 0.80:
            perform(world, ("keep", draw.randrange(2), draw.random() < 0.3))
        for node in world.nodes:
            happened.update(vars_of(node))
        world.advance(draw.choice((0.0, 0.005, 0.05, 0.5)))
    world.heal()
    world.check_promises()
    fates = Counter("arrived" if receipt.acknowledged else "failed" for _, receipt in world.sent)
    assert min(fates["arrived"], fates["failed"]) >= 10, fates
    wanted = ("packets_resent", "duplicates", "path_changes", "resets", "messages_lost", "messages_received")
    assert all(happened[name] for name in wanted), happened
    assert world.network.num_lost
    assert world.network.num_duplicated


def vars_of(node: LinkNode) -> dict[str, int]:
    counters = node.table.counters()
    return {name: getattr(counters, name) for name in counters.__slots__}


# Hostile bytes


class Victim:
    """A peer that an enemy, who is a member of the run, sends packets to."""

    def __init__(self, seed: int = 0) -> None:
        self.clock = VirtualClock()
        self.network = MemoryNetwork(seed=seed, schedule=self.clock.schedule)
        self.node = LinkNode("victim", self.network, self.clock, config=CONFIG)
        self.table = self.node.table
        self.table.update_peer(presence_of("enemy", "e1"))
        self.carrier = self.table.carriers["direct"]

    def feed(self, header: bytes, payload: bytes | None = None) -> None:
        body = memoryview(payload) if payload is not None else None
        self.table.packet_arrived(self.carrier, "enemy", memoryview(header), body)

    def packet(
        self,
        kind: int,
        sequence: int = 0,
        inline: bytes = b"",
        payload: bytes = b"",
        *,
        flags: int = 0,
        generation: int = 1,
        ack: int = 0,
        credit: int = 0,
    ) -> tuple[bytes, bytes | None]:
        tags = session_tag("enemy", "e1"), session_tag("victim", "1")
        header = encode_header(kind, flags, generation, *tags, sequence, ack, credit, 0.0, inline, len(payload))
        return header, payload or None

    def check(self) -> None:
        budget, link = self.table.budget, self.table.links["enemy"]
        assert 0 <= budget.reserved_bytes <= CONFIG.receive_bytes // 2
        assert 0 <= link.ledger.held_bytes <= CONFIG.window_bytes + INITIAL_CREDIT_BYTES + MAX_CHARGE_BYTES
        assert 0 <= link.ledger.reserved_bytes <= budget.peer_bytes
        assert self.table.waiting_bytes <= CONFIG.held_bytes

    def check_friend(self) -> None:
        """Whatever the enemy did, another peer is served as ever."""
        friend = LinkNode("friend", self.network, self.clock, config=CONFIG)
        friend.table.update_peer(self.node.presence())
        self.table.update_peer(friend.presence())
        before = len(self.node.received)
        receipt = friend.send("victim", b"hello", [bytes(2 * MIB)])
        self.clock.advance(40.0)
        assert receipt.acknowledged
        assert self.node.received[before:] == [("friend", b"hello", [bytes(2 * MIB)])]


@given(header=st.binary(max_size=300), payload=st.none() | st.binary(max_size=50))
def test_random_bytes_are_dropped_and_counted(header: bytes, payload: bytes | None) -> None:
    with pytest.raises(ProtocolError):
        decode(memoryview(header), memoryview(payload) if payload is not None else None)
    victim = Victim()
    victim.feed(header, payload)
    assert victim.table.counters().malformed == 1


u64 = st.integers(0, 2**64 - 1) | st.integers(0, 5)
hostile_packet = st.fixed_dictionaries(
    {
        "kind": st.integers(0, 8),
        "flags": st.integers(0, 31),
        "generation": st.integers(0, 4) | st.integers(0, 2**32 - 1),
        "sequence": u64,
        "ack": st.integers(0, 2) | u64,
        "credit": u64,
        "inline": st.binary(max_size=40) | st.just(encode_manifest(b"body", [memoryview(bytes(100))])[0]),
        "payload": st.binary(max_size=40) | st.just(bytes(PACKET_BYTES)),
        "announced": st.lists(st.integers(0, 2**63 - 1) | st.integers(0, PACKET_BYTES), max_size=4),
    }
)


@settings(max_examples=150)
@given(packets=st.lists(hostile_packet, max_size=30))
def test_well_formed_nonsense_does_no_harm(packets: list[dict[str, object]]) -> None:
    victim = Victim()
    for fields in packets:
        announced = fields.pop("announced")
        if fields["kind"] == Kind.MESSAGE and announced:
            assert isinstance(announced, list)
            table = struct.pack(f"<{len(announced)}Q", *(size << 1 for size in announced))
            fields["inline"] = struct.pack("<IH", 4, len(announced)) + table + b"body"
        victim.feed(*victim.packet(**fields))  # type: ignore[arg-type]
        victim.check()
        victim.clock.advance(0.01)
    victim.clock.advance(CONFIG.stalled_seconds + 1.0)
    victim.check()
    victim.check_friend()


@settings(max_examples=60)
@given(data=st.data())
def test_packets_that_are_cut_off_changed_or_replayed_are_never_delivered_twice(data: st.DataObject) -> None:
    victim = Victim()
    inline, large = encode_manifest(b"once", [memoryview(bytes(100)), memoryview(bytes(20 * KIB))])
    good = [
        victim.packet(Kind.MESSAGE, 0, inline, bytes(10 * KIB)),
        victim.packet(Kind.FRAGMENT, 1, b"", bytes(10 * KIB)),
        victim.packet(Kind.MESSAGE, 2, encode_manifest(b"twice", [])[0]),
    ]
    assert len(large) == 1
    script = data.draw(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(("whole", "cut", "version", "old")))))
    num_bad = 0
    for index, treatment in [*script, (0, "whole"), (1, "whole"), (2, "whole")]:
        header, payload = good[index]
        if treatment == "cut":
            header = header[: data.draw(st.integers(0, len(header) - 1))]
        elif treatment == "version":
            header = header[:1] + b"\x63" + header[2:]
        elif treatment == "old":
            header = header[:4] + struct.pack("<I", 0) + header[8:]
        num_bad += treatment != "whole"
        victim.feed(header, payload)
        victim.clock.advance(0.01)
    assert [body for _, body, _ in victim.node.received] == [b"once", b"twice"]
    assert victim.table.counters().malformed == num_bad


def test_a_peer_that_starts_anew_again_and_again_gains_no_memory_by_it() -> None:
    victim = Victim()
    victim.node.keeps = True  # the application is slow
    inline, _ = encode_manifest(b"x", [memoryview(bytes(PACKET_BYTES))])
    for generation in range(1, 50):
        victim.feed(*victim.packet(Kind.MESSAGE, 0, inline, bytes(PACKET_BYTES), generation=generation))
        victim.check()
        victim.clock.advance(0.001)
    # Its window, what it may always send unasked, and its share of the memory for large messages; no more.
    assert len(victim.node.received) * PACKET_BYTES <= 2 * MIB + victim.table.budget.peer_bytes
    assert victim.table.counters().refused >= 30
    victim.node.release_all()
    assert victim.table.links["enemy"].ledger.held_bytes == 0
    victim.check_friend()


def test_announcing_much_and_sending_nothing_costs_the_enemy_its_channel_and_no_memory() -> None:
    victim = Victim()
    table = struct.pack("<IH2Q", 0, 2, (1 * MIB) << 1, (1 * MIB) << 1)
    victim.feed(*victim.packet(Kind.MESSAGE, 0, table, bytes(16 * KIB)))
    assert victim.table.budget.reserved_bytes >= 2 * MIB
    victim.clock.advance(CONFIG.stalled_seconds * 2)
    assert victim.table.budget.reserved_bytes == 0
    assert victim.table.counters().resets == 1
    victim.check_friend()


def test_a_sender_that_ignores_its_credit_is_refused() -> None:
    victim = Victim()
    victim.node.keeps = True
    inline, _ = encode_manifest(b"x", [memoryview(bytes(PACKET_BYTES))])
    for sequence in range(20):
        victim.feed(*victim.packet(Kind.MESSAGE, sequence, inline, bytes(PACKET_BYTES), flags=BULK))
        victim.clock.advance(0.001)
        victim.check()
    assert victim.table.counters().refused >= 15


@pytest.mark.parametrize("size", [2**40, 2**62])
def test_an_absurd_announcement_is_refused_before_anything_is_allocated(size: int) -> None:
    victim = Victim()
    victim.feed(*victim.packet(Kind.MESSAGE, 0, struct.pack("<IHQ", 0, 1, size << 1), b"x"))
    counters = victim.table.counters()
    assert (counters.refused, counters.malformed, counters.resets) == (1, 1, 1)
    victim.check_friend()


@given(inline=st.binary(min_size=6, max_size=200))
def test_the_start_of_a_message_decodes_or_is_refused(inline: bytes) -> None:
    try:
        manifest = decode_manifest(memoryview(inline))
    except ProtocolError:
        return
    here = sum(len(frame) for frame in manifest.frames if frame is not None)
    assert len(manifest.body) + here <= len(inline)
    assert HEADER_BYTES == 60


# Hostile messages: the packets are right, what is in them is not


class Deaf:
    """A carrier of one who hears nothing: what is sent to it is gone, and never acknowledged."""

    kind = "direct"

    def update_peer(self, presence: Presence) -> None:
        pass

    def send(self, peer: str, header: bytes, payload: object) -> bool:
        return True

    def statistics(self) -> dict[str, int]:
        return {}

    async def close(self) -> None:
        pass


class Known(Message, frozen=True, kw_only=True, tag="known"):
    number: int = 0


class Mallory:
    """Sends envelopes to a peer, and acknowledges nothing."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.carrier = Deaf()
        links.add_carrier(self.carrier)
        links.update_peer(presence_of("mallory", "m1"))
        links.path_opened(self.carrier, "mallory")
        self.sequence = 0

    async def send(self, body: bytes) -> None:
        tags = session_tag("mallory", "m1"), session_tag("victim", "1")
        inline, _ = encode_manifest(body, [])
        header = encode_header(Kind.MESSAGE, 0, 1, *tags, self.sequence, 0, 0, 0.0, inline, 0)
        self.sequence += 1
        self.links.packet_arrived(self.carrier, "mallory", memoryview(header), None)
        await asyncio.sleep(0)


@pytest.fixture
async def victim() -> AsyncIterator[Links]:
    links = Links("victim", "1", SystemClock(), replace(CONFIG, queue_bytes=3 * MIB))
    yield links
    await links.close()


@pytest.mark.parametrize(
    "envelope",
    [
        Envelope(role=MessageRole.OPEN, kind="unheard of", number=1),
        Envelope(role=MessageRole.OPEN, kind="known", number=1, body=b"\xc1"),
        Envelope(role=MessageRole.REQUEST, kind="unheard of", number=1, seconds=60.0),
        Envelope(role=MessageRole.REQUEST, kind="known", number=1, seconds=60.0, body=b"\x80"),
    ],
)
async def test_answers_that_nobody_takes_do_not_pile_up(victim: Links, envelope: Envelope) -> None:
    async def handler(stream: Stream) -> None:
        await stream.receive()

    victim.handle_stream(Known, handler)
    victim.handle(Known, lambda incoming: Known())
    mallory = Mallory(victim)
    most = 0
    for _ in range(8_000):
        await mallory.send(encode_envelope(envelope))
        most = max(most, victim.statistics().peers["mallory"].queue_bytes)
    assert most <= 3 * MIB + 2 * MIB
    counters = victim.statistics().total
    assert counters.resets or counters.refused, "it was stopped"
    assert len(asyncio.all_tasks()) < 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91\x63",
        encode([0, "known", -1]),
        encode([1, "known", 1, b"", True, 0, float("nan")]),
        encode([1, "known", 1, b"", True, 0, float("inf")]),
        encode([1, "known", 1, b"", True, 0, -1.0]),
        encode([0, "known", 1, b"not a message"]),
    ],
)
async def test_envelopes_that_do_not_decode_are_counted(victim: Links, body: bytes) -> None:
    seen: list[object] = []
    victim.handle(Known, seen.append)
    mallory = Mallory(victim)
    await mallory.send(body)
    assert victim.statistics().total.malformed == 1
    await mallory.send(encode_envelope(Envelope(role=MessageRole.MESSAGE, kind="known", body=encode(Known()))))
    assert len(seen) == 1


@settings(max_examples=100)
@given(
    envelopes=st.lists(
        st.builds(
            Envelope,
            role=st.sampled_from(MessageRole),
            kind=st.sampled_from(("known", "", "unheard of")),
            number=st.integers(0, 3) | st.integers(0, 2**63),
            body=st.sampled_from((b"", encode(Known()), b"\xc1")),
            by_sender=st.booleans(),
            number_of_bytes=st.integers(0, 2**63),
            seconds=st.sampled_from((0.0, 0.001, 60.0)),
            text=st.text(max_size=300),
        ),
        max_size=40,
    )
)
def test_nonsense_about_streams_and_requests_does_no_harm(envelopes: list[Envelope]) -> None:
    async def run() -> None:
        links = Links("victim", "1", SystemClock(), CONFIG)
        seen: list[object] = []

        async def handler(stream: Stream) -> None:
            seen.append(stream.message)
            async for _ in stream:
                pass

        links.handle_stream(Known, handler)
        links.handle(Known, lambda incoming: seen.append(incoming.message))
        mallory = Mallory(links)
        stream = await links.open_stream("mallory", Known(), timeout_seconds=1)
        for envelope in envelopes:
            await mallory.send(encode_envelope(envelope))
        before = len(seen)
        await links.send("victim", Known(number=7), timeout_seconds=5)
        await links.flush("victim", timeout_seconds=5)
        assert seen[before:] == [Known(number=7)]
        await stream.cancel("enough")
        await links.close()
        assert links.statistics().reserved_bytes == 0

    asyncio.run(run())


async def test_messages_requests_and_streams_survive_paths_that_come_and_go() -> None:
    network = MemoryNetwork(seed=5)
    ann, bob = (Links(name, "1", SystemClock(), CONFIG) for name in ("ann", "bob"))
    for name, links in (("ann", ann), ("bob", bob)):
        for of in KINDS:
            links.add_carrier(MemoryCarrier(network, name, kind=of, events=links))
    ann.update_peer(presence_of("bob", "1"))
    bob.update_peer(presence_of("ann", "1"))
    notes: list[int] = []
    bob.handle(Known, lambda incoming: notes.append(incoming.message.number) or Known(number=incoming.message.number))  # type: ignore[func-returns-value]
    items: list[bytes] = []

    async def read(stream: Stream) -> None:
        async for frames in stream:
            items.append(bytes(frames[0][:2]))
            await stream.send([frames[0][:2]], timeout_seconds=60)

    bob.handle_stream(Known, read)
    running = True

    async def flap() -> None:
        while running:
            of = network.random.choice(KINDS)
            network.cut(of, "ann", "bob")
            for _ in range(network.random.randrange(5)):
                await asyncio.sleep(0)
            network.mend(of, "ann", "bob")
            for _ in range(network.random.randrange(30)):
                await asyncio.sleep(0)

    async def ask() -> None:
        for number in range(0, 100, 2):
            await ann.send("bob", Known(number=number), [bytes(200 * KIB)], timeout_seconds=60)
            answer = await ann.request("bob", Known(number=number + 1), reply=Known, timeout_seconds=60)
            assert answer.message.number == number + 1

    async def pour() -> None:
        async with await ann.open_stream("bob", Known(), timeout_seconds=60) as stream:
            for index in range(100):
                await stream.send([index.to_bytes(2, "little") + bytes(300 * KIB)], timeout_seconds=60)
            await stream.close()
            assert [int.from_bytes(frames[0], "little") async for frames in stream] == list(range(100))

    flapping = asyncio.ensure_future(flap())
    async with asyncio.timeout(100):
        await asyncio.gather(ask(), pour())
    running = False
    await flapping
    assert notes == list(range(100))
    assert [int.from_bytes(item, "little") for item in items] == list(range(100))
    total = ann.statistics().total
    assert total.packets_resent
    assert total.messages_lost == 0
    await ann.close()
    await bob.close()
