"""Direct carriers against hostile bytes: no crash, no hang, no growth, all of it counted."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from directpeers import DEADLINE_SECONDS, Peer, direct_config, entry, introduce, open_peer, send_all
from rawlink import RawMember, raw_member

from potluck.link.direct import greeting
from potluck.link.direct.greeting import CONTROL_MARK, DATA_MARK, KNOCK, WELCOME_BYTES, Caller, LinkKeys
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children

FLOODER = Path(__file__).with_name("hostilechild.py")
GREETING_NULL, GREETING_CURVE, GREETING_PLAIN = (
    b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
    for mechanism in (b"NULL", b"CURVE", b"PLAIN")
)
FLOOD_MAY_COST_BYTES = 400 * 2**20  # what a flood on loopback brings in between two checks, and a lot of slack


def connect(peer: Peer) -> socket.socket:
    bound = peer.carrier.bound[0]
    return socket.create_connection((str(bound.ip), bound.port), timeout=10)


def say(peer: Peer, text: bytes) -> None:
    """Connect, send, and hang up; being hung up on before that is fine."""
    with connect(peer) as stranger, suppress(OSError):
        stranger.sendall(text)
        stranger.shutdown(socket.SHUT_WR)


async def still_works(peer: Peer) -> None:
    """A newcomer can connect and both can talk."""
    async with open_peer(f"newcomer{random.randrange(10**9)}") as other:
        introduce(peer, other)
        await other.until_open(peer.name)
        await peer.until_open(other.name)
        await send_all(other, peer.name, [(b"hello", b"you")])
        await poll_until(
            lambda: (other.name, b"hello", b"you") in peer.events.packets, DEADLINE_SECONDS, "the newcomer's packet"
        )
        peer.carrier.update_peer(other.presence(state="left"))


def command(body: bytes) -> bytes:
    """A command of ZMTP."""
    return b"\x04" + bytes([len(body)]) + body


def stranger_credentials() -> bytes:
    """As they should be, of a key that nobody knows."""
    stranger = Caller(LinkKeys.generate(), LinkKeys.generate().link_key, plain=False)
    return b"".join(bytes([len(part)]) + part for part in (stranger.username, stranger.password))


def hostile_texts() -> list[bytes]:
    source = random.Random(20)
    ready, hello = b"\x05READY", b"\x05HELLO"
    credentials = stranger_credentials()
    return [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01" + source.randbytes(300),
        *(source.randbytes(size) for size in (1, 10, 64, 100, 1000, 100_000)),
        GREETING_PLAIN[:30],
        GREETING_PLAIN + source.randbytes(2000),
        GREETING_CURVE + source.randbytes(2000),
        GREETING_NULL + source.randbytes(2000),
        GREETING_NULL + command(ready),
        GREETING_PLAIN + command(ready),
        GREETING_PLAIN + b"\x06" + struct.pack(">Q", 2**62) + source.randbytes(1000),
        GREETING_PLAIN + b"\x06" + struct.pack(">Q", 2**63 + 5) + source.randbytes(1000),
        GREETING_PLAIN + command(hello),
        GREETING_PLAIN + command(hello + b"\xff"),
        GREETING_PLAIN + command(hello + b"\x00\x00"),
        GREETING_PLAIN + command(hello + credentials),
        GREETING_PLAIN + command(hello + credentials[:-1]),
        GREETING_PLAIN + command(hello + credentials + b"x"),
        GREETING_PLAIN + command(hello + b"\x28" + source.randbytes(40) + b"\x30" + source.randbytes(48)),
        b"\xff" + bytes(8) + b"\x7f\x09\x09" + source.randbytes(2000),
        b"\xff" + bytes(8) + b"\x7f\x00" + source.randbytes(2000),
        b"\x01\x00" + source.randbytes(2000),  # what ZeroMQ 2 began with
    ]


@pytest.mark.parametrize("plain", [False, True], ids=["sealed", "plain"])
async def test_bytes_of_strangers_are_survived_and_counted(plain):
    async with open_peer("a", direct_config(plain=plain)) as a:
        for text in hostile_texts():
            say(a, text)
        count = len(hostile_texts())
        await poll_until(lambda: a.stat("accepted") == count, DEADLINE_SECONDS, "all connections to be seen")
        await poll_until(lambda: a.stat("connections") == 0, DEADLINE_SECONDS, "all connections to end")
        assert a.stat("handshake_failed") > 0
        before = a.stat("refused_unknown_key")  # of those who hung up at once, some were not even asked about
        with connect(a) as stranger:
            stranger.sendall(GREETING_PLAIN + command(b"\x05HELLO" + stranger_credentials()))
            await poll_until(lambda: a.stat("refused_unknown_key") > before, DEADLINE_SECONDS, "it to be refused")
        assert a.stat("admitted") == 0
        assert a.events.packets == []
        assert a.events.paths == []
        if not plain:
            await still_works(a)


async def test_connections_that_say_nothing_are_few_and_short():
    config = direct_config(sockets={"handshake_seconds": 1.0})
    process = psutil.Process()
    async with open_peer("a", config) as a:
        before = process.num_fds()
        with ExitStack() as stack:
            silent = [stack.enter_context(connect(a)) for _ in range(200)]
            await poll_until(lambda: a.stat("accepted") == 200, DEADLINE_SECONDS, "all connections to be seen")
            await poll_until(
                lambda: process.num_fds() <= before + 200 + 64, DEADLINE_SECONDS, "only 64 connections to be kept"
            )
            assert a.stat("cut_too_many_ungreeted") >= 200 - 64
            await poll_until(lambda: a.stat("connections") == 0, DEADLINE_SECONDS, "the rest to be cut in time")
            assert all(each.recv(1000) is not None for each in silent)
        await still_works(a)


async def test_a_connection_that_trickles_is_cut_in_time():
    async with open_peer("a", direct_config(sockets={"handshake_seconds": 1.0})) as a:
        with connect(a) as slow:
            ended = False
            slow.setblocking(False)
            for byte in GREETING_PLAIN * 100:
                try:
                    slow.send(bytes([byte]))
                    ended = slow.recv(1000) == b""
                except BlockingIOError:
                    pass
                except OSError:
                    ended = True
                if ended:
                    break
                await asyncio.sleep(0.02)
            assert ended
        await poll_until(lambda: a.stat("connections") == 0, DEADLINE_SECONDS, "it to be forgotten")


@pytest.mark.parametrize("plain", [False, True], ids=["sealed", "plain"])
@pytest.mark.parametrize("what", ["empty", "unknown mark", "greeting again", "header too long", "a mark with payload"])
async def test_a_member_that_sends_malformed_packets_is_shut_out_after_a_while(what, plain):
    packets = {
        "empty": (b"", None),
        "unknown mark": (b"\x77header", b"payload"),
        "greeting again": (CONTROL_MARK, None),
        "header too long": (DATA_MARK + bytes(10_001), None),
        "a mark with payload": (b"\x03", b"payload"),
    }
    async with open_peer("a", direct_config(plain=plain, sockets={"max_header_bytes": 10_000})) as a:
        with raw_member(a, plain=plain) as mallory:
            mallory.join()
            await mallory.greet()
            mallory.send(mallory.seal(DATA_MARK + b"fine", b"payload"))
            await a.until_received(1)
            for _ in range(9):
                mallory.send(mallory.seal(*packets[what]))
            await a.until_closed("mallory")
            assert a.stat("malformed") == 9
            assert a.stat("shut_out") == 1
            assert a.events.packets == [("mallory", b"fine", b"payload")]
            mallory.join()  # the roster still has it
            assert not a.carrier.send("mallory", b"", None)
        if not plain:
            await still_works(a)


async def test_in_plain_mode_too_many_parts_are_malformed():
    async with open_peer("a", direct_config(plain=True)) as a:
        with raw_member(a, plain=True) as mallory:
            mallory.join()
            await mallory.greet()
            for _ in range(9):
                mallory.send([DATA_MARK + b"header", b"payload", b"what is this", b"and this"])
            await a.until_closed("mallory")
            assert a.stat("malformed") == 9
            assert a.stat("shut_out") == 1
            assert a.events.packets == []


def changed(part: bytes, at: int) -> bytes:
    return part[:at] + bytes([part[at] ^ 0x10]) + part[at + 1 :]


def repeated(member: RawMember) -> None:
    parts = member.seal(DATA_MARK + b"once")
    member.send(parts)
    member.send(parts)


def lost(member: RawMember) -> None:
    member.seal(DATA_MARK + b"lost")
    member.send(member.seal(DATA_MARK + b"next"))


def swapped(member: RawMember) -> None:
    first, second = member.seal(DATA_MARK + b"1"), member.seal(DATA_MARK + b"2")
    member.send(second)
    member.send(first)


BIG = bytes(range(256)) * 1024

# What a member may send that its keys did not seal so, and the packets of it that are accepted.
FALSE_PARTS: dict[str, tuple[Callable[[RawMember], None], list[bytes]]] = {
    "not sealed": (lambda m: m.send([DATA_MARK + b"in the clear", b"payload"]), []),
    "nothing": (lambda m: m.send([b""]), []),
    "shorter than a tag": (lambda m: m.send([b"x" * 15]), []),
    "noise": (lambda m: m.send([os.urandom(100)]), []),
    "large noise": (lambda m: m.send([os.urandom(100), os.urandom(100_000)]), []),
    "a changed frame": (lambda m: m.send([changed(m.seal(DATA_MARK + b"x")[0], 0)]), []),
    "a changed tag": (lambda m: m.send([changed(m.seal(DATA_MARK + b"x")[0], -1)]), []),
    "a changed payload": (lambda m: m.send([(p := m.seal(DATA_MARK, BIG))[0], changed(p[1], 77_777)]), []),
    "cut off": (lambda m: m.send([m.seal(DATA_MARK + b"x")[0][:-1]]), []),
    "payload cut off": (lambda m: m.send([(p := m.seal(DATA_MARK, BIG))[0], p[1][:-1]]), []),
    "payload missing": (lambda m: m.send(m.seal(DATA_MARK, BIG)[:1]), []),
    "frame missing": (lambda m: m.send(m.seal(DATA_MARK, BIG)[1:]), []),
    "parts swapped": (lambda m: m.send(m.seal(DATA_MARK, b"payload")[::-1]), []),
    "two packets as one": (lambda m: m.send([*m.seal(DATA_MARK + b"1"), *m.seal(DATA_MARK + b"2")]), []),
    "one part too many": (lambda m: m.send([*m.seal(DATA_MARK, b"payload"), b"more"]), []),
    "repeated": (repeated, [b"once"]),
    "lost": (lost, []),
    "swapped": (swapped, []),
}


@pytest.mark.parametrize("what", FALSE_PARTS)
async def test_what_was_not_sealed_so_is_not_accepted_and_ends_the_connection(what):
    """It is the connection's end and not the member's: whoever is in between could have done it."""
    act, accepted = FALSE_PARTS[what]
    async with open_peer("a") as a:
        keys = LinkKeys.generate()
        with raw_member(a, keys=keys) as mallory:
            mallory.join()
            await mallory.greet()
            mallory.send(mallory.seal(DATA_MARK + b"fine", BIG))
            await a.until_received(1)
            act(mallory)
            mallory.send(mallory.seal(DATA_MARK + b"afterwards"))
            await a.until_closed("mallory")
            assert a.stat("cut_tampered") == 1
            assert a.stat("shut_out") == 0
            expected = [("mallory", b"fine", BIG), *(("mallory", header, None) for header in accepted)]
            assert a.events.packets == expected
        with raw_member(a, keys=keys) as mallory:  # it may come again
            await mallory.greet()
            mallory.send(mallory.seal(DATA_MARK + b"again"))
            await a.until_received(len(expected) + 1)
            assert a.events.packets == [*expected, ("mallory", b"again", None)]


@pytest.mark.parametrize("plain", [False, True], ids=["sealed", "plain"])
async def test_a_member_that_does_not_greet_is_cut(plain):
    async with open_peer("a", direct_config(plain=plain)) as a:
        keys = LinkKeys.generate()
        for parts in ([b"hello"], [b""], [KNOCK, b""], [DATA_MARK + b"packet", b"payload"], [b"x"] * 1000):
            with raw_member(a, keys=keys, plain=plain) as mallory:
                mallory.join()
                mallory.connect()
                before = a.stat("cut_bad_greeting")
                mallory.send(parts)
                await poll_until(lambda before=before: a.stat("cut_bad_greeting") > before, DEADLINE_SECONDS, "a cut")
        for ready in (b"", CONTROL_MARK, os.urandom(17), os.urandom(100_000)):
            with raw_member(a, keys=keys, plain=plain) as mallory:
                mallory.connect()
                mallory.send([KNOCK])
                assert len(await mallory.receive()) == WELCOME_BYTES
                before = a.stat("cut_bad_greeting")
                mallory.send([ready])
                mallory.send([DATA_MARK + b"packet", b"payload"])
                await poll_until(lambda before=before: a.stat("cut_bad_greeting") > before, DEADLINE_SECONDS, "a cut")
        await poll_until(lambda: a.stat("connections") == 0, DEADLINE_SECONDS, "all connections to end")
        assert a.events.packets == []
        assert a.events.paths == []


async def test_a_frame_above_the_limit_ends_the_connection():
    async with open_peer("a") as a:
        with raw_member(a) as mallory:
            mallory.join()
            await mallory.greet()
            mallory.send(mallory.seal(DATA_MARK + b"big", bytes(2 * 1024 * 1024)))
            await a.until_closed("mallory")
            assert a.events.packets == []


async def test_a_member_cannot_speak_for_another(monkeypatch):
    async with open_peer("a") as a, open_peer("b") as b:
        introduce(a, b)
        await a.until_open("b")
        # A routing id of its own choice does not make it anybody else.
        with raw_member(a, routing_id=b"b") as mallory:
            mallory.join()
            await mallory.greet()
            mallory.send(mallory.seal(DATA_MARK + b"as b", b""))
            await a.until_received(1)
            assert a.events.packets == [("mallory", b"as b", b"")]
        keys = LinkKeys.generate()
        with monkeypatch.context() as patch:
            patch.setattr(greeting, "PROTOCOL_VERSION", 99)
            another_version = Caller(keys, a.carrier.link_key, plain=False).password
        own = Caller(keys, a.carrier.link_key, plain=False)
        for username, password in (
            (b.carrier.link_key.encode(), own.password),
            (own.username, Caller(keys, b.carrier.link_key, plain=False).password),  # meant for another
            (own.username, Caller(keys, a.carrier.link_key, plain=True).password),
            (own.username, another_version),
            (own.username, own.password[:-1]),
            (own.username, own.password + b"x"),
            (own.username, os.urandom(48)),
            (own.username, b"x"),
        ):
            with raw_member(a, keys=keys, username=username, password=password) as mallory:
                mallory.join()
                mallory.connect()
                before = a.stat("refused_bad_proof")
                mallory.send([KNOCK])
                await poll_until(
                    lambda before=before: a.stat("refused_bad_proof") > before, DEADLINE_SECONDS, "it to be refused"
                )
        assert a.events.is_open("b")
        assert not a.events.is_open("mallory")


@pytest.mark.parametrize("plain", [False, True], ids=["sealed", "plain"])
async def test_credentials_that_were_overheard_lead_nowhere(plain):
    async with open_peer("a", direct_config(plain=plain)) as a:
        with raw_member(a, plain=plain) as mallory:
            mallory.join()
            await mallory.greet()
            overheard = {"username": mallory.caller.username, "password": mallory.caller.password}
        await a.until_closed("mallory")
        with raw_member(a, "eve", plain=plain, **overheard) as eve:
            eve.connect()
            await poll_until(lambda: a.stat("refused_replay") == 1, DEADLINE_SECONDS, "the replay to be refused")
        a.carrier._admission._used.clear()  # as if it were so long ago that nobody remembers
        with raw_member(a, "eve", plain=plain, **overheard) as eve:
            eve.connect()
            eve.send([KNOCK])
            assert len(await eve.receive()) == WELCOME_BYTES
            eve.send([os.urandom(17)])
            eve.send([DATA_MARK + b"packet", b"payload"])
            await poll_until(lambda: a.stat("cut_bad_greeting") == 1, DEADLINE_SECONDS, "the false proof to be seen")
        await poll_until(lambda: a.stat("connections") == 0, DEADLINE_SECONDS, "all connections to end")
        assert a.events.packets == []
        assert a.events.paths == [("opened", "mallory"), ("closed", "mallory")]


async def test_a_member_that_connects_over_and_over_is_slowed_down():
    async with open_peer("a") as a:
        keys = LinkKeys.generate()
        a.carrier.update_peer(entry("mallory", "s1", keys.link_key))

        def connect_once() -> None:
            with raw_member(a, keys=keys) as mallory:
                mallory.connect()
                mallory.socket.send(b"x")
                mallory.socket.poll(50)

        for _ in range(40):
            if a.stat("refused_too_often"):
                break
            await asyncio.to_thread(connect_once)
        await poll_until(lambda: a.stat("refused_too_often") > 0, DEADLINE_SECONDS, "it to be slowed down")
        await still_works(a)
    await asyncio.get_running_loop().shutdown_default_executor()


@pytest.mark.parametrize("role", ["dialler", "ungreeted", "listener"])
async def test_a_message_without_end_is_cut_while_memory_stays_bounded(role, children: Children):
    """A real member floods one real message; a bystander's transfer goes on meanwhile."""
    keys = LinkKeys.generate()
    process = psutil.Process()
    async with open_peer("m") as m, open_peer("n") as bystander:
        introduce(m, bystander)
        await m.until_open("n")
        await bystander.until_open("m")
        resting = process.memory_info().rss
        address = "tcp://127.0.0.1:0" if role == "listener" else str(m.carrier.bound[0])
        name = "z" if role == "listener" else "a"
        m.carrier.update_peer(entry(name, "s1", keys.link_key))
        argv = [role, keys.link_key, keys.secret.decode(), m.carrier.link_key, address]
        flooder = children.spawn([sys.executable, FLOODER, *argv], name="flooder")
        if role == "listener":
            found = await flooder.until_line(r"listening (\S+)", DEADLINE_SECONDS)
            m.carrier.update_peer(m.presence())
            m.carrier.update_peer(entry(name, "s1", keys.link_key, found[1]))
        if role != "ungreeted":
            await flooder.until_line("greeted", DEADLINE_SECONDS)
        highest = resting

        async def cut() -> bool:
            nonlocal highest
            highest = max(highest, process.memory_info().rss)
            await send_all(bystander, "m", [(b"bystander", bytes(100_000))])
            m.events.packets.clear()
            return m.stat("cut_flood") >= 1

        await poll_until(cut, DEADLINE_SECONDS, lambda: f"the flood to be cut ({flooder.tail()})", every_seconds=0.005)
        assert highest - resting < FLOOD_MAY_COST_BYTES
        await flooder.until_line("flood ended", DEADLINE_SECONDS)
        if role != "ungreeted":
            await m.until_closed(name)
            assert m.stat("shut_out") == 1
            m.carrier.update_peer(entry(name, "s1", keys.link_key))  # the same session is not let in again
            assert not m.events.is_open(name)
        assert ("closed", "n") not in m.events.paths
        await still_works(m)


async def test_a_fast_transfer_is_no_flood():
    async with open_peer("a") as a, open_peer("b") as b:
        introduce(a, b)
        await a.until_open("b")
        payload = bytearray(os.urandom(1024 * 1024))
        received = 0

        def count(carrier: object, peer: str, header: memoryview, body: memoryview | None) -> None:
            nonlocal received
            received += len(body or b"")

        b.events.packet_arrived = count  # type: ignore[method-assign]
        await send_all(a, "b", [(b"", payload)] * 1000)
        await poll_until(lambda: received == 1000 * len(payload), DEADLINE_SECONDS, "all bytes")
        assert b.stat("cut_flood") == a.stat("cut_flood") == 0
        assert b.events.paths == [("opened", "a")]
