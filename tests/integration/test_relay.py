"""Relay carriers through a real hub: packets arrive, paths break and come back, a slow receiver harms nobody."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil
import pytest
import uvloop
from relaynodes import DEADLINE_SECONDS, QUICK, SUBJECTS, Answer, Node, Question, keys_of, member, node, presence

from potluck.clock import SystemClock
from potluck.hub.address import HubAddress
from potluck.hub.bulk.wire import BulkWire
from potluck.hub.server.certificate import prepare_certificates
from potluck.link.links import Incoming, Links
from potluck.link.relay.carrier import RelayCarrier
from potluck.link.relay.credit import CreditConfig
from potluck.testing.plainhub import PlainHub, PlainUser, TlsFiles
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children, ManagedProcess

uvloop.run(asyncio.sleep(0))  # libuv opens one pipe per process, for good: here, before a test counts

CHILD = Path(__file__).with_name("relaychild.py")
FLOODED = Path(__file__).with_name("floodedchild.py")
FLOODER = Path(__file__).with_name("floodchild.py")
MIB = 1024 * 1024
PACKET = os.urandom(512 * 1024)
ALICE, BOB, CAROL = member(), member(), member()


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    folder = tmp_path_factory.mktemp("certificates")
    made = prepare_certificates(folder / "authority", folder / "tls", ["127.0.0.1"])
    return TlsFiles(certificate=made.chain_file, key=made.chain_file, ca_pem=made.ca_pem)


@pytest.fixture
def tls_hub(tmp_path: Path, tls_files: TlsFiles) -> Iterator[PlainHub]:
    with PlainHub(tmp_path / "hub", [ALICE, BOB, CAROL], tls=tls_files) as hub:
        hub.start()
        yield hub


@pytest.fixture
def plain_hub(tmp_path: Path) -> Iterator[PlainHub]:
    with PlainHub(tmp_path / "plain", [ALICE, BOB, CAROL]) as hub:
        hub.start()
        yield hub


def way(hub: PlainHub, scheme: str) -> HubAddress:
    return hub.address(hub.websocket_url if scheme.startswith("ws") else hub.url)


async def introduce(one: Node, other: Node) -> None:
    one.meet(other.peer)
    other.meet(one.peer)
    await one.until_open(other.peer)
    await other.until_open(one.peer)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("scheme", ["tls", "wss", "nats", "ws"])
def test_64_mib_each_way_at_once(
    request: pytest.FixtureRequest, scheme: str, run: Callable[[Awaitable[None]], None]
) -> None:
    hub: PlainHub = request.getfixturevalue("tls_hub" if scheme in ("tls", "wss") else "plain_hub")

    async def exchange() -> None:
        async with node(way(hub, scheme), ALICE) as alice, node(way(hub, scheme), BOB) as bob:
            await introduce(alice, bob)
            sent = await asyncio.gather(alice.push(BOB.peer, 128, PACKET), bob.push(ALICE.peer, 128, PACKET))
            for receiver, sender, digest in ((bob, ALICE, sent[0]), (alice, BOB, sent[1])):
                await receiver.until(lambda receiver=receiver: receiver.events.num_bytes >= 64 * MIB, "all to arrive")
                assert receiver.events.digests[sender.peer].digest() == digest
                assert [entry[0] for entry in receiver.events.log if entry[0] != "writable"] == ["opened"]
                figures = receiver.carrier.statistics()
                assert figures["beyond_credit"] == figures["malformed"] == figures["wire_losses"] == 0

    run(exchange())


async def test_small_packets_without_payload(tls_hub: PlainHub) -> None:
    async with node(tls_hub.address(), ALICE) as alice, node(tls_hub.address(), BOB) as bob:
        await introduce(alice, bob)
        for number in range(2000):
            header = b"%d" % number
            await alice.until(lambda header=header: alice.carrier.send(BOB.peer, header, None), "to be allowed to send")
        await bob.until(lambda: len(bob.events.headers) == 2000, "all packets")
        assert [header for _, header in bob.events.headers] == [b"%d" % number for number in range(2000)]


async def test_a_peer_that_starts_later_is_found(tls_hub: PlainHub) -> None:
    async with node(tls_hub.address(), ALICE) as alice:
        alice.meet(BOB.peer)
        await alice.until(lambda: alice.carrier.statistics()["wire_connected"], "the wire")
        assert not alice.is_open(BOB.peer)
        async with node(tls_hub.address(), BOB) as bob:
            await introduce(alice, bob)


@pytest.mark.parametrize("scheme", ["tls", "wss"])
async def test_a_hub_killed_in_mid_transfer_closes_the_path_and_reopens_it(tls_hub: PlainHub, scheme: str) -> None:
    async with node(way(tls_hub, scheme), ALICE) as alice, node(way(tls_hub, scheme), BOB) as bob:
        await introduce(alice, bob)
        pushing = asyncio.create_task(alice.push(BOB.peer, 10_000, PACKET))
        await bob.until(lambda: bob.events.num_bytes > 16 * MIB, "the transfer to be under way")
        tls_hub.kill()
        for one, other in ((alice, BOB), (bob, ALICE)):
            await one.until(lambda one=one, other=other: not one.is_open(other.peer), "the path to close")
            assert one.events.log[-1][:2] == ("closed", other.peer)
        assert not alice.carrier.send(BOB.peer, b"h", None)
        await asyncio.to_thread(tls_hub.start)
        await alice.until_open(BOB.peer)
        await bob.until_open(ALICE.peer)
        before = bob.events.num_bytes
        await bob.until(lambda: bob.events.num_bytes > before + 16 * MIB, "the transfer to go on")
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)
        assert bob.carrier.statistics()["malformed"] == bob.carrier.statistics()["beyond_credit"] == 0


async def test_a_peer_that_restarts_is_met_anew(tls_hub: PlainHub) -> None:
    async with node(tls_hub.address(), ALICE) as alice:
        async with node(tls_hub.address(), BOB) as bob:
            await introduce(alice, bob)
            await alice.push(BOB.peer, 8, PACKET)
        async with node(tls_hub.address(), BOB) as bob:
            bob.meet(ALICE.peer)
            await bob.until_open(ALICE.peer)
            await alice.until(
                lambda: [entry[0] for entry in alice.events.log if entry[0] != "writable"].count("opened") == 2,
                "the restart to be noticed",
            )
            digest = await alice.push(BOB.peer, 8, PACKET)
            await bob.until(lambda: bob.events.num_bytes == 8 * len(PACKET), "all to arrive")
            assert bob.events.digests[ALICE.peer].digest() == digest


async def test_close_in_mid_transfer_leaves_nothing(tls_hub: PlainHub) -> None:
    async with node(tls_hub.address(), ALICE) as alice, node(tls_hub.address(), BOB) as bob:
        await introduce(alice, bob)
        await alice.push(BOB.peer, 16, PACKET)
        told = len(bob.events.headers)
        await bob.carrier.close()
        await bob.carrier.close()
        await alice.carrier.close()
        assert len(bob.events.headers) == told


# A slow receiver


async def flood(
    hub: PlainHub, children: Children, users: list[PlainUser], credit: CreditConfig, packets_each: int
) -> tuple[ManagedProcess, int, dict[str, str]]:
    """All users but the last push at the last, a slow process: that process, the hub's memory, what was sent."""
    *senders, receiver = users
    total = len(senders) * packets_each * len(PACKET)
    limits = [str(credit.least_bytes), str(credit.most_bytes), str(total)]
    arguments = [hub.url, receiver.seed.decode(), *limits, *(user.peer for user in senders)]
    child = children.spawn([sys.executable, str(CHILD), *arguments], name="receiver")
    await child.until_line("ready")
    server = psutil.Process(hub.process.pid)
    most_bytes = 0
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(node(hub.address(), user)) for user in senders]
        for each in nodes:
            each.meet(receiver.peer)
        pushes = {each.peer: asyncio.create_task(each.push(receiver.peer, packets_each, PACKET)) for each in nodes}
        try:
            while child.find_line("^done$") is None and child.exit_code is None:
                most_bytes = max(most_bytes, server.memory_info().rss)
                await asyncio.sleep(0.02)
            await child.until_line("^done$")
        finally:
            for push in pushes.values():
                if not push.done():
                    push.cancel()
            await asyncio.gather(*pushes.values(), return_exceptions=True)
        digests = {
            peer: push.result().hex() for peer, push in pushes.items() if not push.cancelled() and not push.exception()
        }
    return child, most_bytes, digests


