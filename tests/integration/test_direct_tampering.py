"""Direct carriers with somebody in the middle: nothing is accepted that was not sent so, and nothing can be read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random

import pytest
from directpeers import DEADLINE_SECONDS, Peer, direct_config, introduce, open_peer, send_all
from meddler import BACKWARD, FORWARD, Meddler, meddler

from potluck.link.direct.greeting import KNOCK_BYTES, READY_BYTES
from potluck.link.direct.noise import MESSAGE_BYTES
from potluck.testing.polling import poll_until

IMPATIENT = direct_config(
    sockets={"heartbeat_seconds": 0.2, "silence_seconds": 1.0, "handshake_seconds": 1.0},
    paths={"dial_timeout_seconds": 1.0, "yield_seconds": 600.0},
)
SECRET = b"a secret that must not be seen on the way"


async def connect_through(a: Peer, b: Peer, address: str) -> None:
    a.carrier.update_peer(a.presence())
    b.carrier.update_peer(b.presence())
    b.carrier.update_peer(a.presence(addresses=()))
    a.carrier.update_peer(b.presence(addresses=[address]))


async def still_works_through(middle: Meddler, a: Peer, b: Peer) -> None:
    """Left alone, the two find each other again."""
    for sender, receiver in ((a, b), (b, a)):
        mark = os.urandom(8)

        async def arrived(sender: Peer = sender, receiver: Peer = receiver, mark: bytes = mark) -> bool:
            if sender.events.is_open(receiver.name):
                sender.carrier.send(receiver.name, mark, None)
            await asyncio.sleep(0.02)
            return (sender.name, mark, None) in receiver.events.packets

        await poll_until(arrived, DEADLINE_SECONDS, f"{receiver.name} to hear {sender.name} again")


async def test_what_passes_can_not_be_read_and_is_no_more_than_it_must_be():
    async with open_peer("a") as a, open_peer("b") as b, meddler(b.carrier.bound[0].port) as (middle, address):
        await connect_through(a, b, address)
        await a.until_open("b")
        await b.until_open("a")
        payload = SECRET * 5000
        for sender, receiver in ((a, b), (b, a)):
            await send_all(sender, receiver.name, [(SECRET, None), (SECRET, SECRET), (SECRET, payload)])
            await receiver.until_received(3)
            assert [packet[1:] for packet in receiver.events.packets] == [
                (SECRET, None),
                (SECRET, SECRET),
                (SECRET, payload),
            ]
        [recorded] = middle.recorded
        for direction in (FORWARD, BACKWARD):
            assert SECRET not in recorded[direction]
            assert len(payload) < len(recorded[direction]) < len(payload) + 1000


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD], ids=["to the listener", "to the dialler"])
async def test_a_bit_that_is_changed_in_a_packet_ends_the_connection_and_is_counted(direction):
    async with (
        open_peer("a", IMPATIENT) as a,
        open_peer("b", IMPATIENT) as b,
        meddler(b.carrier.bound[0].port) as (middle, address),
    ):
        await connect_through(a, b, address)
        await a.until_open("b")
        await b.until_open("a")
        sender, receiver = (a, b) if direction == FORWARD else (b, a)
        await send_all(sender, receiver.name, [(b"before", b"payload")])
        await receiver.until_received(1)
        middle.change_at = (direction, len(middle.recorded[-1][direction]) + 300_000)  # amid the next payload
        await send_all(sender, receiver.name, [(b"changed", bytes(500_000))])
        await receiver.until_closed(sender.name)
        assert middle.num_changed == 1
        assert receiver.stat("cut_tampered") == 1
        assert receiver.stat("shut_out") == sender.stat("shut_out") == 0
        assert receiver.events.packets == [(sender.name, b"before", b"payload")]
        await still_works_through(middle, a, b)


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD], ids=["to the listener", "to the dialler"])
async def test_a_bit_that_is_changed_anywhere_does_no_harm(direction):
    """In the Knock, in the answer to it, in the Ready, in heads, in packets."""
    source = random.Random(7 + direction)
    places = sorted(
        {*source.sample(range(400), 24), 0, 1, KNOCK_BYTES - 1, KNOCK_BYTES, KNOCK_BYTES + READY_BYTES, 300}
    )
    sent = [(bytes([number]) * 30, bytes([number]) * 40) for number in range(20)]
    async with (
        open_peer("a", IMPATIENT) as a,
        open_peer("b", IMPATIENT) as b,
        meddler(b.carrier.bound[0].port) as (middle, address),
    ):

        async def meddle(place: int) -> None:
            """Have a new connection made, in which one bit is changed."""
            b.events.packets.clear()
            a.events.packets.clear()
            count = middle.num_changed
            middle.change_at = (direction, place)
            a.carrier.update_peer(b.presence(state="left"))
            b.carrier.update_peer(a.presence(state="left"))
            await connect_through(a, b, address)

            async def is_changed() -> bool:
                for peer, other in ((a, b), (b, a)):
                    if peer.events.is_open(other.name):
                        for header, payload in sent:
                            peer.carrier.send(other.name, header, payload)
                await asyncio.sleep(0.01)
                return middle.num_changed > count

            await poll_until(is_changed, DEADLINE_SECONDS, f"byte {place} to be changed")

        for place in places:
            await meddle(place)
            await still_works_through(middle, a, b)
            for packets in (a.events.packets, b.events.packets):
                whole = {(header, payload) for _, header, payload in packets if len(header) > 8}
                assert whole <= set(sent)
        assert middle.num_changed == len(places)
        assert a.stat("shut_out") == b.stat("shut_out") == 0
        assert (b if direction == FORWARD else a).stat("cut_tampered") > 0


async def test_a_connection_that_was_recorded_can_not_be_played_again():
    quick = direct_config(sockets={"handshake_seconds": 1.0})  # who is refused is hung up on then
    async with open_peer("a") as a, open_peer("b", quick) as b, meddler(b.carrier.bound[0].port) as (middle, address):
        await connect_through(a, b, address)
        await a.until_open("b")
        await send_all(a, "b", [(b"once", b"and only once")])
        await b.until_received(1)
        recording = bytes(middle.recorded[0][FORWARD])

        async def play_again() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", b.carrier.bound[0].port)
            try:
                writer.write(recording[:KNOCK_BYTES])
                await reader.readexactly(1 + MESSAGE_BYTES)
                writer.write(recording[KNOCK_BYTES:])
                with contextlib.suppress(ConnectionError):
                    await reader.read()  # until it hangs up
            finally:
                writer.close()

        with pytest.raises(asyncio.IncompleteReadError):
            await asyncio.wait_for(play_again(), DEADLINE_SECONDS)
        assert b.stat("refused_replay") == 1
        assert b.stat("cut_bad_greeting") == 0
        b.carrier._admission._used.clear()  # as if it were so long ago that nobody remembers
        await asyncio.wait_for(play_again(), DEADLINE_SECONDS)
        await poll_until(lambda: b.stat("cut_bad_greeting") > 0, DEADLINE_SECONDS, "the false proof to be seen")
        assert b.stat("cut_bad_greeting") == 1
        assert b.stat("refused_replay") == 1
        assert b.events.packets == [("a", b"once", b"and only once")]
        assert b.events.is_open("a")


async def test_a_connection_that_is_led_to_another_member_does_not_open():
    async with open_peer("a") as a, open_peer("b") as b, open_peer("c") as c:
        introduce(b, c)
        async with meddler(c.carrier.bound[0].port) as (_, address):
            c.carrier.update_peer(a.presence(addresses=()))
            await connect_through(a, b, address)
            await poll_until(lambda: c.stat("refused_bad_proof") >= 2, DEADLINE_SECONDS, "c to refuse what was for b")
            assert not a.events.is_open("b")
            assert not c.events.is_open("a")
