"""The incoming side: sockets that everybody may try to connect to, and those who are greeting there.

A stranger costs a descriptor and a few hundred bytes, for a short time: who has not greeted is bounded in number and
time, and is read no further than its greeting is long.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from potluck.errors import ConfigurationError, ProtocolError
from potluck.link.direct.addresses import Endpoint
from potluck.link.direct.admission import Admission, KnownPeer
from potluck.link.direct.connection import Connection, ConnectionOwner, Shared
from potluck.link.direct.greeting import KNOCK_BYTES, NOT_WANTED, READY, READY_BYTES, Knock
from potluck.link.direct.noise import Cipher
from potluck.link.direct.sealing import Clear, Sealed
from potluck.link.direct.sockets import listen

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 16  # per turn of the loop
PAUSE_SECONDS = 1.0  # when the system gives us no more descriptors


class ListenerOwner(Protocol):
    """What a listener asks and tells its maker."""

    def accepts(self, member: KnownPeer) -> bool:
        """Whether a connection of this member is wanted now; if not, it is refused."""
        ...

    def owner_of(self, member: KnownPeer) -> ConnectionOwner:
        """The owner of a connection of this member."""
        ...

    def incoming_opened(self, member: KnownPeer, connection: Connection) -> None:
        """Another peer's dial succeeded: the connection works both ways."""
        ...


class Listener:
    """Accepts connections and greets them."""

    def __init__(self, owner: ListenerOwner, shared: Shared, admission: Admission) -> None:
        self.owner = owner
        self.shared = shared
        self.admission = admission
        self.guests: dict[Guest, None] = {}  # who is greeting, the oldest first
        self.bound: tuple[Endpoint, ...] = ()
        self._sockets: list[socket.socket] = []
        self._pauses: set[asyncio.TimerHandle] = set()
        self._loop = asyncio.get_running_loop()

    def listen(self, addresses: Sequence[str]) -> None:
        """Begin to accept connections; ConfigurationError where that is not possible."""
        try:
            for address in addresses:
                sock, endpoint = listen(address, self.shared.settings)
                self._sockets.append(sock)
                self.bound += (endpoint,)
        except ConfigurationError:
            self.close()
            raise
        for sock in self._sockets:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def check(self) -> None:
        """Cut those who take too long to greet; to be called several times a second."""
        earliest = self.shared.clock.monotonic() - self.shared.settings.handshake_seconds
        for guest in [guest for guest in self.guests if guest.connection.opened_at < earliest]:
            guest.connection.cut("greeting_too_slow", "it did not greet in time")

    def drop_key(self, key: str) -> None:
        """Cut every connection that greets with this key."""
        for guest in [guest for guest in self.guests if guest.key == key]:
            guest.connection.cut("withdrawn", "its key is not admitted any more")

    def close(self) -> None:
        """Stop listening, and hang up on those who have not greeted. Idempotent."""
        for pause in self._pauses:
            pause.cancel()
        self._pauses.clear()
        for sock in self._sockets:
            self._loop.remove_reader(sock.fileno())
            sock.close()
        self._sockets.clear()
        for guest in list(self.guests):
            guest.connection.close()
        self.guests.clear()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # it has gone again
                self.shared.counts["accept_failed"] += 1
                continue
            except OSError as error:
                self._pause(listening, error)
                return
            self.shared.counts["accepted"] += 1
            self._meet(sock, str(address[0]))

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Nobody more can be accepted for now; the loop would else tell of those who wait again and again."""
        self.shared.counts["accept_failed"] += 1
        logger.warning("no connection can be accepted for %g s: %s", PAUSE_SECONDS, error)
        self._loop.remove_reader(listening.fileno())

        def go_on() -> None:
            self._pauses.discard(handle)
            self._loop.add_reader(listening.fileno(), self._accept, listening)

        handle = self._loop.call_later(PAUSE_SECONDS, go_on)
        self._pauses.add(handle)

    def _meet(self, sock: socket.socket, host: str) -> None:
        self.guests[Guest(self, sock, host)] = None
        if len(self.guests) > self.shared.settings.max_ungreeted:
            busiest = Counter(guest.host for guest in self.guests).most_common(1)[0][0]
            oldest = next(guest for guest in self.guests if guest.host == busiest)
            oldest.connection.cut("too_many_ungreeted", "too many are greeting")


class Guest:
    """Somebody who has connected and is greeting."""

    def __init__(self, listener: Listener, sock: socket.socket, host: str) -> None:
        self.host = host
        self.key = ""  # once it is proven
        self._listener = listener
        self._member: KnownPeer | None = None  # None, when it was let in: a probe
        self._ciphers: tuple[Cipher, Cipher] | None = None  # once it is let in
        self.connection = Connection(sock, listener.shared, self, dialled=False)
        self.connection.expect(KNOCK_BYTES)

    def said(self, connection: Connection, data: bytes) -> None:
        """The Knock, or the Ready."""
        if self._ciphers is None:
            self._answer(data)
        else:
            self._finish(data, *self._ciphers)

    def ended(self, connection: Connection, reason: str) -> None:
        """It hung up, or was cut."""
        self._listener.guests.pop(self, None)

    def _answer(self, data: bytes) -> None:
        listener = self._listener
        try:
            knock = Knock.parse(data)
        except ProtocolError:
            listener.shared.counts["handshake_failed"] += 1
            self.connection.end("it is no peer")
            return
        answerer = listener.admission.judge(knock, host=self.host)
        if isinstance(answerer, int):
            self._refuse(answerer, "it was refused")
            return
        self.key = knock.key
        self._member = listener.admission.member(knock.key)
        if self._member is not None and not listener.owner.accepts(self._member):
            listener.shared.counts["refused_not_wanted"] += 1
            self._refuse(NOT_WANTED, "it is not wanted")
            return
        welcome, *ciphers = answerer.welcome()
        self._ciphers = ciphers[0], ciphers[1]
        self.connection.expect(READY_BYTES)
        self.connection.say(welcome)

    def _refuse(self, answer: int, reason: str) -> None:
        self.connection.say(bytes([answer]))
        self.connection.end(reason)

    def _finish(self, data: bytes, outgoing: Cipher, incoming: Cipher) -> None:
        if incoming.open(data) != READY:
            raise ProtocolError("something else came where a Ready was due")
        listener = self._listener
        member = self._member
        listener.guests.pop(self, None)
        if member is None:
            listener.shared.counts["probes"] += 1
            self.connection.close()
        elif listener.admission.member(self.key) != member:
            self.connection.cut("withdrawn", "its key is not admitted any more")
        else:
            shared = listener.shared
            wrapping = Clear() if shared.settings.trusted_lan else Sealed(outgoing, incoming, shared.slabs)
            self.connection.open(listener.owner.owner_of(member), wrapping)
            listener.owner.incoming_opened(member, self.connection)