@pytest.fixture
async def crowd(tmp_path: Path) -> AsyncIterator[tuple[PlainHub, list[PlainUser]]]:
    users = [member() for _ in range(17)]
    with PlainHub(tmp_path / "hub", users) as hub:
        hub.start()
        yield hub, users


@pytest.mark.timeout(240)
async def test_16_senders_and_a_slow_receiver(crowd: tuple[PlainHub, list[PlainUser]], children: Children) -> None:
    hub, users = crowd
    child, hub_bytes, digests = await flood(hub, children, users, CreditConfig(), packets_each=16)
    assert child.find_line(rf"bytes={16 * 16 * len(PACKET)} losses=0 beyond=0"), child.output()
    told = dict(line.split()[1:] for line in child.output().splitlines() if line.startswith("digest"))
    assert told == digests
    assert len(told) == 16
    assert "Slow Consumer" not in hub.process.output()
    print(f"the hub used {hub_bytes / MIB:.0f} MiB")
    assert hub_bytes < 256 * MIB  # most of it is garbage that Go has not collected yet


@pytest.mark.timeout(240)
async def test_without_credit_the_hub_would_cut_the_receiver_off(
    crowd: tuple[PlainHub, list[PlainUser]], children: Children
) -> None:
    """The counter-check: the load of the test above is one that the hub does not put up with."""
    hub, users = crowd
    no_limit = CreditConfig(least_bytes=1024 * MIB, most_bytes=1024 * MIB)
    child, _, _ = await flood(hub, children, users, no_limit, packets_each=16)
    assert child.find_line(r"losses=1"), child.output()
    await poll_until(lambda: "Slow Consumer" in hub.process.output(), DEADLINE_SECONDS, "the hub to say why")


