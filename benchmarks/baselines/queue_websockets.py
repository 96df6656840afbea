"""A bare queue: a WebSocket server with an asyncio.Queue in memory. Nothing is kept, nothing is given back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
import struct
import sys
from typing import Any

import websockets.asyncio.client
import websockets.asyncio.server
import websockets.exceptions
from queueload import serve, tls

PUT, TAKE, DONE = b"p", b"t", b"d"
MOST_BYTES = 128 << 20


async def run_server(port: int, chain_file: str) -> None:
    """Answer each message: b"p" + number + data, b"t" + most, b"d" + numbers."""
    queue: asyncio.Queue[bytes] = asyncio.Queue()

    async def handle(websocket: websockets.asyncio.server.ServerConnection) -> None:
        async for message in websocket:
            assert isinstance(message, bytes)
            kind, content = message[:1], message[1:]
            if kind == PUT:
                queue.put_nowait(content[8:])
                await websocket.send(content[:8])
            elif kind == TAKE:
                items = [await queue.get()]
                while len(items) < struct.unpack("<I", content)[0] and not queue.empty():
                    items.append(queue.get_nowait())
                await websocket.send(b"".join(struct.pack("<I", len(item)) + item for item in items))
            else:
                await websocket.send(content)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain_file)
    async with websockets.asyncio.server.serve(
        handle, "127.0.0.1", port, ssl=context, compression=None, max_size=MOST_BYTES
    ) as server:
        print("ready", flush=True)
        await server.serve_forever()


class WebSocketQueue:
    """The client."""

    def __init__(self, websocket: websockets.asyncio.client.ClientConnection) -> None:
        self._websocket = websocket
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[None]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def put(self, data: bytes) -> None:
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        number = struct.pack("<q", next(self._numbers))
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._websocket.send(PUT + number + data)
        await answer

    async def take(self, most: int) -> list[tuple[Any, bytes]]:
        await self._websocket.send(TAKE + struct.pack("<I", most))
        answer = await self._websocket.recv()
        assert isinstance(answer, bytes)
        items, at = [], 0
        while at < len(answer):
            (size,) = struct.unpack_from("<I", answer, at)
            items.append((len(items), answer[at + 4 : at + 4 + size]))
            at += 4 + size
        return items

    async def done(self, taken: list[Any]) -> None:
        await self._websocket.send(DONE + struct.pack("<I", len(taken)))
        await self._websocket.recv()

    async def _read(self) -> None:
        with contextlib.suppress(websockets.exceptions.ConnectionClosed):  # the benchmark's end
            async for message in self._websocket:
                assert isinstance(message, bytes)
                self._waiting.pop(message).set_result(None)


async def main() -> None:
    role, port, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if role == "server":
        await run_server(port, file)
        return
    async with websockets.asyncio.client.connect(
        f"wss://localhost:{port}", ssl=tls(file), compression=None, max_size=MOST_BYTES
    ) as websocket:
        await serve(WebSocketQueue(websocket), role)


asyncio.run(main())
