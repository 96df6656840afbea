"""One TCP connection on the event loop: greeting, open, ended.

During the handshake it reads exactly the expected bytes and no more. Once it is open it carries packets. Its owner is
told once that it has ended, and nothing after that.

Reading: what has come is read as long as there is some, within a budget, and then the loop runs, so that one busy
connection does not starve the rest. Nothing is kept but the packet on its way; what we have no time for stays with the
kernel, and TCP slows its sender down. Sending: packets wait in a queue of bounded bytes and number, and leave together
once per turn of the loop, by one system call where possible.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from potluck.clock import Clock
from potluck.errors import ProtocolError
from potluck.link.carrier import Buffer
from potluck.link.direct.pacing import BULK_BYTES, Pacer
from potluck.link.direct.pulse import ASK_MARK
from potluck.link.direct.records import NOTHING, OversizedError, RecordReader
from potluck.link.direct.sealing import Opened, Slabs, Wrapping
from potluck.link.direct.sockets import Progress, SocketSettings, prepare, progress_of, renew_measure, set_pace

SCRATCH_BYTES = 128 * 1024
READ_BUDGET_BYTES = 1024 * 1024  # per turn of the loop
PACKET_COST_BYTES = 4096  # what handling one packet costs, counted in the budget as if it were bytes
FLUSH_BYTES = 256 * 1024  # so much is sent at once; less waits for more until the turn's end
MAX_BUFFERS = 512  # in one system call; systems allow 1024

_CAN_GATHER = hasattr(socket.socket, "sendmsg")  # not on Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all connections of one carrier have in common."""

    settings: SocketSettings
    slabs: Slabs
    clock: Clock
    counts: Counter[str] = field(default_factory=Counter)
    connections: set[Connection] = field(default_factory=set)
    pacer: Pacer[Connection] = field(default_factory=Pacer)
    scratch: memoryview = field(default_factory=lambda: memoryview(bytearray(SCRATCH_BYTES)))
    """Where all read what is not large, one after the other; a rest is put aside before the next one reads."""


class Greeter(Protocol):
    """Who greets on a fresh connection."""

    def said(self, connection: Connection, data: bytes) -> None:
        """As many bytes as were expected. Expect more, open the connection, or close it; ProtocolError cuts it."""
        ...

    def ended(self, connection: Connection, reason: str) -> None:
        """It broke, or was cut; it is closed already."""
        ...


class ConnectionOwner(Protocol):
    """The owner of an open connection."""

    def packet(self, connection: Connection, frame: memoryview, payload: memoryview | None) -> None:
        """A packet came, hostile until checked. The views stay valid."""
        ...

    def room(self, connection: Connection) -> None:
        """There is room again, after `send` had none."""
        ...

    def ended(self, connection: Connection, reason: str) -> None:
        """It broke, or was cut; it is closed already."""
        ...


