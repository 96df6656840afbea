"""Direct carriers against hostile bytes: no crash, no hang, no growth, all of it counted."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import zmq
from directpeers import DEADLINE_SECONDS, Peer, direct_config, entry, introduce, open_peer, send_all

from potluck.link.direct.greeting import (
    CONTROL_MARK,
    DATA_MARK,
    Hello,
    LinkKeys,
    Ready,
    Welcome,
    answer_to,
    new_nonce,
    pack,
    unpack,
)
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children

FLOODER = Path(__file__).with_name("hostilechild.py")
GREETING_NULL = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
GREETING_CURVE = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
FLOOD_MAY_COST_BYTES = 400 * 2**20  # what a flood on loopback brings in between two checks, and a lot of slack


def connect(peer: Peer) -> socket.socket:
    bound = peer.carrier.bound[0]
    return socket.create_connection((str(bound.ip), bound.port), timeout=10)


def say(peer: Peer, text: bytes) -> None:
    """Connect, send, and hang up; being hung up on before that is fine."""
    with connect(peer) as stranger, suppress(OSError):
        stranger.sendall(text)
        stranger.shutdown(socket.SHUT_WR)


@asynccontextmanager
async def shaken_hands(peer: Peer) -> AsyncIterator[asyncio.StreamWriter]:
    """A connection in trusted-LAN mode that has come as far as anybody can: ZMTP's own handshake."""
    bound = peer.carrier.bound[0]
    reader, writer = await asyncio.open_connection(str(bound.ip), bound.port)
    try:
        ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
        writer.write(GREETING_NULL + b"\x04" + bytes([len(ready)]) + ready)
        await asyncio.wait_for(reader.readuntil(b"\x05READY"), DEADLINE_SECONDS)
        yield writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


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


def hostile_texts() -> list[bytes]:
    source = random.Random(20)
    ready = b"\x05READY"
    return [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01" + source.randbytes(300),
        *(source.randbytes(size) for size in (1, 10, 64, 100, 1000, 100_000)),
        GREETING_CURVE[:30],
        GREETING_CURVE + source.randbytes(2000),
        GREETING_NULL + source.randbytes(2000),
        GREETING_NULL + b"\x04" + bytes([len(ready)]) + ready,
        GREETING_CURVE + b"\x06" + struct.pack(">Q", 2**62) + source.randbytes(1000),
        GREETING_CURVE + b"\x06" + struct.pack(">Q", 2**63 + 5) + source.randbytes(1000),
        GREETING_CURVE + b"\x04\xc8" + b"\x05HELLO" + b"\x01\x00" + source.randbytes(192),
        b"\xff" + bytes(8) + b"\x7f\x09\x09" + source.randbytes(2000),
        b"\xff" + bytes(8) + b"\x7f\x00" + source.randbytes(2000),
        b"\x01\x00" + source.randbytes(2000),  # what ZeroMQ 2 began with
    ]


async def test_bytes_of_strangers_are_survived_and_counted():
    async with open_peer("a") as a:
        for text in hostile_texts():
            say(a, text)
        count = len(hostile_texts())
        await poll_until(lambda: a.stat("accepted") == count, DEADLINE_SECONDS, "all connections to be seen")
        await poll_until(lambda: a.stat("connections") == 0, DEADLINE_SECONDS, "all connections to end")
        assert a.stat("handshake_failed") > 0
        assert a.stat("admitted") == 0
        assert a.events.packets == []
        await still_works(a)


async def test_plain_mode_survives_the_bytes_of_strangers_too():
    async with open_peer("a", direct_config(plain=True)) as a:
        for text in hostile_texts():
            say(a, text)
        for message in (b"\x00\x05hello", b"\x00\x00", b"\x01\x01x" * 1000 + b"\x00\x01x"):
            before = a.stat("cut_bad_greeting")
            async with shaken_hands(a) as stranger:
                stranger.write(message)
                await poll_until(lambda before=before: a.stat("cut_bad_greeting") > before, DEADLINE_SECONDS, "a cut")
        async with shaken_hands(a) as stranger:
            stranger.write(b"\x02" + struct.pack(">Q", 2**40) + b"x")
            await poll_until(lambda: a.stat("connections") == 0, DEADLINE_SECONDS, "all connections to end")
        assert a.events.packets == []
        assert a.events.paths == []


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
            for byte in GREETING_CURVE * 100:
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


class RawMember:
    """A member with a valid key that speaks raw ZeroMQ."""

    def __init__(self, target: Peer, name: str = "mallory", *, plain: bool = False, routing_id: bytes = b"") -> None:
        self.keys = LinkKeys.generate()
        self.name = name
        self.target = target
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.reconnect_ivl = -1
        self.socket.rcvtimeo = 0
        if routing_id:
            self.socket.routing_id = routing_id
        if not plain:
            self.socket.curve_serverkey = target.carrier.link_key.encode()
            self.socket.curve_publickey, self.socket.curve_secretkey = self.keys.public, self.keys.secret

    def join(self) -> None:
        """Get into the target's roster."""
        self.target.carrier.update_peer(entry(self.name, "s1", self.keys.link_key))

    def connect(self) -> None:
        self.socket.connect(str(self.target.carrier.bound[0]))

    def hello(self, **changes: object) -> Hello:
        fields = {
            "peer": self.name,
            "session": "s1",
            "key": self.keys.link_key,
            "to": self.target.carrier.link_key,
            "nonce": new_nonce(),
        }
        return Hello(**{**fields, **changes})  # type: ignore[arg-type]

    async def receive(self) -> bytes:
        await poll_until(lambda: self.socket.poll(0), DEADLINE_SECONDS, "an answer")
        return self.socket.recv()

    async def greet(self) -> None:
        hello = self.hello()
        self.socket.send(pack(hello))
        welcome = unpack(memoryview(await self.receive()))
        assert isinstance(welcome, Welcome)
        self.socket.send(pack(answer_to(hello, welcome, self.keys)))
        await self.target.until_open(self.name)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@contextmanager
