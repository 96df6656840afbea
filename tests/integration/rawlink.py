"""A member with a valid link key that speaks raw TCP, and so can say whatever it likes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from directpeers import DEADLINE_SECONDS, Peer, entry

from potluck.link.direct.greeting import READY, WELCOME, Caller, LinkKeys
from potluck.link.direct.noise import MESSAGE_BYTES, Cipher
from potluck.link.direct.sealing import Clear, Sealed, Slabs, Wrapping

SLABS = Slabs(slab_bytes=512 * 1024, most_kept=0)
WELCOME_BYTES = 1 + MESSAGE_BYTES


class RawMember:
    """Connects to `target` with a Knock of its own, or with the one that it is given."""

    def __init__(
        self,
        target: Peer,
        name: str = "mallory",
        *,
        keys: LinkKeys | None = None,
        plain: bool = False,
        knock: bytes | None = None,
    ) -> None:
        self.name = name
        self.target = target
        self.keys = keys or LinkKeys.generate()
        self.caller = Caller(self.keys, target.carrier.link_key, plain=plain)
        self.knock = knock if knock is not None else self.caller.knock.pack()
        self.plain = plain
        self.outgoing: Cipher | None = None
        self.wrapping: Wrapping = Clear()
        self.socket = socket.socket()
        self.socket.setblocking(False)

    def join(self) -> None:
        """Get into the target's roster."""
        self.target.carrier.update_peer(entry(self.name, "s1", self.keys.link_key))

    async def connect(self) -> None:
        bound = self.target.carrier.bound[0]
        await asyncio.get_running_loop().sock_connect(self.socket, (str(bound.ip), bound.port))

    async def receive(self, num_bytes: int) -> bytes:
        """So many bytes; fewer when it is hung up on."""
        data = b""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(data) < num_bytes:
                try:
                    more = await asyncio.get_running_loop().sock_recv(self.socket, num_bytes - len(data))
                except ConnectionError:
                    break
                if not more:
                    break
                data += more
        return data

    async def until_hung_up_on(self) -> bytes:
        """What came before that."""
        return await self.receive(10**6)

    async def greet(self) -> None:
        await self.connect()
        await self.send(self.knock)
        welcome = await self.receive(WELCOME_BYTES)
        assert welcome[:1] == bytes([WELCOME]), welcome
        self.outgoing, incoming = self.caller.answer(welcome[1:])
        await self.send(self.outgoing.seal(READY))
        if not self.plain:
            self.wrapping = Sealed(self.outgoing, incoming, SLABS)
        await self.target.until_open(self.name)

    def seal(self, frame: bytes, payload: bytes | None = None) -> list[bytes]:
        """The record of the next packet, in one or two pieces; the first begins with the head."""
        view = memoryview(payload) if payload is not None else None
        return [bytes(part) for part in self.wrapping.wrap(frame, view)]

    async def send(self, *parts: bytes) -> None:
        """Send some bytes; being hung up on meanwhile is fine."""
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                await asyncio.get_running_loop().sock_sendall(self.socket, b"".join(parts))
        except ConnectionError:
            pass

    def close(self) -> None:
        self.socket.close()


@contextmanager
def raw_member(target: Peer, name: str = "mallory", **options: Any) -> Iterator[RawMember]:
    member = RawMember(target, name, **options)
    try:
        yield member
    finally:
        member.close()
