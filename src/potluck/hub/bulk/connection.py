"""One connection of the bulk wire to one hub server, from the handshake to its end, on asyncio. It does not reconnect.

The event loop puts what it reads straight where it belongs (asyncio's BufferedProtocol): the rest of a large message
into that message's own memory, everything else into a small buffer that is used again and again. Measured, this is as
fast as a thread of its own with a blocking socket; what is left is the work of TLS and of the kernel.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from potluck.errors import CertificateError, ConfigurationError, HubUnavailableError, NotAdmittedError, ProtocolError
from potluck.hub.bulk import protocol as bulkprotocol
from potluck.hub.bulk import websocket as websocketframes
from potluck.hub.bulk.protocol import KIB, Buffer, HubReader
from potluck.hub.bulk.websocket import ByteStream, FrameReader, UpgradeReader
from potluck.hub.keys import Signer
from potluck.hub.nats.reconnect import is_websocket

STAGING_BYTES = 32 * KIB
CLOSE_SECONDS = 1.0
DEFAULT_PORTS = {"nats": 4222, "tls": 4222, "ws": 80, "wss": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkLogin:
    """In whose name a connection is opened."""

    signer: Signer
    """The key that the hub is shown."""

    name: str = "bulk"
    """The lane, which the guard reads."""

    token: str = ""
    """Shown to the hub beside the signature, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkLimits:
    """What one connection may hold."""

    max_message_bytes: int = 1024 * KIB + 64 * KIB
    """Larger messages are read past. The hub's own limit is the same (configuration.py)."""

    high_water_bytes: int = 2048 * KIB
    """With so much waiting to be written, publishing is refused …"""

    low_water_bytes: int = 512 * KIB
    """… until it has shrunk to this."""

    def __post_init__(self) -> None:
        if self.max_message_bytes < 1 or not 0 <= self.low_water_bytes < self.high_water_bytes:
            raise ConfigurationError(f"{self} cannot work: low water must be below high water, and a message have size")


class ConnectionEvents(Protocol):
    """What a connection tells while it is open; its end is told by `ended`."""

    def message_arrived(self, subject: str, payload: memoryview) -> None:
        """Something was published for us. The view stays valid."""
        ...

    def message_skipped(self, subject: str, num_bytes: int) -> None:
        """Something was published for us that is larger than we take."""
        ...

    def writable(self) -> None:
        """Publishing works again after it was refused."""
        ...

    def complained(self, text: str) -> None:
        """The hub refuses something that we did."""
        ...


