"""Direct carriers against hostile bytes: no crash, no hang, no growth, all of it counted."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress

import psutil
import pytest
from directpeers import DEADLINE_SECONDS, Peer, direct_config, entry, introduce, open_peer, send_all
from rawlink import WELCOME_BYTES, RawMember, raw_member

from potluck.link.direct import greeting
from potluck.link.direct.greeting import BAD_PROOF, KNOCK_BYTES, MAGIC, NOT_ADMITTED, Caller, LinkKeys
from potluck.link.direct.pulse import DATA_MARK
from potluck.link.direct.sealing import HEAD, HEAD_BYTES
from potluck.testing.polling import poll_until


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


def stranger_knock(*, plain: bool) -> bytes:
    """As it should be, of a key that nobody knows."""
    return Caller(LinkKeys.generate(), LinkKeys.generate().link_key, plain=plain).knock.pack()


def hostile_texts(*, plain: bool) -> list[bytes]:
    source = random.Random(20)
    knock = stranger_knock(plain=plain)
    return [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 5,
        b"\x16\x03\x01" + source.randbytes(300),
        *(source.randbytes(size) for size in (1, 10, 64, 100, 1000, 100_000)),
        *(knock[:size] for size in (1, 7, 10, KNOCK_BYTES - 1)),
        knock,
        knock + source.randbytes(100_000),
        MAGIC + source.randbytes(KNOCK_BYTES),
        MAGIC + b"\0\x01\x07" + knock[10:],  # there is no such mode
        MAGIC.upper() + knock[len(MAGIC) :],
        bytes(KNOCK_BYTES),
        b"\xff" * 2000,
    ]


@pytest.mark.parametrize("plain", [False, True], ids=["sealed", "plain"])
async def test_bytes_of_strangers_are_survived_and_counted(plain):
    async with open_peer("a", direct_config(plain=plain)) as a:
        texts = hostile_texts(plain=plain)
        for text in texts:
            say(a, text)
        await poll_until(lambda: a.stat("accepted") == len(texts), DEADLINE_SECONDS, "all connections to be seen")
        await poll_until(lambda: a.stat("connections") == 0, DEADLINE_SECONDS, "all connections to end")
        assert a.stat("handshake_failed") >= 8
        assert a.stat("refused_unknown_key") == 2
        with connect(a) as stranger:
            stranger.sendall(stranger_knock(plain=plain))
            await poll_until(lambda: a.stat("refused_unknown_key") == 3, DEADLINE_SECONDS, "it to be refused")
            assert stranger.recv(100) == bytes([NOT_ADMITTED])
            assert stranger.recv(100) == b""
        assert a.stat("admitted") == 0
        assert a.events.packets == []
        assert a.events.paths == []
        if not plain:
            await still_works(a)


async def test_connections_that_say_nothing_are_few_and_short():
    config = direct_config(sockets={"handshake_seconds": 5.0})
    process = psutil.Process()
    async with open_peer("a", config) as a:
        before = process.num_fds()
        with ExitStack() as stack:
            silent = []
            for count in (50, 100, 150, 200):  # fewer at a time than may wait to be accepted
                silent += [stack.enter_context(connect(a)) for _ in range(50)]
                await poll_until(
                    lambda count=count: a.stat("accepted") == count, DEADLINE_SECONDS, "the connections to be seen"
                )
            assert a.stat("connections") <= 64
            assert process.num_fds() <= before + 200 + 64
            assert a.stat("cut_too_many_ungreeted") >= 200 - 64
            await poll_until(lambda: a.stat("connections") == 0, DEADLINE_SECONDS, "the rest to be cut in time")
            assert all(each.recv(1000) == b"" for each in silent)
        await still_works(a)


@pytest.mark.parametrize("knocks", [False, True], ids=["in its Knock", "after it"])
async def test_a_connection_that_trickles_is_cut_in_time(knocks):
    async with open_peer("a", direct_config(sockets={"handshake_seconds": 1.0})) as a:
        with raw_member(a) as slow:
            slow.join()
            await slow.connect()
            text = slow.knock
            if knocks:
                await slow.send(slow.knock)
                assert len(await slow.receive(WELCOME_BYTES)) == WELCOME_BYTES
                text = bytes(16)
            for byte in text:
                with suppress(OSError):
                    slow.socket.send(bytes([byte]))
                await asyncio.sleep(0.1)
                if a.stat("cut_greeting_too_slow"):
                    break
            await poll_until(lambda: a.stat("cut_greeting_too_slow") == 1, DEADLINE_SECONDS, "it to be cut")
            await slow.until_hung_up_on()
        assert a.stat("connections") == 0


@pytest.mark.parametrize("plain", [False, True], ids=["sealed", "plain"])
@pytest.mark.parametrize("what", ["empty", "unknown mark", "no such mark", "a mark with payload", "a long mark"])
async def test_a_member_that_sends_malformed_packets_is_shut_out_after_a_while(what, plain):
    packets = {
        "empty": (b"", None),
        "unknown mark": (b"\x77header", b"payload"),
        "no such mark": (b"\x01", None),
        "a mark with payload": (b"\x03", b"payload"),
        "a long mark": (b"\x02\x02", None),
    }
    async with open_peer("a", direct_config(plain=plain)) as a:
        with raw_member(a, plain=plain) as mallory:
            mallory.join()
            await mallory.greet()
            await mallory.send(*mallory.seal(DATA_MARK + b"fine", b"payload"))
            await a.until_received(1)
            for _ in range(9):
                await mallory.send(*mallory.seal(*packets[what]))
            await a.until_closed("mallory")
            assert a.stat("malformed") == 9
            assert a.stat("shut_out") == 1
            assert a.events.packets == [("mallory", b"fine", b"payload")]
            mallory.join()  # the roster still has it
            assert not a.carrier.send("mallory", b"", None)
        if not plain:
            await still_works(a)


def changed(part: bytes, at: int) -> bytes:
    at %= len(part)
    return part[:at] + bytes([part[at] ^ 0x10]) + part[at + 1 :]


async def repeat(member: RawMember) -> None:
    parts = member.seal(DATA_MARK + b"once")
    await member.send(*parts, *parts)


async def lose(member: RawMember) -> None:
    member.seal(DATA_MARK + b"lost")
    await member.send(*member.seal(DATA_MARK + b"next"))


async def swap(member: RawMember) -> None:
    first, second = member.seal(DATA_MARK + b"1"), member.seal(DATA_MARK + b"2")
    await member.send(*second, *first)


def one(change: Callable[[bytes], bytes]) -> Callable[[RawMember], Awaitable[None]]:
    """Send a small packet, changed."""

    async def act(member: RawMember) -> None:
        await member.send(change(member.seal(DATA_MARK + b"x", b"payload")[0]), bytes(100))

    return act


def two(change: Callable[[bytes, bytes], bytes]) -> Callable[[RawMember], Awaitable[None]]:
    """Send a large packet, changed."""

    async def act(member: RawMember) -> None:
        frame, payload = member.seal(DATA_MARK + b"x", BIG)
        await member.send(change(frame, payload), bytes(len(BIG)))

    return act


BIG = bytes(range(256)) * 1024
H = HEAD_BYTES

# What a member may send that its keys did not seal so, and the packets of it that are accepted.
FALSE_RECORDS: dict[str, tuple[Callable[[RawMember], Awaitable[None]], list[bytes]]] = {
    "not sealed": (one(lambda record: HEAD.pack(100, 0) + bytes(116)), []),
    "nothing": (one(lambda record: HEAD.pack(0, 0) + bytes(16)), []),
    "noise": (one(lambda record: HEAD.pack(1000, 3001) + os.urandom(10_000)), []),
    "large noise": (two(lambda frame, payload: HEAD.pack(100_000, 100_001) + os.urandom(400_000)), []),
    "another size of the frame": (one(lambda record: HEAD.pack(3, 7) + record[H:]), []),
    "another size of the payload": (one(lambda record: HEAD.pack(2, 9) + record[H:]), []),
    "a frame instead of a payload": (one(lambda record: HEAD.pack(9, 0) + record[H:]), []),
    "a payload instead of a frame": (one(lambda record: HEAD.pack(0, 10) + record[H:]), []),
    "a changed frame": (one(lambda record: changed(record, H)), []),
    "a changed payload": (one(lambda record: changed(record, H + 5)), []),
    "a changed tag": (one(lambda record: changed(record, -1)), []),
    "cut off": (one(lambda record: record[:-1]), []),
    "a changed large frame": (two(lambda frame, payload: changed(frame, H) + payload), []),
    "a changed large payload": (two(lambda frame, payload: frame + changed(payload, 77_777)), []),
    "a changed large tag": (two(lambda frame, payload: frame + changed(payload, -1)), []),
    "another large size": (two(lambda frame, payload: HEAD.pack(2, len(BIG)) + frame[H:] + payload), []),
    "payload cut off": (two(lambda frame, payload: frame + payload[:-1]), []),
    "payload missing": (two(lambda frame, payload: frame), []),
    "frame missing": (two(lambda frame, payload: frame[:H] + payload), []),
    "head missing": (two(lambda frame, payload: frame[H:] + payload), []),
    "repeated": (repeat, [b"once"]),
    "lost": (lose, []),
    "swapped": (swap, []),
}


@pytest.mark.parametrize("what", FALSE_RECORDS)
async def test_what_was_not_sealed_so_is_not_accepted_and_ends_the_connection(what):
    """It is the connection's end and not the member's: whoever is in between could have done it."""
    act, accepted = FALSE_RECORDS[what]
    async with open_peer("a") as a:
        keys = LinkKeys.generate()
        with raw_member(a, keys=keys) as mallory:
            mallory.join()
            await mallory.greet()
            await mallory.send(*mallory.seal(DATA_MARK + b"fine", BIG))
            await a.until_received(1)
            await act(mallory)
            await mallory.send(*mallory.seal(DATA_MARK + b"afterwards"))
            await a.until_closed("mallory")
            assert a.stat("cut_tampered") + a.stat("cut_oversized") == 1
            assert a.stat("shut_out") == 0
            expected = [("mallory", b"fine", BIG), *(("mallory", header, None) for header in accepted)]
            assert a.events.packets == expected
        with raw_member(a, keys=keys) as mallory:  # it may come again
            await mallory.greet()
            await mallory.send(*mallory.seal(DATA_MARK + b"again"))
            await a.until_received(len(expected) + 1)
            assert a.events.packets == [*expected, ("mallory", b"again", None)]


@pytest.mark.parametrize("plain", [False, True], ids=["sealed", "plain"])
@pytest.mark.parametrize(
    "head",
    [(10_002, 0), (0, 20_002), (2**32 - 1, 0), (1, 2**32 - 1), (2**32 - 1, 2**32 - 1), (2**31, 2**31)],
    ids=["frame", "payload", "largest frame", "largest payload", "largest", "half"],
)
async def test_a_length_above_the_limit_ends_the_connection_before_anything_is_stored(head, plain):
    limits = {"max_header_bytes": 10_000, "max_payload_bytes": 20_000}
    async with open_peer("a", direct_config(plain=plain, sockets=limits)) as a:
        with raw_member(a, plain=plain) as mallory:
            mallory.join()
            await mallory.greet()
            await mallory.send(*mallory.seal(DATA_MARK + bytes(10_000), bytes(20_000)))  # as much as may be
            await a.until_received(1)
            await mallory.send(HEAD.pack(*head))  # nothing of it has come yet
            await a.until_closed("mallory")
            assert a.stat("cut_oversized") == 1
            assert a.stat("shut_out") == 0
            assert len(a.events.packets) == 1


@pytest.mark.parametrize("plain", [False, True], ids=["sealed", "plain"])
async def test_packets_arrive_however_the_bytes_are_cut(plain):
    source = random.Random(5)
    sizes = [(1, None), (1, 0), (30, 40), (16_000, 384), (16_000, 385), (1, 100_000), (40_000, None), (40_000, 7)]
    packets = [
        (DATA_MARK + source.randbytes(frame), source.randbytes(payload) if payload is not None else None)
        for frame, payload in sizes * 3
    ]
    async with open_peer("a", direct_config(plain=plain)) as a:
        with raw_member(a, plain=plain) as member:
            member.join()
            await member.greet()
            text = b"".join(part for packet in packets for part in member.seal(*packet))
            while text:
                size = source.choice([1, 7, 8, 9, 100, 5000, 200_000])
                await member.send(text[:size])
                text = text[size:]
                await asyncio.sleep(0.0005)
            await a.until_received(len(packets))
        assert [(header, payload) for _, header, payload in a.events.packets] == [(f[1:], p) for f, p in packets]


@pytest.mark.parametrize("plain", [False, True], ids=["sealed", "plain"])
async def test_a_member_that_does_not_greet_is_cut(plain):
    async with open_peer("a", direct_config(plain=plain)) as a:
        keys = LinkKeys.generate()
        for number, ready in enumerate((bytes(17), os.urandom(17), os.urandom(100_000)), start=1):
            with raw_member(a, keys=keys, plain=plain) as mallory:
                mallory.join()
                await mallory.connect()
                await mallory.send(mallory.knock)
                assert len(await mallory.receive(WELCOME_BYTES)) == WELCOME_BYTES
                await mallory.send(ready)
                await poll_until(
                    lambda number=number: a.stat("cut_bad_greeting") == number, DEADLINE_SECONDS, "it to be cut"
                )
                assert await mallory.until_hung_up_on() == b""
        await poll_until(lambda: a.stat("connections") == 0, DEADLINE_SECONDS, "all connections to end")
        assert a.events.packets == []
        assert a.events.paths == []


async def test_a_member_cannot_speak_for_another(monkeypatch):
    async with open_peer("a") as a, open_peer("b") as b:
        introduce(a, b)
        await a.until_open("b")
        keys = LinkKeys.generate()
        own = Caller(keys, a.carrier.link_key, plain=False).knock
        other_target = Caller(keys, b.carrier.link_key, plain=False).knock
        other_mode = Caller(keys, a.carrier.link_key, plain=True).knock
        with monkeypatch.context() as patch:
            patch.setattr(greeting, "PROTOCOL_VERSION", 99)
            other_version = Caller(keys, a.carrier.link_key, plain=False).knock
        for count_as, knock in (
            ("bad_proof", own._replace(key=b.carrier.link_key)),
            ("bad_proof", other_target),
            ("bad_proof", other_mode._replace(plain=False)),
            ("mode", other_mode),
            ("bad_proof", other_version._replace(version=own.version)),
            ("version", other_version),
            ("bad_proof", own._replace(handshake=os.urandom(48))),
            ("bad_proof", own._replace(handshake=bytes(48))),
        ):
            with raw_member(a, keys=keys, knock=knock.pack()) as mallory:
                mallory.join()
                before = a.stat(f"refused_{count_as}")
                await mallory.connect()
                await mallory.send(mallory.knock)
                assert len(await mallory.until_hung_up_on()) == 1
                assert a.stat(f"refused_{count_as}") == before + 1
        assert a.events.is_open("b")
        assert not a.events.is_open("mallory")


@pytest.mark.parametrize("plain", [False, True], ids=["sealed", "plain"])
async def test_a_knock_that_was_overheard_leads_nowhere(plain):
    async with open_peer("a", direct_config(plain=plain)) as a:
        with raw_member(a, plain=plain) as mallory:
            mallory.join()
            await mallory.greet()
            overheard = mallory.knock
        await a.until_closed("mallory")
        with raw_member(a, "eve", plain=plain, knock=overheard) as eve:
            await eve.connect()
            await eve.send(eve.knock)
            assert await eve.until_hung_up_on() == bytes([BAD_PROOF])
            assert a.stat("refused_replay") == 1
        a.carrier._admission._used.clear()  # as if it were so long ago that nobody remembers
        with raw_member(a, "eve", plain=plain, knock=overheard) as eve:
            await eve.connect()
            await eve.send(eve.knock)
            assert len(await eve.receive(WELCOME_BYTES)) == WELCOME_BYTES
            await eve.send(os.urandom(17), *eve.seal(DATA_MARK + b"packet", b"payload"))
            await poll_until(lambda: a.stat("cut_bad_greeting") == 1, DEADLINE_SECONDS, "the false proof to be seen")
        await poll_until(lambda: a.stat("connections") == 0, DEADLINE_SECONDS, "all connections to end")
        assert a.events.packets == []
        assert a.events.paths == [("opened", "mallory"), ("closed", "mallory")]


async def test_a_member_that_connects_over_and_over_is_slowed_down():
    async with open_peer("a") as a:
        keys = LinkKeys.generate()
        a.carrier.update_peer(entry("mallory", "s1", keys.link_key))
        for _ in range(100):
            if a.stat("refused_too_often"):
                break
            with raw_member(a, keys=keys) as mallory:
                await mallory.connect()
                await mallory.send(mallory.knock)
                assert await mallory.receive(1)
        assert a.stat("refused_too_often") == 1
        await still_works(a)


async def test_a_connection_that_is_reset_at_any_time_does_no_harm():
    async with open_peer("a") as a:
        for length in (0, 5, KNOCK_BYTES, KNOCK_BYTES + 3, KNOCK_BYTES + 17, KNOCK_BYTES + 17 + 30, 10_000):
            with raw_member(a) as mallory:
                mallory.join()
                await mallory.connect()
                await mallory.send(mallory.knock[:length])
                if length >= KNOCK_BYTES:
                    welcome = await mallory.receive(WELCOME_BYTES)
                    mallory.outgoing, _ = mallory.caller.answer(welcome[1:])
                    text = mallory.outgoing.seal(greeting.READY) + HEAD.pack(50, 500_001) + bytes(9000)
                    await mallory.send(text[: length - KNOCK_BYTES])
                mallory.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await poll_until(lambda: a.stat("connections") == 0, DEADLINE_SECONDS, f"the end after {length} bytes")
        await still_works(a)


async def test_a_fast_transfer_is_taken_in():
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
        assert b.events.paths == [("opened", "a")]