def raw_member(target: Peer, name: str = "mallory", **options: object) -> Iterator[RawMember]:
    member = RawMember(target, name, **options)  # type: ignore[arg-type]
    try:
        yield member
    finally:
        member.close()


@pytest.mark.parametrize("what", ["too many parts", "empty", "unknown mark", "greeting again", "header too long"])
async def test_a_member_that_sends_malformed_packets_is_shut_out_after_a_while(what):
    messages = {
        "too many parts": [DATA_MARK + b"header", b"payload", b"what is this", b"and this"],
        "empty": [b""],
        "unknown mark": [b"\x77header", b"payload"],
        "greeting again": [CONTROL_MARK + b"\xc0"],
        "header too long": [DATA_MARK + bytes(10_001)],
    }
    async with open_peer("a", direct_config(sockets={"max_header_bytes": 10_000})) as a:
        with raw_member(a) as mallory:
            mallory.join()
            mallory.connect()
            await mallory.greet()
            mallory.socket.send_multipart([DATA_MARK + b"fine", b"payload"])
            await a.until_received(1)
            for _ in range(9):
                mallory.socket.send_multipart(messages[what])
            await a.until_closed("mallory")
            assert a.stat("malformed") == 9
            assert a.stat("shut_out") == 1
            assert a.events.packets == [("mallory", b"fine", b"payload")]
            mallory.join()  # the roster still has it
            assert not a.carrier.send("mallory", b"", None)
        await still_works(a)


async def test_a_frame_above_the_limit_ends_the_connection():
    async with open_peer("a") as a:
        with raw_member(a) as mallory:
            mallory.join()
            mallory.connect()
            await mallory.greet()
            mallory.socket.send_multipart([DATA_MARK + b"big", bytes(2 * 1024 * 1024)])
            await a.until_closed("mallory")
            assert a.events.packets == []


async def test_a_member_cannot_speak_for_another():
    async with open_peer("a") as a, open_peer("b") as b:
        introduce(a, b)
        await a.until_open("b")
        # A routing id of its own choice does not make it anybody else.
        with raw_member(a, routing_id=b"b") as mallory:
            mallory.join()
            mallory.connect()
            await mallory.greet()
            mallory.socket.send_multipart([DATA_MARK + b"as b", b""])
            await a.until_received(1)
            assert a.events.packets == [("mallory", b"as b", b"")]
        for claims in (
            {"peer": "b"},
            {"peer": "b", "key": b.carrier.link_key},
            {"session": "s2"},
            {"to": b.carrier.link_key},
            {"protocol": 99},
            {"peer": ""},
        ):
            with raw_member(a) as mallory:
                mallory.join()
                mallory.connect()
                before = a.stat("cut_bad_greeting")
                mallory.socket.send(pack(mallory.hello(**claims)))
                await poll_until(
                    lambda before=before: a.stat("cut_bad_greeting") > before, DEADLINE_SECONDS, f"{claims} to be cut"
                )
        assert a.events.is_open("b")
        assert not a.events.is_open("mallory")


async def test_in_plain_mode_a_stranger_who_knows_a_members_public_key_gets_nowhere():
    async with (
        open_peer("a", direct_config(plain=True)) as a,
        open_peer("b", direct_config(plain=True, listen=())) as b,
    ):
        a.carrier.update_peer(b.presence())
        with raw_member(a, plain=True) as mallory:
            mallory.connect()
            mallory.socket.send(pack(mallory.hello(peer="b", key=b.carrier.link_key)))
            assert isinstance(unpack(memoryview(await mallory.receive())), Welcome)
            mallory.socket.send(pack(Ready(proof=os.urandom(32))))
            mallory.socket.send_multipart([DATA_MARK + b"as b", b""])
            await poll_until(lambda: a.stat("cut_bad_greeting") == 1, DEADLINE_SECONDS, "the false proof to be seen")
            await poll_until(lambda: a.stat("connections") == 0, DEADLINE_SECONDS, "the connection to end")
            assert a.events.packets == []
            assert a.events.paths == []


async def test_a_member_that_connects_over_and_over_is_slowed_down():
    async with open_peer("a") as a:
        keys = LinkKeys.generate()
        a.carrier.update_peer(entry("mallory", "s1", keys.link_key))

        def connect_once() -> None:
            with raw_member(a) as mallory:
                mallory.socket.curve_publickey, mallory.socket.curve_secretkey = keys.public, keys.secret
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
    """A real member floods one real message through CURVE; a bystander's transfer goes on meanwhile."""
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
        argv = [role, name, "s1", keys.link_key, keys.secret.decode(), m.carrier.link_key, address]
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
