"""The WebSocket under nats-py's protocol engine: it passes where only web traffic does.

The frames are those of the bulk wire (bulk/websocket.py); for NATS both are one stream of bytes.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, cast
from urllib.parse import ParseResult

from potluck.errors import HubUnavailableError, ProtocolError
from potluck.hub.bulk import websocket as frames
from potluck.hub.bulk.websocket import FrameReader, UpgradeReader
from potluck.hub.nats.wire import TcpWire

DEFAULT_PORTS = {"ws": 80, "wss": 443}


class WebSocketWire(TcpWire):
    """WebSocket, plain or over TLS."""

    def __init__(self, server: str, *, must_be_secure: bool) -> None:
        super().__init__(server, must_be_secure=must_be_secure)
        self._key = frames.new_key()
        self._reader = UpgradeReader(self._key, FrameReader(self, control=self._said))
        self._upgraded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # What nats-py calls

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Open a plain WebSocket; the caller sees to the deadline."""
        await self._open(uri, None)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        """Open an encrypted WebSocket; nats-py calls this again when the hub says that it wants TLS."""
        if self._transport is not None:
            self._check_secure()
            return
        assert not isinstance(uri, str)
        await self._open(uri, ssl_context)

    async def _open(self, uri: ParseResult, context: ssl.SSLContext | None) -> None:
        host, port = uri.hostname or "", uri.port or DEFAULT_PORTS[uri.scheme]
        secure = {"ssl": context, "server_hostname": host} if context is not None else {}
        await asyncio.get_running_loop().create_connection(lambda: self, host, port, **cast(Any, secure))
        assert self._transport is not None
        self._secure = context is not None
        self._transport.write(frames.upgrade_request(uri.netloc, self._key))
        await self._upgraded

    def write(self, payload: bytes) -> None:
        """Send soon, as one frame."""
        self._check_secure()
        if self._transport is None or self.ended.done():
            return
        if self._secure:
            self._transport.write(frames.plain_frame_header(len(payload)) + payload)
        else:
            self._transport.writelines(frames.masked_frame([payload]))

    def writelines(self, payload: list[bytes]) -> None:
        """Send soon, as one frame."""
        self.write(b"".join(payload))
        self.written.set()

    def close(self) -> None:
        """Send what is left, say goodbye, then end the connection."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(frames.masked_frame([], frames.CLOSE))
        super().close()

    # What the event loop calls

    def data_received(self, data: bytes) -> None:
        """Take frames apart."""
        if self.ended.done():
            return
        try:
            self._reader.feed(data, 0, len(data))
        except ProtocolError as error:
            self._fail(str(error))
            self.abort()
            return
        if self._reader.is_upgraded and not self._upgraded.done():
            self._upgraded.set_result(None)

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        if not self._upgraded.done():
            self._upgraded.set_exception(HubUnavailableError(f"the hub at {self.server} cannot be used: {reason}"))
            self._upgraded.exception()  # it counts as seen: perhaps nobody waits for it

    # What the frames carry (ByteStream)

    def window(self) -> memoryview | None:
        """Messages of this wire are small: they have no memory of their own."""
        return None

    def filled(self, num_bytes: int) -> None:
        """Never called, since there is no window."""

    def feed(self, data: bytes | bytearray, start: int, end: int) -> None:
        """The next bytes of the stream."""
        super().data_received(bytes(memoryview(data)[start:end]))

    def _said(self, opcode: int, body: bytes) -> None:
        if opcode == frames.CLOSE:
            self._end("the hub closed the WebSocket")
            super().close()
        elif opcode == frames.PING and self._transport is not None:
            self._transport.writelines(frames.masked_frame([body], frames.PONG))