# A member that ignores credit


@asynccontextmanager
async def flooded(
    hub: PlainHub, children: Children, *, tolerated_bytes: int
) -> AsyncIterator[tuple[Links, ManagedProcess]]:
    """Carol floods Bob, who is slow; Alice's links, and Bob."""
    victim = children.spawn(
        [sys.executable, FLOODED, hub.url, BOB.seed.decode(), str(tolerated_bytes), ALICE.peer, CAROL.peer],
        name="victim",
    )
    links = Links(ALICE.peer, "s", SystemClock())
    wire = BulkWire(hub.address(), seed=ALICE.seed, config=QUICK)
    relay = RelayCarrier(links, ALICE.peer, SUBJECTS, wire, keys_of(ALICE.peer))
    links.add_carrier(relay)
    try:
        await relay.start()
        links.update_peer(presence(BOB.peer))
        await ask(links, b"before")
        subject = SUBJECTS.relay(BOB.peer, CAROL.peer)
        hostile = children.spawn(
            [sys.executable, FLOODER, hub.url, CAROL.seed.decode(), "bulk", subject], name="hostile"
        )
        await hostile.until_line("let in")
        yield links, victim
        assert hostile.exit_code is None, hostile.output()
    finally:
        await links.close()


async def ask(links: Links, frame: bytes) -> None:
    """Have Bob answer with the digest of this."""
    answer = await links.request(BOB.peer, Question(text="?"), [frame], reply=Answer, timeout_seconds=DEADLINE_SECONDS)
    assert answer.message.text == hashlib.blake2b(frame).hexdigest()


@pytest.mark.timeout(240)
async def test_a_member_that_ignores_credit_is_not_listened_to_and_others_are(
    plain_hub: PlainHub, children: Children
) -> None:
    async with flooded(plain_hub, children, tolerated_bytes=4 * MIB) as (links, victim):
        await victim.until_line(r"floods=1 shut_out=1")
        for _ in range(4):
            await ask(links, os.urandom(8 * MIB))
        mark = victim.mark()
        await victim.until_line(r"losses", since=mark)
        figures = re.findall(r"losses=(\d+) floods=(\d+)", victim.output())[-1]
        print(f"the hub cut the victim off {figures[0]} times")
        assert int(figures[0]) <= 3  # a reconnect each, while the flood was new
        assert figures[1] == "1"


@pytest.mark.timeout(240)
async def test_without_that_the_hub_cuts_the_victim_off_again_and_again(
    plain_hub: PlainHub, children: Children
) -> None:
    """The counter-check: the flood is one that the hub does not put up with."""
    async with flooded(plain_hub, children, tolerated_bytes=2**50) as (_, victim):
        await victim.until_line(r"losses=4 floods=0")


# Under the links


async def test_links_work_over_the_relay(tls_hub: PlainHub) -> None:
    async with AsyncExitStack() as stack:
        links: dict[str, Links] = {}
        for user in (ALICE, BOB):
            mine = links[user.peer] = Links(user.peer, f"session of {user.peer}", SystemClock())
            wire = BulkWire(tls_hub.address(), seed=user.seed)
            relay = RelayCarrier(mine, user.peer, SUBJECTS, wire, keys_of(user.peer))
            mine.add_carrier(relay)
            stack.push_async_callback(mine.close)
            await relay.start()

        async def answer(incoming: Incoming[Question]) -> tuple[Answer, list[memoryview]]:
            return Answer(text=incoming.message.text.upper()), list(incoming.frames)

        links[BOB.peer].handle(Question, answer)
        for one, other in ((ALICE, BOB), (BOB, ALICE)):
            links[one.peer].update_peer(presence(other.peer, f"session of {other.peer}"))
        frame = os.urandom(20 * MIB)
        reply = await links[ALICE.peer].request(
            BOB.peer, Question(text="hello"), [frame], reply=Answer, timeout_seconds=DEADLINE_SECONDS
        )
        assert reply.message.text == "HELLO"
        assert bytes(reply.frames[0]) == frame
