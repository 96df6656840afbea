"""A ZeroMQ socket that lives on the asyncio loop.

ZeroMQ signals through a file descriptor that only says "look at your events": it fires once, and any call on the socket
may consume the signal. So whoever sends must look for arrivals afterwards, whoever receives must go on until nothing
is left, and whoever finds no room must try once more after every look. This class holds those rules in one place. It
reads within a budget and then lets the loop run, so that one busy socket does not starve the rest.

pyzmq's own asyncio sockets make a future for every message; at hundreds of thousands of packets that is too slow.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Callable, Sequence

import zmq

Parts = list[zmq.Frame]
Outgoing = bytes | bytearray | memoryview

PART_COST_BYTES = 16 * 1024  # what handling one part costs, counted in the budget as if it were bytes
RETRY_SECONDS = 0.01  # while somebody waits for room; the signal usually comes first

# As plain numbers: the arithmetic of pyzmq's enumerations costs more than some of its calls.
_ARRIVALS, _ROOM = int(zmq.POLLIN), int(zmq.POLLOUT)
_LAST_PART, _PART = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


class LoopSocket:
    """Receives whole messages within a budget, sends without blocking."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        *,
        on_message: Callable[[Parts, int], None],
        on_served: Callable[[], None] | None = None,
        max_parts: int,
        budget_bytes: int = 8 * 1024 * 1024,
    ) -> None:
        """Start serving `socket`, which this object now owns.

        `on_message` gets the first `max_parts` parts and how many more there were. `on_served` runs after a look at the
        socket that found room to send; on a socket with several connections, that is room for some of them.
        """
        self.socket = socket
        self.on_message = on_message
        self.on_served = on_served
        self.max_parts = max_parts
        self.budget_bytes = budget_bytes
        self._loop = asyncio.get_running_loop()
        self._parts: Parts = []
        self._surplus_parts = 0
        self._again: asyncio.Handle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._starved = False  # somebody found no room since the last look
        self._closed = False
        self._fd = int(socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._serve)
        self.serve_soon()  # something may have come before anybody looked

    def send(self, parts: Sequence[Outgoing]) -> bool:
        """Hand over one message; False when the queue is full. Other refusals raise zmq.ZMQError.

        Large buffers are not copied: they must stay unchanged until they have left. Small ones (below pyzmq's
        threshold of 64 KiB) are, which is cheaper than tracking them.
        """
        sent = self._try_send(parts)
        if not sent:
            # This look may consume the news that there is room. So soon after a look ZeroMQ takes no news while it
            # sends, so a second refusal stands until the next signal.
            self._events()
            sent = self._try_send(parts)
        if not sent:
            self._starved = True
            self._retry_later()
        self.serve_soon()  # sending may have consumed the news of an arrival
        return sent

    def serve_soon(self) -> None:
        """Look at the socket in the next turn of the loop."""
        if self._again is None and not self._closed:
            self._again = self._loop.call_soon(self._serve)

    def close(self, *, linger_milliseconds: int = 0) -> None:
        """Stop serving and close the socket. Calling it twice does no harm."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        for handle in (self._again, self._retry):
            if handle is not None:
                handle.cancel()
        self._parts.clear()
        self.socket.close(linger_milliseconds)

    def _events(self) -> int:
        return int(self.socket.get(zmq.EVENTS))

    def _serve(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        try:
            if self._receive() & _ROOM and self.on_served is not None:
                self._starved = False
                self.on_served()
        except BaseException:
            self.serve_soon()  # the signal is consumed, but messages may be left: a faulty handler must not strand them
            raise
        self._retry_later()

    def _retry_later(self) -> None:
        if self._starved and self._retry is None and not self._closed:
            self._retry = self._loop.call_later(RETRY_SECONDS, self._serve_again)

    def _serve_again(self) -> None:
        self._retry = None
        self._serve()

    def _try_send(self, parts: Sequence[Outgoing]) -> bool:
        last = len(parts) - 1
        try:
            for number, part in enumerate(parts):
                self.socket.send(part, _LAST_PART if number == last else _PART, copy=False)
        except zmq.Again:
            if number > 0:
                # The first part found room, so the connection went away in between: the message is lost with it.
                raise zmq.ZMQError(zmq.EHOSTUNREACH) from None
            return False
        return True

    def _receive(self) -> int:
        """Take what has come, within the budget; the events that are left then, none if that is unknown."""
        left_bytes = self.budget_bytes
        receive = self.socket.recv
        while not self._closed:
            if left_bytes < 0:
                self.serve_soon()
                return self._events()
            try:
                part = receive(_LAST_PART, False)
            except zmq.Again:
                # Asking for events before each message would cost a system call each time; asked for now, they may
                # tell of a message that has just come, and consume its signal.
                events = self._events()
                if events & _ARRIVALS:
                    continue
                return events
            left_bytes -= PART_COST_BYTES + len(part)
            if len(self._parts) < self.max_parts:
                self._parts.append(part)
            else:
                self._surplus_parts += 1
            if not part.more:
                parts, surplus = self._parts, self._surplus_parts
                self._parts, self._surplus_parts = [], 0
                self.on_message(parts, surplus)
        return 0


_monitor_numbers = itertools.count(1)


class SocketMonitor:
    """Tells what happens to a socket's connections: one call (event, value) for each of the events asked for."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        *,
        events: int,
        on_event: Callable[[int, int], None],
    ) -> None:
        """Watch `socket`, which must not be connected or bound yet, lest its first events be missed."""
        self._watched = socket
        self._on_event = on_event
        address = f"inproc://potluck.monitor.{next(_monitor_numbers)}"
        socket.monitor(address, events)
        pair = context.socket(zmq.PAIR)
        pair.linger = 0
        pair.rcvhwm = 0  # the I/O thread waits when this queue is full: it must never be
        pair.connect(address)
        self._socket = LoopSocket(pair, on_message=self._told, max_parts=2)

    def close(self) -> None:
        """Stop watching; call it before the watched socket is closed."""
        if not self._watched.closed:
            self._watched.disable_monitor()
        self._socket.close()

    def _told(self, parts: Parts, _: int) -> None:
        event, value = struct.unpack("=Hi", parts[0].buffer)
        self._on_event(event, value)