class BulkConnection(asyncio.BufferedProtocol):
    """One live connection. Made by `open`; `ended` is done when it is over, for whatever reason."""

    def __init__(self, server: str, events: ConnectionEvents, limits: BulkLimits) -> None:
        self._loop = asyncio.get_running_loop()
        self.server = server
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self.heard_at = self._loop.time()
        self.is_congested = False
        self.broke_protocol = False
        self.max_payload_bytes = 0
        self.discovered_servers: list[str] = []
        self._events = events
        self._limits = limits
        self._scheme = server.partition("://")[0]
        self._is_secure = False
        self._transport: asyncio.Transport | None = None
        self._gone = asyncio.Event()
        self._hub = HubReader(self, max_message_bytes=limits.max_message_bytes)
        self._reader: ByteStream = self._hub
        self._staging = bytearray(STAGING_BYTES)
        self._staging_view = memoryview(self._staging)
        self._is_window = False  # what the event loop fills now is a message's own memory
        self._subscriptions: dict[str, int] = {}  # by subject, their numbers
        self._last_number = 0
        self._info: asyncio.Future[Mapping[str, Any]] = self._loop.create_future()
        self._accepted: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def open(
        cls,
        server: str,
        login: BulkLogin,
        subjects: Collection[str],
        events: ConnectionEvents,
        *,
        ssl_context: ssl.SSLContext | None,
        limits: BulkLimits,
        timeout_seconds: float,
    ) -> BulkConnection:
        """Connect, authenticate and subscribe, or raise what went wrong."""
        connection = cls(server, events, limits)
        try:
            async with asyncio.timeout(timeout_seconds):
                await connection._connect(login, subjects, ssl_context)
        except BaseException as error:
            connection.abort("the connection could not be opened")
            await connection.close()
            if isinstance(error, TimeoutError):
                raise HubUnavailableError(
                    f"the hub at {server} did not answer within {timeout_seconds:g} s: it is down, or a firewall is in "
                    "between; check the address, or try another network"
                ) from error
            raise
        return connection

    # What its owner asks

    def publish(self, subject: str, parts: Sequence[Buffer]) -> int:
        """Write one message whatever the congestion, and return the size of its payload. A large last part is kept."""
        frame = websocketframes.plain_frame_header if self._scheme == "wss" else None
        pieces, size = bulkprotocol.publication(subject, parts, frame=frame)
        if self._scheme == "ws":
            pieces = websocketframes.masked_frame(pieces)
        if self._transport is not None and not self.ended.done():
            self._transport.writelines(pieces)
        return size

    def listen(self, subjects: Collection[str]) -> None:
        """Listen to these subjects and no others, from now on. What is on its way to us still arrives."""
        self._say(self._change_subscriptions(subjects))

    def ping(self) -> None:
        """Make the hub say something, so that `heard_at` moves on if it lives."""
        self._say(bulkprotocol.PING)

    def abort(self, reason: str) -> None:
        """End the connection now. Idempotent."""
        self._end(reason)
        if self._transport is not None and not self._gone.is_set():
            self._transport.abort()

    async def close(self) -> None:
        """Send what was written, end the connection, and wait until nothing is left of it."""
        self._end("it was closed")
        if self._transport is None:
            return
        self._transport.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._gone.wait()
        except TimeoutError:
            self._transport.abort()
            await self._gone.wait()

    # The handshake

    async def _connect(self, login: BulkLogin, subjects: Collection[str], ssl_context: ssl.SSLContext | None) -> None:
        url = urlsplit(self.server)
        host, port = url.hostname or "", url.port or DEFAULT_PORTS[self._scheme]
        wants_secure = self._scheme in ("tls", "wss")
        if wants_secure and ssl_context is None:
            raise CertificateError(f"there is no authority to check the certificate of the hub at {self.server} by")
        if is_websocket(self.server):
            key = websocketframes.new_key()
            self._reader = UpgradeReader(key, FrameReader(self._hub, control=self._websocket_said))
            secure = {"ssl": ssl_context, "server_hostname": host} if wants_secure else {}
            await self._loop.create_connection(lambda: self, host, port, **cast(Any, secure))
            self._is_secure = wants_secure
            cast(asyncio.Transport, self._transport).write(websocketframes.upgrade_request(url.netloc, key))
        else:
            await self._loop.create_connection(lambda: self, host, port)
        info = await self._info
        if self._scheme == "tls":
            await self._begin_tls(info, cast(ssl.SSLContext, ssl_context), host)
        elif info.get("tls_required") and not wants_secure:
            raise CertificateError(f"the hub at {self.server} wants encryption: write its address as tls://…")
        nonce = str(info.get("nonce", ""))
        subscriptions = self._change_subscriptions(subjects)
        self._say(
            bulkprotocol.greeting(login.signer, nonce, name=login.name, token=login.token, subscriptions=subscriptions)
        )
        await self._accepted

    def _change_subscriptions(self, subjects: Collection[str]) -> bytes:
        """What is said to the hub. Old ones go first, so that nothing comes twice."""
        wanted = dict.fromkeys(subjects)
        unwanted = [subject for subject in self._subscriptions if subject not in wanted]
        said = [bulkprotocol.unsubscribing(self._subscriptions.pop(subject)) for subject in unwanted]
        for subject in wanted:
            if subject not in self._subscriptions:
                self._last_number += 1
                self._subscriptions[subject] = self._last_number
                said.append(bulkprotocol.subscribing(subject, self._last_number))
        self._hub.last_subscription = self._last_number
        return b"".join(said)

    async def _begin_tls(self, info: Mapping[str, Any], ssl_context: ssl.SSLContext, host: str) -> None:
        if not (info.get("tls_required") or info.get("tls_available")):
            raise CertificateError(
                f"the server at {self.server} offers no encryption, so it is not the hub that the address names, or "
                "something in between answers for it: nothing was sent"
            )
        if not self._hub.is_between_lines:
            raise CertificateError(f"the server at {self.server} sent data before encryption began: nothing was sent")
        plain = cast(asyncio.Transport, self._transport)
        try:
            secure = await self._loop.start_tls(plain, self, ssl_context, server_hostname=host)
            if secure is None:
                raise ConnectionResetError("the connection ended during the TLS handshake")
        except BaseException:
            plain.abort()
            self._gone.set()  # the event loop does not tell us in this case
            raise
        self._is_secure = True
        self.connection_made(secure)

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        limits = self._limits
        self._transport.set_write_buffer_limits(high=limits.high_water_bytes, low=limits.low_water_bytes)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to put what arrives next."""
        window = self._reader.window()
        self._is_window = window is not None
        return window if window is not None else self._staging_view

    def buffer_updated(self, nbytes: int) -> None:
        """So much has arrived there."""
        if self.ended.done():
            return
        self.heard_at = self._loop.time()
        try:
            if self._is_window:
                self._reader.filled(nbytes)
            else:
                self._reader.feed(self._staging, 0, nbytes)
        except ProtocolError as error:
            self.broke_protocol = True
            self._fail_handshake(error)
            self.abort(str(error))

    def pause_writing(self) -> None:
        """Enough is waiting."""
        self.is_congested = True

    def resume_writing(self) -> None:
        """There is room again."""
        self.is_congested = False
        if not self.ended.done():
            self._events.writable()

    def eof_received(self) -> None:
        """The hub has hung up: what is written from now on goes nowhere."""
        self._end("the hub closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake those that wait."""
        self._gone.set()
        self._end(str(exc or "") or "the hub closed the connection")

    # What the hub says (HubSpeech)

    def said_info(self, fields: Mapping[str, Any]) -> None:
        """Who the hub is, and which others there are."""
        limit = fields.get("max_payload")
        if isinstance(limit, int):
            self.max_payload_bytes = self._hub.hub_limit_bytes = limit
        urls = fields.get("connect_urls")  # to a WebSocket, the hub names the others' WebSockets here
        if isinstance(urls, list):
            self.discovered_servers = [f"{self._scheme}://{url}" for url in urls if isinstance(url, str)]
        if not self._info.done():
            self._info.set_result(fields)

    def said_message(self, subject: str, payload: memoryview) -> None:
        """Something was published for us; perhaps before we are told that we are in."""
        self._check_greeted()
        self._events.message_arrived(subject, payload)

    def said_too_much(self, subject: str, num_bytes: int) -> None:
        """Something was published for us that is larger than we take."""
        self._check_greeted()
        self._events.message_skipped(subject, num_bytes)

    def said_ping(self) -> None:
        """Are we there? The hub also asks while the guard decides about us, which may take seconds."""
        self._check_greeted()
        self._say(bulkprotocol.PONG)

    def said_pong(self) -> None:
        """The first one says that we are in, and subscribed."""
        self._check_greeted()
        if not self._accepted.done():
            self._accepted.set_result(None)

    def said_error(self, text: str) -> None:
        """The hub refuses something. It does not say more about refused credentials than that."""
        if self._accepted.done():
            self._events.complained(text)
        elif "authorization" in text.lower() or "authentication" in text.lower():
            self._fail_handshake(
                NotAdmittedError(
                    f"the hub at {self.server} does not let this identity in: it needs a valid invite or an approval, "
                    "or it was banned; ask an organiser of the run"
                )
            )
        else:
            self._fail_handshake(HubUnavailableError(f"the hub at {self.server} refused the connection: {text}"))

    def _check_greeted(self) -> None:
        """Nothing but INFO may come before encryption: a machine in between could have sent it."""
        if not self._info.done() or (self._scheme == "tls" and not self._is_secure):
            raise ProtocolError(f"the server at {self.server} spoke out of turn")

    def _websocket_said(self, opcode: int, body: bytes) -> None:
        if opcode == websocketframes.CLOSE:
            self.abort("the hub closed the WebSocket")
        elif opcode == websocketframes.PING and self._transport is not None:
            self._transport.writelines(websocketframes.masked_frame([body], websocketframes.PONG))

    def _say(self, data: bytes) -> None:
        if self._transport is None or self.ended.done() or not data:
            return
        if self._scheme == "ws":
            self._transport.writelines(websocketframes.masked_frame([data]))
        elif self._scheme == "wss":
            self._transport.write(websocketframes.plain_frame_header(len(data)) + data)
        else:
            self._transport.write(data)

    # The end

    def _end(self, reason: str) -> None:
        self._hub.stop()
        if not self.ended.done():
            self.ended.set_result(reason)
        self._fail_handshake(HubUnavailableError(f"the hub at {self.server} hung up during the handshake: {reason}"))

    def _fail_handshake(self, error: Exception) -> None:
        for future in (self._info, self._accepted):
            if not future.done():
                future.set_exception(error)
                future.exception()  # it counts as seen: perhaps nobody waits for it
