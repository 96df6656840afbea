"""One outgoing connection, until it is open: connecting, greeting.

A dial goes to one address and lives once: its owner makes a new one to try again. It has opened when the other
side has proven that it is the peer that was meant.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Protocol

from potluck.errors import ProtocolError
from potluck.link.direct.addresses import Endpoint
from potluck.link.direct.connection import Connection, ConnectionOwner, Shared
from potluck.link.direct.greeting import NO_PEER_THERE, READY, REFUSALS, WELCOME, Caller, LinkKeys
from potluck.link.direct.noise import MESSAGE_BYTES
from potluck.link.direct.sealing import Clear, Sealed
from potluck.link.direct.sockets import begin_to_connect


class DialOwner(ConnectionOwner, Protocol):
    """What a dial tells its owner, which also owns the connection that it opens."""

    def dial_opened(self, dial: Dial, connection: Connection) -> None:
        """The connection works both ways."""
        ...

    def dial_failed(self, dial: Dial, reason: str) -> None:
        """There is no connection. Told once, and never after `close`."""
        ...


class Dial:
    """An attempt to reach one peer at one address."""

    def __init__(
        self,
        owner: DialOwner,
        shared: Shared,
        keys: LinkKeys,
        *,
        endpoint: Endpoint,
        their_key: str,
        timeout_seconds: float,
    ) -> None:
        """ProtocolError when `their_key` is no key; OSError when it is clear at once that it cannot be reached."""
        self.endpoint = endpoint
        self._owner = owner
        self._shared = shared
        self._caller = Caller(keys, their_key, plain=shared.settings.trusted_lan)
        self._is_over = False
        self._is_welcome = False  # the first byte of the answer said so
        self._connection: Connection | None = None
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = begin_to_connect(endpoint)
        self._loop.add_writer(self._socket.fileno(), self._connected)
        self._deadline = self._loop.call_later(timeout_seconds, self._fail, f"no answer within {timeout_seconds:g} s")

    @property
    def is_connected(self) -> bool:
        """Whether somebody is there; who, the greeting will show."""
        return self._connection is not None

    def close(self) -> None:
        """Give up, without telling the owner; a connection that was opened stays. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        self._deadline.cancel()
        self._stop_connecting()
        if self._connection is not None:
            self._connection.close()

    def _stop_connecting(self) -> None:
        if self._socket is not None:
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _fail(self, reason: str) -> None:
        if not self._is_over:
            self.close()
            self._owner.dial_failed(self, reason)

    def _connected(self) -> None:
        assert self._socket is not None
        problem = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            self._fail(f"cannot connect: {os.strerror(problem)}")
            return
        sock, self._socket = self._socket, None
        self._loop.remove_writer(sock.fileno())
        self._connection = Connection(sock, self._shared, self, dialled=True)
        self._connection.expect(1)
        self._connection.say(self._caller.knock.pack())

    # What the connection tells while it greets

    def said(self, connection: Connection, data: bytes) -> None:
        """The answer's first byte, or the rest of a Welcome."""
        if not self._is_welcome:
            if data[0] != WELCOME:
                self._fail(REFUSALS.get(data[0], NO_PEER_THERE))
                return
            self._is_welcome = True
            connection.expect(MESSAGE_BYTES)
            return
        try:
            outgoing, incoming = self._caller.answer(data)
        except ProtocolError:
            self._shared.counts["cut_bad_greeting"] += 1
            self._fail(NO_PEER_THERE)
            return
        self._is_over = True
        self._deadline.cancel()
        connection.say(outgoing.seal(READY))
        plain = self._shared.settings.trusted_lan
        connection.open(self._owner, Clear() if plain else Sealed(outgoing, incoming, self._shared.slabs))
        self._owner.dial_opened(self, connection)

    def ended(self, connection: Connection, reason: str) -> None:
        """It hung up."""
        self._fail(reason)
