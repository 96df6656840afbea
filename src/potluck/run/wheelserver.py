"""Serves one file over HTTP to whoever asks: the wheel of the host's own Potluck.

Plain HTTP is enough, since the join link names the file's hash. Those who ask are strangers: a request is short and has
to come soon, connections are counted, and nothing in a request names a file of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from potluck.run.wheel import Wheel

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
MAX_REQUEST_BYTES = 8 * 1024
REQUEST_SECONDS = 10.0
PIECE_BYTES = 64 * 1024
PIECE_SECONDS = 30.0  # 2 kB/s will do


class WheelServer:
    """Serves a wheel until it is stopped."""

    def __init__(self, wheel: Wheel, sock: socket.socket) -> None:
        self.wheel = wheel
        self.port: int = sock.getsockname()[1]
        self._socket = sock
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on the socket, which is closed with the server."""
        self._server = await asyncio.start_server(self._accept, sock=self._socket, limit=MAX_REQUEST_BYTES)

    async def stop(self) -> None:
        """Close everything. Idempotent."""
        if self._server is not None:
            self._server.close()
        self._socket.close()
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._answer(reader, writer), name="wheel server")
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            for piece in self._response(head):
                writer.write(piece)
                async with asyncio.timeout(PIECE_SECONDS):
                    await writer.drain()
            writer.close()
            async with asyncio.timeout(PIECE_SECONDS):
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            logger.debug("somebody who asked for the wheel is gone: %r", error)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                writer.transport.abort()

    def _response(self, head: bytes) -> list[bytes]:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            status, kind, body = "405 Method Not Allowed", "text/plain; charset=utf-8", b"Only GET and HEAD.\n"
        elif path == f"/{self.wheel.file_name}".encode():
            status, kind, body = "200 OK", "application/octet-stream", self.wheel.data
        else:
            status, kind = "404 Not Found", "text/plain; charset=utf-8"
            body = (
                f"This host serves one file, {self.wheel.file_name}: Potluck as it runs here. If your join link names "
                "another version, ask the organiser for a new link.\n"
            ).encode()
        lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Connection: close"]
        first = "\r\n".join([*lines, "", ""]).encode("ascii")
        if method == b"HEAD":
            return [first]
        return [first, *(body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES))]
