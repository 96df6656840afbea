"""A member with a valid link key that speaks raw ZeroMQ, and so can say whatever it likes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import zmq
from directpeers import DEADLINE_SECONDS, Peer, entry

from potluck.link.direct.greeting import KNOCK, READY, Caller, LinkKeys
from potluck.link.direct.noise import Cipher
from potluck.link.direct.sealing import Clear, Sealed, Slabs, Wrapping
from potluck.testing.polling import poll_until

SLABS = Slabs(slab_bytes=512 * 1024, most_kept=0)


class RawMember:
    """Connects to `target` with credentials of its own, or with those that it is given."""

    def __init__(
        self,
        target: Peer,
        name: str = "mallory",
        *,
        keys: LinkKeys | None = None,
        plain: bool = False,
        routing_id: bytes = b"",
        username: bytes | None = None,
        password: bytes | None = None,
    ) -> None:
        self.name = name
        self.target = target
        self.keys = keys or LinkKeys.generate()
        self.caller = Caller(self.keys, target.carrier.link_key, plain=plain)
        self.plain = plain
        self.outgoing: Cipher | None = None
        self.wrapping: Wrapping = Clear()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.reconnect_ivl = -1
        self.socket.rcvtimeo = 0
        if routing_id:
            self.socket.routing_id = routing_id
        self.socket.plain_username = username if username is not None else self.caller.username
        self.socket.plain_password = password if password is not None else self.caller.password

    def join(self) -> None:
        """Get into the target's roster."""
        self.target.carrier.update_peer(entry(self.name, "s1", self.keys.link_key))

    def connect(self) -> None:
        self.socket.connect(str(self.target.carrier.bound[0]))

    async def receive(self) -> bytes:
        await poll_until(lambda: self.socket.poll(0), DEADLINE_SECONDS, "an answer")
        return self.socket.recv()

    async def greet(self) -> None:
        self.connect()
        self.socket.send(KNOCK)
        self.outgoing, incoming = self.caller.answer(await self.receive())
        self.socket.send(self.outgoing.seal(READY))
        if not self.plain:
            self.wrapping = Sealed(self.outgoing, incoming, SLABS)
        await self.target.until_open(self.name)

    def seal(self, frame: bytes, payload: bytes | None = None) -> list[bytes]:
        """The parts of the next packet."""
        view = memoryview(payload) if payload is not None else None
        return [bytes(part) for part in self.wrapping.wrap(frame, view)]

    def send(self, parts: Sequence[bytes]) -> None:
        self.socket.send_multipart(list(parts))

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@contextmanager
def raw_member(target: Peer, name: str = "mallory", **options: Any) -> Iterator[RawMember]:
    member = RawMember(target, name, **options)
    try:
        yield member
    finally:
        member.close()
