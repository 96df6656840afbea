"""The real hub connection: it keeps subscriptions, requests and watches while the links under it come and go.

wire.py          bytes: TCP, TLS, WebSocket
link.py          one connection to one server
linkkeeper.py        opens the next link when one breaks (reconnect.py: which server, and when)
requests.py      requests that wait for answers
interests.py     what is listened to, on whichever link (subscription.py: one of them; dispatch.py: calling its handler)
store.py         stores, and watch.py their changes
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import nats.errors
from nats.aio.msg import Msg

from potluck.errors import (
    AccessError,
    ConfigurationError,
    DeadlineExceededError,
    HubUnavailableError,
    NotAdmittedError,
)
from potluck.hub.address import HubAddress
from potluck.hub.connection import Handler
from potluck.hub.nats.dispatch import BACKLOG_BYTES, BACKLOG_MESSAGES
from potluck.hub.nats.interests import Interests
from potluck.hub.nats.link import Credentials, NatsLink
from potluck.hub.nats.linkkeeper import KeeperConfig, LinkKeeper
from potluck.hub.nats.requests import PendingRequests
from potluck.hub.nats.store import NatsStore
from potluck.hub.nats.subscription import NatsHubSubscription
from potluck.hub.nats.watch import NatsWatch
from potluck.hub.subjects import Subjects

logger = logging.getLogger(__name__)

THROUGH_GUARD = 0.4  # of the time that the hub may take
VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """How patient a connection is, and how much it keeps."""

    keeper: KeeperConfig = field(default_factory=KeeperConfig)
    """When a link is given up, and how the next one is found."""

    stores: Literal["direct", "guard"] = "direct"
    """Who answers reads and writes of stores: JetStream itself, or the guard, which passes the question on."""

    reply_timeout_seconds: float = 5.0
    """How long the hub itself may take to answer: to read or write a store, to take note of a subscription."""

    backlog_messages: int = BACKLOG_MESSAGES
    """How many messages may wait for one slow handler."""

    backlog_bytes: int = BACKLOG_BYTES
    """How many bytes they may have."""

    def __post_init__(self) -> None:
        for name in ("reply_timeout_seconds", "backlog_messages", "backlog_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be more than 0, not {getattr(self, name)}")


class NatsConnection:
    """A HubConnection on NATS. Made by `connect`."""

    def __init__(
        self,
        address: HubAddress,
        credentials: Credentials,
        subjects: Subjects,
        config: ConnectionConfig,
        *,
        on_connected: Callable[[], None] | None = None,
        on_disconnected: Callable[[], None] | None = None,
        on_refused: Callable[[AccessError], None] | None = None,
        why_refused: Callable[[], Awaitable[AccessError | None]] | None = None,
    ) -> None:
        self.peer = credentials.peer
        self.subjects = subjects
        self.config = config
        self.closed_error: AccessError | None = None
        """Why the hub does not let us back in, once that is certain; the connection is over then."""
        self._credentials = credentials
        self._ssl_context = address.ssl_context()
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected
        self._on_refused = on_refused
        self._why_refused = why_refused
        self._keeper = LinkKeeper(address.servers, self._open_link, self, config.keeper)
        self._requests = PendingRequests(credentials.inbox_prefix)
        self._answers_on: NatsLink | None = None
        self._interests = Interests(
            self.publish, backlog_messages=config.backlog_messages, backlog_bytes=config.backlog_bytes
        )
        self._watches: dict[NatsWatch, None] = {}
        self._stores: dict[str, NatsStore] = {}
        self._closing = asyncio.Lock()
        self._closed = False
        self.dispatched = self._interests.counts
        self._counts = {
            "published": 0,
            "published_bytes": 0,
            "requests": 0,
            "permission_violations": 0,
            "hub_errors": 0,
            "callback_errors": 0,
        }

    @classmethod
    async def connect(
        cls,
        address: HubAddress,
        *,
        seed: bytes,
        run: str,
        name: str,
        token: str = "",
        connect_timeout_seconds: float | None = None,
        config: ConnectionConfig | None = None,
        on_connected: Callable[[], None] | None = None,
        on_disconnected: Callable[[], None] | None = None,
        on_refused: Callable[[AccessError], None] | None = None,
        why_refused: Callable[[], Awaitable[AccessError | None]] | None = None,
    ) -> NatsConnection:
        """Connect in the name of the nkey `seed`; `name` is the lane that the guard reads.

        Servers are tried in the order of the address. Raises NotAdmittedError, CertificateError or HubUnavailableError.
        `on_connected` is called whenever the connection is back (not for this first time), with the subscriptions in
        place; `on_disconnected` whenever it is lost; `on_refused` once, when the hub does not let us back in. Before
        that, `why_refused` may find the reason elsewhere, or answer None when it is worth to go on trying.
        """
        config = config or ConnectionConfig()
        if connect_timeout_seconds is not None:
            config = replace(config, keeper=replace(config.keeper, connect_timeout_seconds=connect_timeout_seconds))
        connection = cls(
            address,
            Credentials.of_seed(seed, name=name, token=token),
            Subjects(run),
            config,
            on_connected=on_connected,
            on_disconnected=on_disconnected,
            on_refused=on_refused,
            why_refused=why_refused,
        )
        await connection._keeper.start()
        return connection

    @property
    def is_connected(self) -> bool:
        """Whether the hub can be reached right now."""
        link = self._keeper.link
        return link is not None and not link.ended.done()

    @property
    def server(self) -> str:
        """The server we are connected to; empty while there is none."""
        return self._keeper.link.server if self._keeper.link is not None else ""

    @property
    def discovered_servers(self) -> list[str]:
        """Other servers of the same cluster, as the one that we are connected to tells; none while there is none."""
        return self._keeper.link.discovered_servers if self._keeper.link is not None else []

    @property
    def max_payload_bytes(self) -> int:
        """The largest message that the hub takes."""
        return self._usable_link().max_payload_bytes

    async def publish(self, subject: str, payload: bytes) -> None:
        """Send to all subscribers; waits while too much is on its way. While disconnected: HubUnavailableError.

        Whether we may publish there is not known at once: a violation shows up in `statistics`.
        """
        await self._usable_link().publish(subject, payload)
        self._counts["published"] += 1
        self._counts["published_bytes"] += len(payload)

    async def forward(self, subject: str, payload: bytes, *, reply: str) -> None:
        """Send a request whose answer goes to somebody else. The caller has checked where `reply` leads."""
        await self._usable_link().publish(subject, payload, reply=reply)

    async def request(self, subject: str, payload: bytes, *, timeout_seconds: float) -> bytes:
        """Send and wait for one answer; the errors are those of HubConnection."""
        answers = await self.request_messages(subject, payload, timeout_seconds=timeout_seconds)
        return answers[0].data

    async def request_messages(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_seconds: float,
        headers: Mapping[str, str] | None = None,
        is_last: Callable[[Msg], bool] = lambda _: True,
    ) -> list[Msg]:
        """Send and wait for all the answers up to the one that `is_last`. For stores: ours have no headers."""
        link = self._usable_link()
        self._counts["requests"] += 1
        await self._hear_answers(link)
        try:
            with self._requests.open(subject, is_last) as request:
                async with asyncio.timeout(timeout_seconds) as deadline:
                    await link.publish(subject, payload, reply=request.reply, headers=headers)
                    return await request.answers
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceededError(f"no answer on {subject} within {timeout_seconds:g} s") from None

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> NatsHubSubscription:
        """Call `handler` for each message, in order; see HubConnection.

        Returns when the hub knows of it, so that nothing published after that is missed; PermissionDeniedError when
        this member may not listen there. While disconnected it takes effect on the next connection.
        """
        if self._closed or self.closed_error is not None:
            raise self._unusable()
        return await self._interests.add(subject, handler, queue, self._keeper.link, self.config.reply_timeout_seconds)

    def store(self, name: str) -> NatsStore:
        """The run's store of that name."""
        if name not in self._stores:
            self._stores[name] = NatsStore(self, name)
        return self._stores[name]

    def read_subject(self, store: str) -> str:
        """Where to ask for entries of a store."""
        if self.config.stores == "guard":
            return self.subjects.read(self.peer, store)
        return f"$JS.API.DIRECT.GET.{self.subjects.stream(store)}"

    def write_subject(self, store: str, key: str) -> str:
        """Where to ask for a write."""
        if self.config.stores == "guard":
            return self.subjects.write(self.peer, store, key)
        return self.subjects.store_write(store, key)

    @property
    def write_timeout_seconds(self) -> float:
        """How long to wait for a write: less where a guard passes it on, which may die with its machine meanwhile.

        A writer tries again anyway, and another guard answers then.
        """
        return self.config.reply_timeout_seconds * (THROUGH_GUARD if self.config.stores == "guard" else 1)

    def adopt(self, watch: NatsWatch) -> None:
        """Keep a watch up to date over reconnects, and end it with the connection."""
        self._watches[watch] = None

    def release(self, watch: NatsWatch) -> None:
        """A watch has ended."""
        self._watches.pop(watch, None)

    def statistics(self) -> Mapping[str, int | float]:
        """Counters since the connection was made, and how things stand now."""
        return {
            **self._counts,
            "handled": self.dispatched.handled,
            "handler_errors": self.dispatched.handler_errors,
            "dropped": self.dispatched.dropped,
            "reconnects": self._keeper.num_restored,
            "failed_connects": self._keeper.num_failed_attempts,
            "refusals": self._keeper.num_refusals,
            "round_trip_seconds": self._keeper.round_trip_seconds,
            "connected": int(self.is_connected),
            "pending_requests": len(self._requests),
            "subscriptions": len(self._interests),
            "watches": len(self._watches),
        }

    async def close(self) -> None:
        """Flush, then disconnect; leaves no task and no socket. Idempotent."""
        async with self._closing:
            self._closed = True
            for watch in list(self._watches):
                await watch.cancel()
            await self._keeper.close()
            await self._interests.cancel_all()
            self._requests.fail_all("the connection was closed")

    # What the keeper tells us

    async def link_opened(self, link: NatsLink) -> None:
        """Set the subscriptions up on a new link."""
        await self._interests.tell_all(link, self.config.keeper.connect_timeout_seconds)

    def link_lost(self, reason: str) -> None:
        """Requests under way get no answer any more."""
        self._requests.fail_all(f"the connection to the hub was lost ({reason})")
        self._notify(self._on_disconnected)

    def link_restored(self) -> None:
        """Catch up."""
        for watch in self._watches:
            watch.resync()
        self._notify(self._on_connected)

    async def is_refusal_final(self, error: NotAdmittedError) -> AccessError | None:
        """Why it is over, as the guard says; None: go on trying."""
        if self._why_refused is None:
            return error
        try:
            return await self._why_refused()
        except Exception:  # somebody else's code; the connection must go on
            self._counts["callback_errors"] += 1
            logger.exception("the reason of a refusal could not be found out")
            return None

    def link_refused(self, error: AccessError) -> None:
        """It is over."""
        self.closed_error = error
        if self._on_refused is not None:
            on_refused = self._on_refused
            self._notify(lambda: on_refused(error))

    # Inside

    def _usable_link(self) -> NatsLink:
        link = self._keeper.link
        if link is None or self._closed:
            raise self._unusable()
        return link

    def _unusable(self) -> AccessError | HubUnavailableError:
        if self.closed_error is not None:
            return type(self.closed_error)(str(self.closed_error))
        if self._closed:
            return HubUnavailableError("this connection to the hub was closed")
        return HubUnavailableError("the hub is away just now; the connection comes back by itself when it can")

    async def _open_link(self, server: str, timeout_seconds: float) -> NatsLink:
        return await NatsLink.open(
            server,
            self._credentials,
            ssl_context=self._ssl_context,
            timeout_seconds=timeout_seconds,
            on_error=self._complained,
        )

    async def _hear_answers(self, link: NatsLink) -> None:
        # Only once there is a request: a connection that never makes one may have no right to listen for answers.
        if self._answers_on is not link:
            self._answers_on = link
            await link.subscribe(self._requests.subject, "", self._answered, limit_bytes=self.config.backlog_bytes)

    async def _answered(self, message: Msg) -> None:
        self._requests.resolve(message)

    def _complained(self, error: Exception) -> None:
        """Sort out what nats-py reports: mostly the hub's complaints, which it gives in lower case."""
        violation = VIOLATION.search(str(error))
        if violation is not None:
            self._counts["permission_violations"] += 1
            self._denied(*violation.groups())
        elif isinstance(error, nats.errors.SlowConsumerError):
            self.dispatched.dropped += 1
            for watch in self._watches:
                watch.resync()
        elif not isinstance(error, (OSError, nats.errors.StaleConnectionError)):  # those are losses, told elsewhere
            self._counts["hub_errors"] += 1
            logger.warning("the hub complains: %s", error)

    def _denied(self, what: str, folded_subject: str) -> None:
        if what == "publish" and self._requests.deny(folded_subject):
            return
        if what == "subscription":
            self._interests.deny(folded_subject)
        logger.warning("the hub does not permit this member a %s: %s", what, folded_subject)

    def _notify(self, callback: Callable[[], None] | None) -> None:
        if callback is None:
            return
        try:
            callback()
        except Exception:  # somebody else's code; the connection must go on
            self._counts["callback_errors"] += 1
            logger.exception("a callback of the hub connection failed")
