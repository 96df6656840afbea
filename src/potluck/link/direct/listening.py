"""The incoming side: one socket that everybody may try to connect to, and the connections that made it in.

A connection is known by the name that the admission gave it, which ZeroMQ writes on each of its messages. It must knock
before anything else; it is open once its greeting is complete. What belongs to no connection that knocked is dropped.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol

import zmq

from potluck.errors import ConfigurationError, ProtocolError
from potluck.link.direct.addresses import Endpoint
from potluck.link.direct.admission import Admission, AdmissionDesk, Member, key_of
from potluck.link.direct.dialling import MAX_PARTS
from potluck.link.direct.flood import FloodGuard, Wire
from potluck.link.direct.greeting import KNOCK, READY
from potluck.link.direct.loopsocket import LoopSocket, Outgoing, Parts, SocketMonitor
from potluck.link.direct.noise import Cipher
from potluck.link.direct.sealing import Clear, Opened, Sealed, Slabs, Wrapping
from potluck.link.direct.sockets import Context, SocketSettings, bind, make_listener

MAX_ENDED = 256

_ACCEPTED = int(zmq.EVENT_ACCEPTED)
_DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
_COUNTED = {
    int(zmq.EVENT_ACCEPT_FAILED): "accept_failed",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "handshake_failed",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "handshake_failed",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "handshake_refused",
}
_EVENTS = _ACCEPTED | _DISCONNECTED | sum(_COUNTED)


class ListenerOwner(Protocol):
    """What a listener asks and tells whoever made it."""

    def accepts(self, member: Member) -> bool:
        """Whether a connection of this member is wanted now; if not, it is cut."""
        ...

    def incoming_opened(self, incoming: Incoming) -> None:
        """The path works both ways."""
        ...

    def incoming_ended(self, incoming: Incoming, reason: str) -> None:
        """An open connection broke or was cut. Told once, and never after `close`."""
        ...

    def incoming_packet(self, incoming: Incoming, packet: Opened) -> None:
        """A packet on an open connection, hostile until checked."""
        ...

    def listener_served(self) -> None:
        """There may be room to send again, to some connection."""
        ...


class Incoming:
    """One incoming connection that knocked."""

    def __init__(
        self,
        listener: Listener,
        *,
        name: str,
        routing_id: bytes,
        wire: Wire,
        member: Member | None,
        ciphers: tuple[Cipher, Cipher],
        slabs: Slabs | None,
    ) -> None:
        """`slabs`: None where packets go as they are."""
        self.name = name
        self.key = key_of(name)
        self.routing_id = routing_id
        self.wire = wire
        self.member = member  # None: a probe
        self.peer = member.peer if member is not None else ""
        self.is_open = False
        self.wrapping: Wrapping = Clear() if slabs is None else Sealed(*ciphers, slabs)
        self.first_cipher = ciphers[1]  # what the Ready is sealed with, in trusted-LAN mode too
        self._listener = listener

    def send(self, parts: Sequence[Outgoing]) -> bool:
        """Hand over one message; False when the queue is full, zmq.ZMQError when the connection has gone."""
        return self._listener.send(self, parts)

    def close(self, *, linger_milliseconds: int = 0) -> None:
        """Hang up, without telling the owner. What was sent just before may be lost."""
        self._listener.drop(self, "closed")

    def cut(self, count_as: str, reason: str) -> None:
        """Hang up because of what the other side did; the owner is told."""
        was_open = self.is_open
        self._listener.drop(self, count_as)
        if was_open:
            self._listener.owner.incoming_ended(self, reason)


class Listener:
    """Accepts connections and greets them."""

    def __init__(
        self,
        owner: ListenerOwner,
        context: Context,
        settings: SocketSettings,
        guard: FloodGuard,
        admission: Admission,
        slabs: Slabs,
    ) -> None:
        self.owner = owner
        self.counts: Counter[str] = Counter()
        self._slabs = None if settings.trusted_lan else slabs
        self._guard = guard
        self._admission = admission
        self._incoming: dict[str, Incoming] = {}
        self._ended: deque[str] = deque(maxlen=MAX_ENDED)  # names of connections that may still have messages here
        self._desk = AdmissionDesk(context, admission)
        self._raw = make_listener(context, settings)
        self._monitor = SocketMonitor(context, self._raw, events=_EVENTS, on_event=self._observe)
        self._socket = LoopSocket(
            self._raw, on_message=self._receive, on_served=owner.listener_served, max_parts=1 + MAX_PARTS
        )
        self.bound: tuple[Endpoint, ...] = ()

    def listen(self, addresses: Sequence[str]) -> None:
        """Begin to accept connections; ConfigurationError where that is not possible."""
        try:
            self.bound = bind(self._raw, addresses)
        except ConfigurationError:
            self.close()
            raise

    def send(self, incoming: Incoming, parts: Sequence[Outgoing]) -> bool:
        """Hand over one message to one connection."""
        if incoming.wire.closed:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        return self._socket.send([incoming.routing_id, *parts])

    def drop(self, incoming: Incoming, count_as: str) -> None:
        """Cut one connection and forget it."""
        self._forget(incoming)
        incoming.wire.on_end = None
        self._guard.cut(incoming.wire, count_as)

    def drop_key(self, key: str) -> None:
        """Cut whatever connections have this key."""
        for incoming in [each for each in self._incoming.values() if each.key == key]:
            self.drop(incoming, "withdrawn")

    def close(self, *, linger_milliseconds: int = 0) -> None:
        """Stop listening and cut all connections. Calling it twice does no harm."""
        self._incoming.clear()
        self._monitor.close()
        self._desk.close()
        self._socket.close(linger_milliseconds=linger_milliseconds)

    def _observe(self, event: int, value: int) -> None:
        if event == _ACCEPTED:
            self.counts["accepted"] += 1
            self._guard.opened(value, incoming=True)
        elif event == _DISCONNECTED:
            self._guard.closed(value)
        else:
            self.counts[_COUNTED[event]] += 1

    def _receive(self, parts: Parts, surplus_parts: int) -> None:
        name = str(parts[0].get("User-Id"))
        incoming = self._incoming.get(name)
        if incoming is None:
            if name in self._ended:
                self.counts["late_messages"] += 1
            else:
                self._meet(name, parts, surplus_parts)
            return
        del parts[0]
        incoming.wire.delivered(parts)
        if incoming.is_open:
            try:
                packet = incoming.wrapping.unwrap(parts, surplus_parts)
            except ProtocolError as error:
                incoming.cut("tampered", str(error))
            else:
                self.owner.incoming_packet(incoming, packet)
            return
        try:
            self._finish_greeting(incoming, parts, surplus_parts)
        except ProtocolError:
            self.drop(incoming, "bad_greeting")

    def _meet(self, name: str, parts: Parts, surplus_parts: int) -> None:
        """The first message of a connection: a Knock, or the end of it."""
        wire = self._guard.opened(parts[0].get(zmq.SRCFD), incoming=True)
        if wire is None or wire.closed or wire.on_end is not None:
            self.counts["late_messages"] += 1  # of a connection that has ended
            return
        routing_id = parts[0].bytes
        del parts[0]
        wire.delivered(parts)
        key = key_of(name)
        answerer = self._admission.answerer(name)
        member = self._admission.member(key)
        if answerer is None or (member is None and not self._admission.is_probe(key)):
            self._refuse(name, wire, "withdrawn")
            return
        if len(parts) != 1 or surplus_parts or parts[0].bytes != KNOCK:
            self._refuse(name, wire, "bad_greeting")
            return
        if member is not None and not self.owner.accepts(member):
            self._refuse(name, wire, "not_wanted")
            return
        welcome, *ciphers = answerer.welcome()
        incoming = Incoming(
            self,
            name=name,
            routing_id=routing_id,
            wire=wire,
            member=member,
            ciphers=(ciphers[0], ciphers[1]),
            slabs=self._slabs,
        )
        wire.on_end = lambda reason: self._lost(incoming, reason)
        self._incoming[name] = incoming
        self._guard.welcome(wire)
        try:
            self.send(incoming, [welcome])
        except zmq.ZMQError:
            self.drop(incoming, "gone_in_greeting")

    def _refuse(self, name: str, wire: Wire, count_as: str) -> None:
        self._ended.append(name)
        self._guard.cut(wire, count_as)

    def _finish_greeting(self, incoming: Incoming, parts: Parts, surplus_parts: int) -> None:
        if len(parts) != 1 or surplus_parts or incoming.first_cipher.open(parts[0].bytes) != READY:
            raise ProtocolError("something else came where a Ready was due: dropped")
        if incoming.member is None:
            self.counts["probes"] += 1
            self.drop(incoming, "probe_done")
        elif self._admission.member(incoming.key) != incoming.member:
            self.drop(incoming, "withdrawn")
        else:
            incoming.wire.greeted = incoming.is_open = True
            self.owner.incoming_opened(incoming)

    def _forget(self, incoming: Incoming) -> bool:
        """Whether it was open."""
        was_open, incoming.is_open = incoming.is_open, False
        if self._incoming.pop(incoming.name, None) is not None:
            self._ended.append(incoming.name)
        return was_open

    def _lost(self, incoming: Incoming, reason: str) -> None:
        if self._forget(incoming):
            self.owner.incoming_ended(incoming, reason)
