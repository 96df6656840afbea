"""Somebody in the middle: a TCP proxy that passes bytes on, records them, and changes some."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

FORWARD, BACKWARD = 0, 1  # from the dialler to the listener, and the other way


class Meddler:
    """Changes one bit of one connection, at a byte of one direction that is counted from the connection's beginning."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.recorded: list[tuple[bytearray, bytearray]] = []  # by connection, forward and backward
        self.change_at: tuple[int, int] | None = None  # direction and byte
        self.num_changed = 0
        self.may_pass = asyncio.Event()  # while it is not set, nothing is read: both sides run into a wall
        self.may_pass.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on."""
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        record = (bytearray(), bytearray())
        self.recorded.append(record)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(FORWARD, reader, far_writer, record[FORWARD]))
                group.create_task(self._pass_on(BACKWARD, far_reader, writer, record[BACKWARD]))
        finally:
            writer.close()
            far_writer.close()

    async def _pass_on(
        self, direction: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                await self.may_pass.wait()
                start = len(record)
                record += data
                if self.change_at is not None and self.change_at[0] == direction:
                    at = self.change_at[1] - start
                    if 0 <= at < len(data):
                        data = data[:at] + bytes([data[at] ^ 0x01]) + data[at + 1 :]
                        self.change_at = None
                        self.num_changed += 1
                writer.write(data)
                await writer.drain()
        with suppress(ConnectionError, OSError):
            writer.close()


@asynccontextmanager
async def meddler(port: int) -> AsyncIterator[tuple[Meddler, str]]:
    """A proxy to that port of this machine, and the address to dial it at."""
    middle = Meddler(port)
    running: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(middle.serve(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield middle, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await server.wait_closed()
