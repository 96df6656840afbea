"""A host's HTTP server: the wheel of its own Potluck, and what its run ships.

    /potluck_train-….whl       Potluck itself; the join link names its hash
    /KEY/manifest              what the run trains, as its organiser signed it
    /KEY/files/SHA256          a file that the manifest names

Plain HTTP is enough: the link names the wheel's hash and the organiser's key, and the manifest the files' hashes. KEY
comes from the link, so that everybody with a link can read the run's files, and passers-by find none. Those who ask are
strangers: a request is short and has to come soon, connections are counted, and nothing in a request names a file of
this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from potluck.run.wheel import Wheel

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
MAX_REQUEST_BYTES = 8 * 1024
REQUEST_SECONDS = 10.0
PIECE_BYTES = 64 * 1024
PIECE_SECONDS = 30.0  # 2 kB/s will do


_RANGE = re.compile(rb"\r\nrange: *bytes=([0-9]{1,15})-\r\n", re.IGNORECASE)

_ONLY_GET: tuple[str, bytes | Path] = ("405 Method Not Allowed", b"Only GET and HEAD.\n")

Offer = Callable[[str], bytes | Path | None]
"""What the run ships under a name, as in files/SHA256; None: nothing."""


class FileServer:
    """Serves a wheel, and what a run ships, until it is stopped."""

    def __init__(self, wheel: Wheel, sock: socket.socket, key: str) -> None:
        """`key` is the first part of all paths but the wheel's."""
        self.wheel = wheel
        self.offer: Offer | None = None
        """Set as soon as it is known what the run ships."""
        self._key = key
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
        task = asyncio.create_task(self._answer(reader, writer), name="file server")
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            async for piece in self._response(head):
                writer.write(piece)
                async with asyncio.timeout(PIECE_SECONDS):
                    await writer.drain()
            writer.close()
            async with asyncio.timeout(PIECE_SECONDS):
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            logger.debug("somebody who asked for a file is gone: %r", error)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                writer.transport.abort()

    async def _response(self, head: bytes) -> AsyncIterator[bytes]:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        status, content = self._find(path) if method in (b"GET", b"HEAD") else _ONLY_GET
        kind = "application/octet-stream" if status == "200 OK" else "text/plain; charset=utf-8"
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        start, more = 0, []
        if status == "200 OK" and (wanted := _RANGE.search(head)) and (start := int(wanted.group(1))):
            status = "206 Partial Content" if start < size else "416 Range Not Satisfiable"
            start = min(start, size)
            more = [f"Content-Range: bytes {start}-{size - 1}/{size}"]
        lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {size - start}", *more]
        yield "\r\n".join([*lines, "Connection: close", "", ""]).encode("ascii")
        if method == b"HEAD":
            return
        if not isinstance(content, Path):
            for at in range(start, size, PIECE_BYTES):
                yield content[at : at + PIECE_BYTES]
            return
        with content.open("rb") as file:  # pieces are small, and read ahead by the system
            file.seek(start)
            while piece := file.read(PIECE_BYTES):
                yield piece

    def _find(self, path: str) -> tuple[str, bytes | Path]:
        if path == f"/{self.wheel.file_name}":
            return "200 OK", self.wheel.data
        if path.startswith(f"/{self._key}/"):
            if self.offer is None:
                return "503 Service Unavailable", b"The host is starting: ask again in a moment.\n"
            if (found := self.offer(path.removeprefix(f"/{self._key}/"))) is not None:
                return "200 OK", found
        return "404 Not Found", (
            f"This host serves {self.wheel.file_name}, Potluck as it runs here, and what its run ships. If your join "
            "link names another version, ask the organiser for a new link.\n"
        ).encode()
