"""The WebSocket under nats-py's protocol engine: it passes where only web traffic does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import ParseResult

from potluck.errors import HubUnavailableError
from potluck.hub.nats.wire import CLOSE_SECONDS, PING, PONG, READ_LIMIT_BYTES, Wire

if TYPE_CHECKING:
    import aiohttp

MAX_FRAME_BYTES = 16 * 1024 * 1024  # the hub sends far smaller ones

CLOSE_POLL_SECONDS = 0.005


class WebSocketWire(Wire):
    """WebSocket, plain or over TLS."""

    def __init__(self, server: str, *, must_be_secure: bool) -> None:
        super().__init__(server, must_be_secure=must_be_secure)
        import aiohttp  # slow to import, and most peers get by without

        self._aiohttp = aiohttp
        self._session: aiohttp.ClientSession | None = None
        self._websocket: aiohttp.ClientWebSocketResponse | None = None
        self._sockets: list[socket.socket] = []
        self._unsent: list[bytes] = []
        self._rest = b""
        self._closing: asyncio.Task[bool] | None = None

    # What nats-py calls

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Open a plain WebSocket; the caller sees to the deadline."""
        await self._open(uri.geturl(), ssl=False)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        """Open an encrypted WebSocket; nats-py calls this again when the hub says that it wants TLS."""
        if self._websocket is not None:
            self._check_secure()
            return
        assert not isinstance(uri, str)
        await self._open(uri.geturl(), ssl=ssl_context)
        self._secure = True

    def write(self, payload: bytes) -> None:
        """Send at the next `drain`."""
        self._check_secure()
        self._unsent.append(payload)

    def writelines(self, payload: list[bytes]) -> None:
        """Send at the next `drain`."""
        self._check_secure()
        self._unsent += payload
        self.written.set()

    async def drain(self) -> None:
        """Send what was written, as one frame. The end is no error here, as in `TcpWire.drain`."""
        if self._websocket is None or not self._unsent:
            return
        frame = b"".join(self._unsent)
        self._unsent.clear()
        if self.ended.done():
            return
        try:
            await self._websocket.send_bytes(frame)
        except ConnectionError as error:
            self._end(str(error))

    async def read(self, buffer_size: int) -> bytes:
        """What has arrived; empty at the end."""
        if self._rest:
            data, self._rest = self._rest, b""
            return data
        if self._websocket is None:
            raise self._not_open()
        message = await self._websocket.receive()
        if message.type == self._aiohttp.WSMsgType.BINARY:
            data = message.data
            return data if isinstance(data, bytes) else bytes(data)
        self._end("the connection was closed")
        return b""

    def at_eof(self) -> bool:
        """Whether nothing more can be read."""
        return self.ended.done() and not self._rest

    async def readline(self) -> bytes:
        """One line of the handshake."""
        received = b""
        while True:
            while b"\n" not in received:
                more = await self.read(0)
                if not more:
                    return received
                received += more
                if len(received) > READ_LIMIT_BYTES:
                    raise HubUnavailableError(f"what answers at {self.server} is not a hub")
            line, _, received = received.partition(b"\n")
            if line + b"\n" != PING:
                self._rest = received
                return line + b"\n"
            self.write(PONG)

    def close(self) -> None:
        """Begin a polite close."""
        if self._websocket is not None and self._closing is None:
            self._closing = asyncio.create_task(self._websocket.close(), name="websocket close")

    async def wait_closed(self) -> None:
        """Wait for the end, but not for ever."""
        if self._closing is not None and not self._closing.done():
            await asyncio.wait({self._closing}, timeout=CLOSE_SECONDS)
        self.abort()
        if self._closing is not None:
            await asyncio.wait({self._closing})
        if self._session is not None:
            await self._session.close()
        # aiohttp does not wait for its transport: a loop that is closed before that complains about it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                while any(each.fileno() >= 0 for each in self._sockets):  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(CLOSE_POLL_SECONDS)
        self._end("the connection was closed")

    def abort(self) -> None:
        """End the connection now, by the socket itself: that works through every layer above."""
        connected: Any = self._websocket.get_extra_info("socket") if self._websocket is not None else None
        if connected is not None and connected.fileno() >= 0:
            # An OSError says that it is not connected any more: what we want.
            with socket.socket(fileno=os.dup(connected.fileno())) as same, contextlib.suppress(OSError):
                same.shutdown(socket.SHUT_RDWR)
        self._end("the connection was cut")

    def _make_socket(self, address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        self._sockets.append(made)
        return made

    async def _open(self, url: str, *, ssl: ssl.SSLContext | bool) -> None:
        self._session = self._aiohttp.ClientSession(
            connector=self._aiohttp.TCPConnector(socket_factory=self._make_socket)
        )
        self._websocket = await self._session.ws_connect(
            url,
            ssl=ssl,
            max_msg_size=MAX_FRAME_BYTES,
            timeout=self._aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS),
        )
