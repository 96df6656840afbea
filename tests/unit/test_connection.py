"""One connection over a pair of sockets: what leaves and arrives, in which portions, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from potluck.clock import SystemClock
from potluck.errors import ProtocolError
from potluck.link.direct import connection as module
from potluck.link.direct.connection import PACKET_COST_BYTES, READ_BUDGET_BYTES, SCRATCH_BYTES, Connection, Shared
from potluck.link.direct.sealing import Clear, Slabs
from potluck.link.direct.sockets import SocketSettings
from potluck.testing.polling import poll_until

SECONDS = 30.0
PER_TURN = READ_BUDGET_BYTES // PACKET_COST_BYTES  # packets of nothing


@dataclass
class End:
    """One end: greets with words of a size, then notes what comes."""

    said_first: list[bytes] = field(default_factory=list)
    packets: list[tuple[bytes, bytes | None]] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)
    num_rooms: int = 0
    on_packet: Callable[[], None] = lambda: None
    on_said: Callable[[Connection], None] = lambda _: None

    def said(self, connection: Connection, data: bytes) -> None:
        self.said_first.append(data)
        self.on_said(connection)

    def packet(self, connection: Connection, frame: memoryview, payload: memoryview | None) -> None:
        self.packets.append((bytes(frame), bytes(payload) if payload is not None else None))
        self.on_packet()

    def room(self, connection: Connection) -> None:
        self.num_rooms += 1

    def ended(self, connection: Connection, reason: str) -> None:
        self.endings.append(reason)


def shared(**settings: int) -> Shared:
    return Shared(
        settings=SocketSettings(**settings), slabs=Slabs(slab_bytes=100_000, most_kept=4), clock=SystemClock()
    )


@contextlib.asynccontextmanager
async def opened(common: Shared) -> AsyncIterator[tuple[Connection, End, socket.socket]]:
    """An open connection, and the socket at the other end of it."""
    near, far = socket.socketpair()
    end = End()
    far.setblocking(False)
    connection = Connection(near, common, end, dialled=True)
    connection.open(end, Clear())
    try:
        yield connection, end, far
    finally:
        connection.close()
        far.close()


def record(frame: bytes, payload: bytes | None = None) -> bytes:
    view = memoryview(payload) if payload is not None else None
    return b"".join(bytes(part) for part in Clear().wrap(frame, view))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_greeting_is_read_to_the_byte_and_packets_may_follow_at_once() -> None:
    near, far = socket.socketpair()
    with far:
        end = End()
        connection = Connection(near, shared(), end, dialled=False)

        def go_on(connection: Connection) -> None:
            if len(end.said_first) == 1:
                connection.expect(3)
            else:
                connection.open(end, Clear())

        end.on_said = go_on
        connection.expect(5)
        far.sendall(b"hel")
        await turns(5)
        assert end.said_first == []
        far.sendall(b"loyou" + record(b"first", b"packet"))
        await poll_until(lambda: end.packets, SECONDS, "the packet")
        assert end.said_first == [b"hello", b"you"]
        assert end.packets == [(b"first", b"packet")]
        connection.close()


async def test_a_greeting_that_is_refused_is_cut_and_counted() -> None:
    near, far = socket.socketpair()
    with far:
        end = End()
        common = shared()
        connection = Connection(near, common, end, dialled=False)

        def refuse(_: Connection) -> None:
            raise ProtocolError("what is this")

        end.on_said = refuse
        connection.expect(5)
        far.sendall(b"hello")
        await poll_until(lambda: end.endings, SECONDS, "the end")
        assert end.endings == ["bad greeting: what is this"]
        assert common.counts == {"cut_bad_greeting": 1}
        assert not common.connections


async def test_one_that_sends_without_end_gets_its_share_of_each_turn_and_no_more() -> None:
    common = shared()
    async with opened(common) as (_, busy, far), opened(common) as (_, quiet, other):
        flood = record(b"x") * 3000
        most = 0
        for _ in range(300):
            with contextlib.suppress(BlockingIOError):
                far.send(flood[: 9 * 2000])
            before = len(busy.packets)
            await asyncio.sleep(0)
            most = max(most, len(busy.packets) - before)
        assert most <= PER_TURN
        assert len(busy.packets) > 3 * PER_TURN
        before = len(busy.packets)
        other.send(record(b"hello"))
        while not quiet.packets:
            with contextlib.suppress(BlockingIOError):
                far.send(flood[: 9 * 2000])
            await asyncio.sleep(0)
        assert len(busy.packets) - before <= 3 * PER_TURN
        assert set(busy.packets) == {(b"x", None)}


async def test_packets_that_came_along_with_one_that_failed_are_not_lost() -> None:
    seen: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))
    async with opened(shared()) as (_, end, far):

        def fail() -> None:
            if len(end.packets) in (2, 3):
                raise OSError("our own fault, not the connection's")

        end.on_packet = fail
        far.sendall(b"".join(record(bytes([number])) for number in range(6)))
        await poll_until(lambda: len(end.packets) == 6, SECONDS, "all packets")
        assert end.packets == [(bytes([number]), None) for number in range(6)]
        assert [type(error) for error in seen] == [OSError, OSError]
        assert end.endings == []
    loop.set_exception_handler(None)


async def test_what_waits_is_bounded_in_bytes_and_room_is_told_once() -> None:
    async with opened(shared(queued_bytes=300_000)) as (connection, end, far):
        payload = memoryview(os.urandom(100_000))
        num_sent = 0
        while connection.send(b"frame", payload):
            num_sent += 1
            assert num_sent < 1000
        assert not connection.send(b"small", None)
        await turns(10)
        assert end.num_rooms == 0
        text = bytearray()
        while end.num_rooms == 0:
            with contextlib.suppress(BlockingIOError):
                text += far.recv(50_000)
            await asyncio.sleep(0)
        assert connection.send(b"again", None)
        assert num_sent * 100_000 - len(text) < 300_000 + SCRATCH_BYTES + 200_000  # half of it, and what the system has
        whole = num_sent * len(record(b"frame", bytes(payload))) + len(record(b"again"))
        while len(text) < whole:
            with contextlib.suppress(BlockingIOError):
                text += far.recv(500_000)
            await asyncio.sleep(0)
        assert text == record(b"frame", bytes(payload)) * num_sent + record(b"again")
        assert end.num_rooms == 1


async def test_what_waits_is_bounded_in_number() -> None:
    async with opened(shared(queued_buffers=50)) as (connection, end, _):
        connection._is_stuck = True  # nothing leaves
        assert [connection.send(b"x", None) for _ in range(60)] == [True] * 50 + [False] * 10
        connection._flush()
        await turns(3)
        assert end.num_rooms == 1


@pytest.mark.parametrize("gathers", [True, False])
async def test_packets_of_one_turn_leave_together_and_in_order(gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CAN_GATHER", gathers)
    async with opened(shared()) as (connection, _, far):
        packets = [(bytes([number]), bytes([number]) * size) for number, size in enumerate((5, 30_000, 0, 7))]
        for frame, payload in packets:
            assert connection.send(frame, memoryview(payload))
        with pytest.raises(BlockingIOError):
            far.recv(1)
        await connection.drained()
        assert far.recv(100_000) == b"".join(record(frame, payload) for frame, payload in packets)


async def test_it_waits_until_all_has_left_or_it_has_ended() -> None:
    async with opened(shared()) as (connection, end, far):
        await connection.drained()  # nothing waits
        connection.send(b"x", memoryview(bytes(4_000_000)))
        waiting = asyncio.ensure_future(connection.drained())
        await turns(5)
        assert not waiting.done()
        far.close()
        await asyncio.wait_for(waiting, SECONDS)
        assert end.endings == ["disconnected"]
        assert not connection.send(b"too late", None)


async def test_nothing_is_told_after_it_was_closed() -> None:
    async with opened(shared()) as (connection, end, far):
        far.sendall(record(b"x") * 10)
        end.on_packet = connection.close
        await turns(10)
        assert len(end.packets) == 1
        assert end.endings == []
        connection.close()
        connection.end("again")
        assert end.endings == []


async def test_a_failure_to_send_is_told_later_and_once() -> None:
    async with opened(shared()) as (connection, end, far):
        far.close()
        connection.send(b"x", memoryview(bytes(300_000)))
        connection.send(b"x", memoryview(bytes(300_000)))
        assert end.endings == []
        await poll_until(lambda: end.endings, SECONDS, "the end")
        await turns(5)
        assert end.endings == ["disconnected"]
