"""A gate in front of a server on this machine: a TCP forwarder that a test can shut, open, and freeze.

What goes through it can be cut off without touching the server or anybody else's connection.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from potluck import tasks

CHUNK_BYTES = 64 * 1024


class Forwarder:
    """Forwards connections to a port. `open` it; use it as an async context manager, so that it is shut for sure."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.num_connections = 0
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._pairs: set[asyncio.Task[None]] = set()
        self._moving = asyncio.Event()
        self._moving.set()

    async def open(self) -> None:
        """Let connections in, on the same port every time."""
        if self._server is None:
            self._server = await asyncio.start_server(self._arrived, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def shut(self) -> None:
        """Refuse new connections and cut those that there are."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await server.wait_closed()
        await tasks.end(*self._pairs)

    def freeze(self) -> None:
        """Keep connections open but move no byte, as a machine does that vanished from the network."""
        self._moving.clear()

    def thaw(self) -> None:
        """Move bytes again."""
        self._moving.set()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.shut()

    async def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair = asyncio.create_task(self._forward(reader, writer), name="gate")
        self._pairs.add(pair)
        pair.add_done_callback(self._pairs.discard)
        self.num_connections += 1

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            writers.append(onward_writer)
            directions = [
                asyncio.create_task(self._pump(reader, onward_writer)),
                asyncio.create_task(self._pump(onward_reader, writer)),
            ]
            try:
                await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await tasks.end(*directions)
        except OSError:  # nobody behind the gate: the caller sees its connection close
            pass
        finally:
            for each in writers:
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK_BYTES):
                await self._moving.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:  # one side has gone: the other is closed by our caller
            pass
