"""The bytes between us and one hub server: TCP or TLS (websocket.py: WebSocket), under nats-py's protocol engine.

nats-py lets its transport be replaced, and ours differ from its own where a volunteer's network makes a difference:

- they can be cut: `abort` ends a connection at once, also one whose other end has vanished while data was on its way;
- they say so as soon as a connection has ended, not when nats-py's clean-up is through;
- a tls:// address is never spoken to in plain, whatever the other end offers;
- a PING that the hub sends while it still decides about us (it asks the guard, which may take seconds) is answered,
  where nats-py takes it for the end of the handshake.
"""

from __future__ import annotations

import asyncio
import ssl
from abc import abstractmethod
from typing import cast
from urllib.parse import ParseResult

from nats.aio.transport import Transport

from potluck.errors import CertificateError, HubUnavailableError

READ_LIMIT_BYTES = 1024 * 1024  # received and not yet parsed; past it the kernel is left to hold the sender back
CLOSE_SECONDS = 1.0  # how long a polite close may take before the connection is cut
PING = b"PING\r\n"
PONG = b"PONG\r\n"


class Wire(Transport):
    """What both kinds of connection have in common."""

    def __init__(self, server: str, *, must_be_secure: bool) -> None:
        self.server = server
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done as soon as no more bytes will come; the reason in words."""
        self.written = asyncio.Event()
        """Set whenever what nats-py had collected goes out: there is room again."""
        self._must_be_secure = must_be_secure
        self._secure = False

    def __bool__(self) -> bool:
        return True  # else nats-py would put a transport of its own in our place

    @abstractmethod
    def close(self) -> None:
        """Begin a polite end."""

    @abstractmethod
    async def wait_closed(self) -> None:
        """Wait for the end, and cut the connection if it takes too long."""

    @abstractmethod
    def abort(self) -> None:
        """End the connection now. Idempotent."""

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
        self.written.set()

    def _check_secure(self) -> None:
        if self._must_be_secure and not self._secure:
            raise CertificateError(
                f"the server at {self.server} offers no encryption, so it is not the hub that the address names, or "
                "something in between answers for it: nothing was sent. Try another network, or ask for a new join link"
            )

    def _not_open(self) -> HubUnavailableError:
        return HubUnavailableError(f"the connection to {self.server} is not open")


class TcpWire(Wire, asyncio.Protocol):
    """Plain TCP, upgraded to TLS after the hub's first line, as NATS does it."""

    def __init__(self, server: str, *, must_be_secure: bool) -> None:
        super().__init__(server, must_be_secure=must_be_secure)
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._gone = asyncio.Event()
        self._reading_paused = False

    # What nats-py calls

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Open the TCP connection; the caller sees to the deadline."""
        assert uri.hostname is not None
        assert uri.port is not None
        await asyncio.get_running_loop().create_connection(lambda: self, uri.hostname, uri.port)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        """Go on encrypted."""
        if self._transport is None:
            raise self._not_open()
        if not self._must_be_secure:
            raise CertificateError(f"the hub at {self.server} wants encryption: write its address as tls://…")
        if self._received:
            raise CertificateError(f"the server at {self.server} sent data before encryption began: nothing was sent")
        hostname = uri if isinstance(uri, str) else uri.hostname
        try:
            upgraded = await asyncio.get_running_loop().start_tls(
                self._transport, self, ssl_context, server_hostname=hostname
            )
            if upgraded is None:
                raise ConnectionResetError("the connection ended during the TLS handshake")
        except BaseException:
            self.abort()
            self._gone.set()  # the event loop does not tell us in this case
            raise
        self._transport = upgraded
        self._secure = True

    def write(self, payload: bytes) -> None:
        """Send soon."""
        self._check_secure()
        if self._transport is not None and not self.ended.done():
            self._transport.write(payload)

    def writelines(self, payload: list[bytes]) -> None:
        """Send soon."""
        self._check_secure()
        if self._transport is not None and not self.ended.done():
            self._transport.writelines(payload)
        self.written.set()

    async def drain(self) -> None:
        """Wait until the operating system has taken most of what was written, or until the end.

        The end is no error here: nats-py drains while it closes, and an error would break its clean-up off.
        """
        await self._writable.wait()

    async def read(self, buffer_size: int) -> bytes:
        """What has arrived; empty at the end. As much as there is: nats-py's own size would cost many small turns."""
        while not self._received and not self.ended.done():
            self._arrived.clear()
            await self._arrived.wait()
        return self._take(len(self._received))

    def at_eof(self) -> bool:
        """Whether nothing more can be read."""
        return self.ended.done() and not self._received

    async def readline(self) -> bytes:
        """One line of the handshake."""
        while True:
            while (end := self._received.find(b"\n")) < 0 and not self.ended.done():
                if len(self._received) > READ_LIMIT_BYTES:
                    raise HubUnavailableError(f"what answers at {self.server} is not a hub")
                self._arrived.clear()
                await self._arrived.wait()
            line = self._take(end + 1)
            if line != PING:
                return line
            self.write(PONG)

    def close(self) -> None:
        """Send what is left, then end the connection."""
        if self._transport is not None:
            self._transport.close()

    async def wait_closed(self) -> None:
        """Wait for the end, but not for ever."""
        if self._transport is None:
            return
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._gone.wait()
        except TimeoutError:
            self.abort()
            await self._gone.wait()

    def abort(self) -> None:
        """End the connection now."""
        if self._transport is not None and not self._gone.is_set():
            self._transport.abort()
        self._end("the connection was cut")

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Keep what arrived, up to a limit."""
        self._received += data
        if len(self._received) > READ_LIMIT_BYTES and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()
        self._arrived.set()

    def pause_writing(self) -> None:
        """The operating system takes no more for now."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It takes more again."""
        self._writable.set()

    def eof_received(self) -> None:
        """The hub has hung up: what is written from now on goes nowhere."""
        self._end("the connection was closed")

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake those that wait."""
        self._gone.set()
        self._end(str(exc or "") or "the connection was closed")

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self._arrived.set()
        self._writable.set()

    def _take(self, size: int) -> bytes:
        data = bytes(memoryview(self._received)[:size])
        del self._received[:size]
        if self._reading_paused and self._transport is not None and not self.ended.done():
            self._reading_paused = False
            self._transport.resume_reading()
        return data
