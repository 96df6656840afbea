"""One connection to one hub server, from the handshake to its end, on nats-py. It does not reconnect.

nats-py's own reconnecting is not used: a cancellation can get lost in it, a publisher can wait for ever in it, it
retries in silence when the hub refuses us, and it cannot go from TCP to WebSocket. NatsConnection opens a new link
instead. What we need of nats-py's inside is in this file and in wire.py.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import nats.errors
import nkeys
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from potluck import tasks
from potluck.errors import CertificateError, ConfigurationError, HubUnavailableError, NotAdmittedError, PotluckError
from potluck.hub.nats.reconnect import is_websocket
from potluck.hub.nats.websocket import WebSocketWire
from potluck.hub.nats.wire import TcpWire, Wire
from potluck.hub.patterns import check_subject
from potluck.hub.subjects import Subjects

logger = logging.getLogger(__name__)

# nats-py pings by itself and blocks publishers by itself; both can hang, so both are out of the way and done here.
NEVER_SECONDS = 10**9
UNLIMITED_BYTES = 1 << 40
PENDING_LIMIT_BYTES = 4 * 1024 * 1024  # published, and not yet taken by the operating system
FLUSH_AT_CLOSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """In whose name a link is opened."""

    seed: bytes
    """The nkey seed, as in SU…"""

    peer: str
    """The public key of the same nkey."""

    name: str
    """The lane: the guard reads it, as in main or lobby."""

    token: str = ""
    """Shown to the guard beside the signature, if there is one."""

    @classmethod
    def of_seed(cls, seed: bytes, *, name: str, token: str = "") -> Credentials:
        """Those of a seed, or ConfigurationError."""
        try:
            pair = nkeys.from_seed(bytearray(seed))
            peer: str = pair.public_key.decode()
        except (nkeys.NkeysError, ValueError) as error:
            raise ConfigurationError("the identity's seed is not a valid nkey seed: make or import another") from error
        pair.wipe()
        return cls(seed=seed, peer=peer, name=name, token=token)

    @property
    def inbox_prefix(self) -> str:
        """Under which replies come back; nobody else may listen there."""
        return Subjects.inbox(self.peer)


class _AttemptError(Exception):
    """Carries what went wrong out of nats-py's connect, which would try again by itself otherwise."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class NatsLink:
    """One live connection. Made by `open`; `ended` is done when it is over, for whatever reason."""

    def __init__(self, server: str, wire: Wire, on_error: Callable[[Exception], None]) -> None:
        self.server = server
        self.ended = wire.ended
        self._wire = wire
        self._client = Client()
        self._client._transport = wire
        self._on_error = on_error
        self._opening = True
        self._subscriptions: list[NatsSubscription] = []
        self._round_trips: set[asyncio.Task[None]] = set()  # under way, or given up but still to be answered

    @classmethod
    async def open(
        cls,
        server: str,
        credentials: Credentials,
        *,
        ssl_context: ssl.SSLContext | None,
        timeout_seconds: float,
        on_error: Callable[[Exception], None],
    ) -> NatsLink:
        """Connect and authenticate, or raise in plain words what went wrong.

        `on_error` gets what the hub complains about later: violations of permissions, above all.
        """
        link = cls(server, make_wire(server), on_error)
        # In a task of its own, since nats-py's wait_for may lose a cancellation, ours or our caller's.
        attempt = asyncio.create_task(link._connect(credentials, ssl_context), name=f"connect to {server}")
        attempt.add_done_callback(tasks.forgive)  # we may be cancelled at the moment when it fails
        try:
            await asyncio.wait({attempt}, timeout=timeout_seconds)
            if not attempt.done():
                raise HubUnavailableError(
                    f"the hub at {server} did not answer within {timeout_seconds:g} s: it is down, or a firewall is in "
                    "between; check the address, or try another network"
                )
            attempt.result()
        except BaseException:
            link._opening = False
            if not attempt.done():
                await tasks.end(attempt)
            await link.close()
            raise
        return link

    @property
    def max_payload_bytes(self) -> int:
        """The largest message that the hub takes."""
        return self._client.max_payload

    @property
    def discovered_servers(self) -> list[str]:
        """Other servers of the same cluster, as this one tells."""
        scheme = self.server.partition("://")[0]
        return [f"{scheme}://{uri.netloc}" for uri in self._client.discovered_servers]

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Hand a message over, waiting while too much is on its way; HubUnavailableError when the link has ended."""
        check_subject(subject)
        while self._client.pending_data_size > PENDING_LIMIT_BYTES and not self.ended.done():
            self._wire.written.clear()
            await self._wire.written.wait()
        self._check_open()
        if len(payload) > self.max_payload_bytes:
            raise ConfigurationError(
                f"a message of {len(payload)} bytes on {subject} exceeds the hub's limit of {self.max_payload_bytes}: "
                "send it in pieces"
            )
        try:
            await self._client.publish(subject, payload, reply, dict(headers) if headers else None)
        except nats.errors.Error as error:
            raise HubUnavailableError(f"the message on {subject} was not sent: {error}") from error

    async def subscribe(
        self, subject: str, queue: str, callback: Callable[[Msg], Awaitable[None]], *, limit_bytes: int
    ) -> NatsSubscription:
        """Ask for messages. The callback must not wait: what comes next would queue up behind it."""
        self._check_open()
        try:
            subscription = await self._client.subscribe(
                subject, queue=queue, cb=callback, pending_bytes_limit=limit_bytes
            )
        except nats.errors.Error as error:
            raise HubUnavailableError(f"the subscription to {subject} was not sent: {error}") from error
        self._subscriptions.append(subscription)
        return subscription

    async def unsubscribe(self, subscription: NatsSubscription) -> None:
        """Ask for no more messages."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
        if not self.ended.done():
            try:
                await subscription.unsubscribe()
            except nats.errors.Error as error:
                raise HubUnavailableError(f"the subscription could not be ended at the hub: {error}") from error
        await tasks.end(subscription._wait_for_msgs_task)

    @property
    def num_received(self) -> int:
        """Bytes that have come from the hub."""
        return self._wire.num_received

    async def round_trip(self, timeout_seconds: float) -> None:
        """Return when the hub has processed all that was sent before."""
        if self._client._reading_task is None or self._client._reading_task.done():
            self._wire.abort()  # nats-py stopped reading over an error of its own; its flush would not notice
        self._check_open()
        flush = asyncio.create_task(self._client.flush(timeout=NEVER_SECONDS), name="hub round trip")
        # Whether we wait to the end or not, this one does: nats-py stops reading when an answer finds nobody waiting.
        self._round_trips.add(flush)
        flush.add_done_callback(self._round_trips.discard)
        flush.add_done_callback(tasks.forgive)
        either: set[asyncio.Future[Any]] = {flush, self.ended}
        try:
            await asyncio.wait(either, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
            self._check_open()
            if flush.done():
                flush.result()
                return
        except nats.errors.Error as error:
            raise HubUnavailableError(f"the hub at {self.server} went away: {error}") from error
        raise HubUnavailableError(f"the hub at {self.server} did not answer within {timeout_seconds:g} s")

    async def close(self, *, flush: bool = False) -> None:
        """End it and leave nothing behind; with `flush`, see to it first that the hub has what was sent."""
        if flush and not self.ended.done():
            try:
                await self.round_trip(FLUSH_AT_CLOSE_SECONDS)
            except HubUnavailableError as error:
                logger.info("closed without knowing whether the hub has everything: %s", error)
        else:
            self._wire.abort()
        if self._client._flush_queue is not None:  # else nats-py has not even begun, and would complain
            await self._client.close()
        self._wire.close()
        await self._wire.wait_closed()
        # nats-py cancels its tasks but does not wait for them.
        client = self._client
        workers = [subscription._wait_for_msgs_task for subscription in self._subscriptions]
        await tasks.end(client._reading_task, client._ping_interval_task, client._flusher_task, *workers)
        await tasks.end(*self._round_trips)
        self._subscriptions.clear()

    def _check_open(self) -> None:
        if self.ended.done():
            raise HubUnavailableError(f"the connection to the hub at {self.server} has ended: {self.ended.result()}")

    async def _connect(self, credentials: Credentials, ssl_context: ssl.SSLContext | None) -> None:
        try:
            await self._client.connect(
                [self.server],
                name=credentials.name,
                nkeys_seed_str=credentials.seed.decode(),
                token=credentials.token or None,
                inbox_prefix=credentials.inbox_prefix.encode(),
                tls=ssl_context,
                allow_reconnect=False,
                ping_interval=NEVER_SECONDS,
                connect_timeout=NEVER_SECONDS,
                pending_size=UNLIMITED_BYTES,
                error_cb=self._complained,
            )
        except _AttemptError as error:
            raise explain(self.server, error.cause) from error.cause
        self._opening = False
        if not self._client.is_connected:
            raise HubUnavailableError(f"the hub at {self.server} closed the connection during the handshake")

    async def _complained(self, error: Exception) -> None:
        if self._opening:
            raise _AttemptError(error) from error
        self._on_error(error)


def make_wire(server: str) -> Wire:
    """The wire for a server's URL."""
    try:
        url = urllib.parse.urlsplit(server)
        has_place = bool(url.hostname) and url.port != 0
    except ValueError:
        has_place = False
    if not has_place:
        raise ConfigurationError(
            f"{server!r} is not a hub address: it must name a host, as in tls://hub.example.org:4222"
        )
    kind = WebSocketWire if is_websocket(server) else TcpWire
    return kind(server, must_be_secure=url.scheme in ("tls", "wss"))


def explain(server: str, error: Exception) -> PotluckError:
    """What went wrong on connecting, as one of our errors, in plain words."""
    if isinstance(error, PotluckError):
        return error
    if "authorization violation" in str(error).lower() or isinstance(error, nats.errors.AuthorizationError):
        return NotAdmittedError(
            f"the hub at {server} does not let this identity in: it needs a valid invite or an approval, or it was "
            "banned; ask an organiser of the run"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return CertificateError(
            f"the certificate of the hub at {server} is not the one that the join link names "
            f"({error.verify_message or error}): the link is out of date, or something in between answers for the hub. "
            "Ask for a new link, or try another network"
        )
    if isinstance(error, ssl.SSLError):
        return CertificateError(
            f"no encrypted connection to the hub at {server} came about ({error.reason or error}): check that the "
            "address and the port are the hub's"
        )
    return HubUnavailableError(_why_unreachable(server, error))


def _why_unreachable(server: str, error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name in {server} is not known: check its spelling and this machine's network"
    if isinstance(error, OSError):
        if error.errno == errno.ECONNREFUSED:
            return f"nothing answers at {server} (connection refused): the hub is not running there, or on another port"
        if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return f"there is no way to {server} from here: check this machine's network"
    return f"the hub at {server} cannot be used: {str(error) or type(error).__name__}"