class Connection:
    """A connected socket, which this object now owns."""

    def __init__(self, sock: socket.socket, shared: Shared, greeter: Greeter, *, dialled: bool) -> None:
        """`dialled`: by us."""
        self.dialled = dialled
        self.is_closed = False
        self.opened_at = self.heard_at = shared.clock.monotonic()
        self.asked_at: float | None = None  # by the pulse
        self._socket = sock
        self._fd = sock.fileno()
        self._shared = shared
        self._greeter: Greeter | None = greeter
        self._expected_bytes = 0
        self._owner: ConnectionOwner | None = None  # once it is open
        self._wrapping: Wrapping | None = None
        self._reader: RecordReader | None = None
        self._rest = b""  # received, and not enough to go on with
        self._going_on: asyncio.Handle | None = None  # when the rest may hold packets that were not handed out yet
        self._queue: deque[Buffer] = deque()
        self._queued_bytes = 0
        self._is_full = False  # somebody was refused and waits for room
        self._is_stuck = False  # the socket takes no more; the loop tells when it does
        self._flushing: asyncio.Handle | None = None
        self._drained: asyncio.Future[None] | None = None  # for somebody who waits until all has left
        self._loop = asyncio.get_running_loop()
        prepare(sock, shared.settings)
        shared.connections.add(self)
        self._loop.add_reader(self._fd, self._readable)

    @property
    def is_open(self) -> bool:
        """Whether it carries packets."""
        return self._owner is not None

    # Greeting

    def expect(self, num_bytes: int) -> None:
        """Tell the greeter when so many more bytes have come."""
        self._expected_bytes = num_bytes

    def say(self, data: bytes) -> None:
        """Send some bytes of a greeting, at once."""
        self._enqueue(data)
        self._flush()

    def open(self, owner: ConnectionOwner, wrapping: Wrapping) -> None:
        """From the next byte on there are packets, for that owner."""
        settings = self._shared.settings
        self._owner, self._greeter, self._wrapping = owner, None, wrapping
        self._reader = RecordReader(
            wrapping,
            self._shared.slabs,
            max_frame_bytes=settings.max_header_bytes + 1,  # and the mark
            max_payload_bytes=settings.max_payload_bytes,
        )

    # Sending

    def send(self, frame: bytes, payload: memoryview | None) -> bool:
        """Queue one packet; False when there is no room, of which the owner is told when it comes."""
        assert self._wrapping is not None, "packets go through open connections"
        if self.is_closed:
            return False
        if not self._has_room(1):
            self._is_full = True
            return False
        for part in self._wrapping.wrap(frame, payload):
            self._enqueue(part)
        if not self._is_stuck:
            if self._queued_bytes >= FLUSH_BYTES:
                self._flush()
            elif self._flushing is None:
                self._flushing = self._loop.call_soon(self._flush)
        return True

    def ask(self) -> None:
        """Ask whether somebody is there."""
        self.signal(ASK_MARK)

    def signal(self, mark: bytes) -> None:
        """Send one byte, if there is room: where there is none, packets will tell."""
        if self._has_room(1):
            self.send(mark, None)

    @property
    def queued_bytes(self) -> int:
        """How much waits that the socket has not taken yet."""
        return self._queued_bytes

    def progress(self) -> Progress | None:
        """How far TCP has come with what it was given."""
        return None if self.is_closed else progress_of(self._socket)

    def set_pace(self, bytes_per_second: float | None) -> None:
        """Send at most so fast; None: as fast as TCP wants."""
        if not self.is_closed:
            set_pace(self._socket, bytes_per_second)

    def renew(self) -> None:
        """Have TCP not stop to measure the way for the next while."""
        if not self.is_closed:
            renew_measure(self._socket)

    async def drained(self) -> None:
        """Wait until all has left, or it has ended."""
        if self._queue:
            self._drained = self._loop.create_future()
            await self._drained

    def _has_room(self, share: int) -> bool:
        """Whether the queue is less than full, or less than half full, …"""
        settings = self._shared.settings
        return self._queued_bytes * share < settings.queued_bytes and len(self._queue) * share < settings.queued_buffers

    def _enqueue(self, part: Buffer) -> None:
        self._queue.append(part)
        self._queued_bytes += len(part)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self.is_closed:
            return
        if self._queued_bytes >= BULK_BYTES:
            self._shared.pacer.begin(self, self._shared.clock.monotonic())
        is_stuck = False
        while self._queue and not is_stuck:
            try:
                num_bytes = self._transmit()
            except (BlockingIOError, InterruptedError):
                num_bytes = 0
            except OSError as error:
                # Not told from inside the sender's own call.
                self._loop.call_soon(self.end, _explain(error))
                return
            is_stuck = not self._has_left(num_bytes)
        if is_stuck != self._is_stuck:
            self._is_stuck = is_stuck
            if is_stuck:
                self._loop.add_writer(self._fd, self._flush)
            else:
                self._loop.remove_writer(self._fd)
        if self._drained is not None and not self._queue:
            _wake(self._drained)
        if self._is_full and self._has_room(2):
            self._is_full = False
            self._loop.call_soon(self._tell_room)

    def _transmit(self) -> int:
        queue = self._queue
        if len(queue) == 1 or not _CAN_GATHER:
            return self._socket.send(queue[0])
        return self._socket.sendmsg(islice(queue, MAX_BUFFERS))

    def _has_left(self, num_bytes: int) -> bool:
        """Take so many bytes out of the queue; whether the socket may take more."""
        queue = self._queue
        self._queued_bytes -= num_bytes
        is_willing = num_bytes > 0
        while num_bytes:
            size = len(queue[0])
            if num_bytes < size:
                queue[0] = memoryview(queue[0])[num_bytes:]
                return False
            queue.popleft()
            num_bytes -= size
        return is_willing

    def _tell_room(self) -> None:
        if self._owner is not None:
            self._owner.room(self)

    # Receiving

    def _readable(self) -> None:
        if self._going_on is not None:
            return  # it reads in this turn anyway, and only once
        if self._reader is None:
            self._read_greeting()
        else:
            self._read_packets(self._reader, READ_BUDGET_BYTES)

    def _receive(self, target: memoryview) -> int:
        """How many bytes came; 0 when there are none now, or no more."""
        try:
            num_bytes = self._socket.recv_into(target)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self.end(_explain(error))
            return 0
        if num_bytes:
            self.heard_at = self._shared.clock.monotonic()
        else:
            self.end("disconnected")
        return num_bytes

    def _read_greeting(self) -> None:
        """As many bytes as are expected; what is behind them is for the next reader."""
        while self._greeter is not None and self._expected_bytes:
            target = self._shared.scratch[: self._expected_bytes - len(self._rest)]
            num_bytes = self._receive(target)
            self._rest += target[:num_bytes]
            if num_bytes < len(target):
                return
            said, self._rest, self._expected_bytes = self._rest, b"", 0
            try:
                self._greeter.said(self, said)
            except ProtocolError as error:
                self.cut("bad_greeting", f"bad greeting: {error}")

    def _read_packets(self, reader: RecordReader, left_bytes: int) -> None:
        scratch = self._shared.scratch
        while left_bytes > 0 and not self.is_closed:
            large = reader.target
            start = len(self._rest)
            scratch[:start] = self._rest
            target = scratch[start:] if large is None else large
            num_bytes = self._receive(target)
            if not num_bytes:
                return
            left_bytes -= num_bytes
            if large is None:
                left_bytes = self._hand_out(reader, scratch[: start + num_bytes], left_bytes)
            else:
                reader.filled(num_bytes)
                left_bytes = self._hand_out(reader, NOTHING, left_bytes)
            if num_bytes < len(target):
                return

    def _hand_out(self, reader: RecordReader, data: memoryview, left_bytes: int) -> int:
        """Give the owner the packets that are complete, and put the rest aside; what is left of the budget."""
        is_done = False
        try:
            for frame, payload in self._packets(reader, data):
                left_bytes -= PACKET_COST_BYTES
                assert self._owner is not None
                self._owner.packet(self, frame, payload)
                if left_bytes <= 0 or self.is_closed:
                    break
            else:
                is_done = True
        finally:
            # A faulty owner too must not strand what came along with the packet at which it failed.
            if not self.is_closed:
                self._rest = bytes(data[reader.position :])
                if not is_done:
                    self._going_on = self._loop.call_soon(self._go_on, reader)
        return left_bytes

    def _go_on(self, reader: RecordReader) -> None:
        """With what was received before, and then with what has come since."""
        self._going_on = None
        scratch, size = self._shared.scratch, len(self._rest)
        scratch[:size] = self._rest
        left_bytes = self._hand_out(reader, scratch[:size], READ_BUDGET_BYTES)
        if self._going_on is None and not self.is_closed:
            self._read_packets(reader, left_bytes)

    def _packets(self, reader: RecordReader, data: memoryview) -> Iterator[Opened]:
        try:
            yield from reader.packets(data)
        except OversizedError as error:
            self.cut("oversized", str(error))
        except ProtocolError as error:
            self.cut("tampered", str(error))

    # The end

    def cut(self, count_as: str, reason: str) -> None:
        """Hang up because of what the other side did; the owner is told."""
        if not self.is_closed:
            self._shared.counts[f"cut_{count_as}"] += 1
            self.end(reason)

    def end(self, reason: str) -> None:
        """Hang up, and tell the owner."""
        if self.is_closed:
            return
        listener = self._owner or self._greeter
        self.close()
        if listener is not None:
            listener.ended(self, reason)

    def close(self) -> None:
        """Hang up, without telling the owner. What has not left is lost. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        for handle in (self._flushing, self._going_on):
            if handle is not None:
                handle.cancel()
        self._shared.connections.discard(self)
        self._shared.pacer.forget(self)
        self._owner = self._greeter = self._reader = None
        self._queue.clear()
        self._queued_bytes = 0
        self._rest = b""
        if self._drained is not None:
            _wake(self._drained)
        self._socket.close()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _explain(error: OSError) -> str:
    return "disconnected" if isinstance(error, ConnectionError) else f"disconnected: {error.strerror}"
