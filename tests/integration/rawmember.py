"""Somebody with a member's key and a client of his own: it checks nothing, and says whatever it likes."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import suppress
from dataclasses import dataclass, field

from potluck.hub.keys import Signer

PATIENCE_SECONDS = 30.0


@dataclass
class Heard:
    """What the hub said up to a PONG."""

    messages: list[str] = field(default_factory=list)  # subjects
    errors: list[str] = field(default_factory=list)


class RawMember:
    """The NATS protocol by hand, over plain TCP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next_subscription = 0

    @classmethod
    async def open(cls, server: str, seed: bytes, name: str, *, source: str = "127.0.0.1") -> RawMember:
        """Connect, from the address `source`, and prove the key."""
        host, port = server.removeprefix("nats://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
        info = json.loads((await reader.readline()).removeprefix(b"INFO "))
        signer = Signer(seed)
        options = {
            "verbose": False,
            "nkey": signer.public_key,
            "sig": base64.b64encode(signer.sign(info["nonce"].encode())).decode(),
            "name": name,
            "protocol": 1,
            "headers": True,
        }
        raw = cls(reader, writer)
        writer.write(f"CONNECT {json.dumps(options)}\r\n".encode())
        try:
            assert (await raw.settle()).errors == []
        except BaseException:
            await raw.close()
            raise
        return raw

    def publish(self, subject: str, payload: bytes = b"", reply: str = "") -> None:
        """Say something."""
        self._writer.write(f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n")

    def subscribe(self, subject: str, queue: str = "") -> None:
        """Want to hear something."""
        self._next_subscription += 1
        self._writer.write(f"SUB {subject} {queue} {self._next_subscription}\r\n".encode())

    async def settle(self) -> Heard:
        """All that the hub says up to the answer to a PING: by then it has dealt with what was sent before."""
        self._writer.write(b"PING\r\n")
        heard = Heard()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                line = (await self._reader.readline()).decode()
                if not line:
                    raise ConnectionResetError("the hub has closed the connection")
                kind, *rest = line.split()
                if kind == "PONG":
                    return heard
                if kind == "PING":
                    self._writer.write(b"PONG\r\n")
                elif kind == "-ERR":
                    heard.errors.append(line.strip())
                elif kind in ("MSG", "HMSG"):
                    heard.messages.append(rest[0])
                    await self._reader.readexactly(int(rest[-1]) + 2)

    async def until_cut(self) -> None:
        """Wait until the hub hangs up."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            with suppress(ConnectionError):
                while await self._reader.read(4096):
                    pass

    async def close(self) -> None:
        """Hang up, if the hub has not."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
