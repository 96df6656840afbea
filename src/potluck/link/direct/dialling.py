"""One outgoing connection: connecting, greeting, open, ended.

A dial goes to one address and lives once: whoever owns it makes a new one to try again. It is open when the other side
has proven that it is the peer that was meant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import zmq

from potluck.errors import ProtocolError
from potluck.link.direct.addresses import Endpoint
from potluck.link.direct.flood import FloodGuard, Wire
from potluck.link.direct.greeting import KNOCK, READY, Caller, LinkKeys
from potluck.link.direct.loopsocket import LoopSocket, Outgoing, Parts, SocketMonitor
from potluck.link.direct.sealing import Clear, Opened, Sealed, Slabs, Wrapping
from potluck.link.direct.sockets import Context, SocketSettings, connect, make_dialler

MAX_PARTS = 2  # of a packet: header and payload

_CONNECTED = int(zmq.EVENT_CONNECTED)
_LET_IN = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_ENDINGS = {
    int(zmq.EVENT_DISCONNECTED): "disconnected",
    int(zmq.EVENT_CLOSED): "cannot connect",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "it does not admit this peer (yet)",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the handshake failed",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the handshake failed: another peer or service may be there",
}
_EVENTS = _CONNECTED | _LET_IN | sum(_ENDINGS)


class DialOwner(Protocol):
    """What a dial tells whoever made it."""

    def dial_opened(self, dial: Dial) -> None:
        """The path works both ways."""
        ...

    def dial_ended(self, dial: Dial, reason: str) -> None:
        """It failed or broke; it is closed already. Told once, and never after `close`."""
        ...

    def dial_packet(self, dial: Dial, packet: Opened) -> None:
        """A packet on an open dial, hostile until checked."""
        ...

    def dial_served(self, dial: Dial) -> None:
        """There may be room to send again."""
        ...


class Dial:
    """An outgoing connection to one address."""

    def __init__(
        self,
        owner: DialOwner,
        context: Context,
        settings: SocketSettings,
        keys: LinkKeys,
        guard: FloodGuard,
        slabs: Slabs,
        *,
        endpoint: Endpoint,
        their_key: str,
        timeout_seconds: float,
    ) -> None:
        """ProtocolError when `their_key` is no key."""
        self.endpoint = endpoint
        self.is_let_in = False  # somebody there knows our key; who, the greeting will show
        self.is_open = False
        self.wire: Wire | None = None
        self.wrapping: Wrapping = Clear()
        self._owner = owner
        self._guard = guard
        self._slabs = None if settings.trusted_lan else slabs
        self._caller = Caller(keys, their_key, plain=settings.trusted_lan)
        self._closed = False
        socket = make_dialler(context, settings, self._caller, timeout_seconds)
        try:
            self._monitor = SocketMonitor(context, socket, events=_EVENTS, on_event=self._observe)
        except zmq.ZMQError:
            socket.close(0)
            raise
        self._socket = LoopSocket(socket, on_message=self._receive, on_served=self._served, max_parts=MAX_PARTS)
        self._deadline = asyncio.get_running_loop().call_later(
            timeout_seconds, self._end, f"no answer within {timeout_seconds:g} s"
        )
        try:
            connect(socket, endpoint)
            self._socket.send([KNOCK])
        except zmq.ZMQError:
            self.close()
            raise

    def send(self, parts: Sequence[Outgoing]) -> bool:
        """Hand over one message; False when the queue is full, zmq.ZMQError when the connection has gone."""
        return self._socket.send(parts)

    def close(self, *, linger_milliseconds: int = 0) -> None:
        """Hang up, without telling the owner. Calling it twice does no harm."""
        if self._closed:
            return
        self._closed = True
        self.is_open = False
        self._deadline.cancel()
        if self.wire is not None:
            self._guard.forget(self.wire)
        self._monitor.close()
        self._socket.close(linger_milliseconds=linger_milliseconds)

    def cut(self, count_as: str, reason: str) -> None:
        """Hang up because of what the other side did; the owner is told as for any other ending."""
        if self.wire is not None:
            self.wire.on_end = None
            self._guard.cut(self.wire, count_as)
        self._end(reason)

    def _end(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._owner.dial_ended(self, reason)

    def _observe(self, event: int, value: int) -> None:
        if self._closed:
            return
        if event == _CONNECTED:
            self._watch(value)
        elif event == _LET_IN:
            self.is_let_in = True
        else:
            self._end(_ENDINGS[event])

    def _watch(self, fd: int) -> None:
        if self.wire is None:
            self.wire = self._guard.opened(fd, incoming=False)
            if self.wire is not None:
                self.wire.on_end = self._end

    def _served(self) -> None:
        if self.is_open:
            self._owner.dial_served(self)

    def _receive(self, parts: Parts, surplus_parts: int) -> None:
        if self._closed:
            return
        if self.wire is None:
            self._watch(parts[0].get(zmq.SRCFD))
        if self.wire is not None:
            self.wire.delivered(parts)
        if self.is_open:
            try:
                packet = self.wrapping.unwrap(parts, surplus_parts)
            except ProtocolError as error:
                self.cut("tampered", str(error))
            else:
                self._owner.dial_packet(self, packet)
            return
        try:
            self._finish_greeting(parts, surplus_parts)
        except ProtocolError as error:
            self.cut("bad_greeting", f"bad greeting: {error}")

    def _finish_greeting(self, parts: Parts, surplus_parts: int) -> None:
        if len(parts) != 1 or surplus_parts:
            raise ProtocolError("a packet came before the greeting was done: dropped")
        outgoing, incoming = self._caller.answer(parts[0].bytes)
        self._deadline.cancel()
        if self.wire is not None:
            self._guard.welcome(self.wire)
            self.wire.greeted = True
        self._socket.send([outgoing.seal(READY)])
        if self._slabs is not None:
            self.wrapping = Sealed(outgoing, incoming, self._slabs)
        self.is_open = True
        self._owner.dial_opened(self)
