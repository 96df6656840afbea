"""The bulk wire: a connection to the hub of its own for link packets.

Beacons, plans and commits go over the main connection (connection.py), and never queue behind megabytes. This one
carries packets that find no direct way, as fast as the hub can: protocol.py reads and writes the NATS protocol
without copying, connection.py runs it over TCP, TLS or WebSocket, and this module keeps one connection open:

    idle ──open──► connecting ──► connected ──lost──► connecting …          closed: the end
                       ▲  │ refused
                       │  ▼
                     refused: tried again, but seldom

It gives up for nobody but `close`: a hub comes back, and a peer that is refused may be approved later.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from potluck import tasks
from potluck.errors import ConfigurationError, HubUnavailableError, NotAdmittedError, PotluckError, ProtocolError
from potluck.hub.address import HubAddress
from potluck.hub.bulk.connection import BulkConnection, BulkLimits, BulkLogin
from potluck.hub.bulk.protocol import Buffer
from potluck.hub.keys import Signer
from potluck.hub.nats.link import explain
from potluck.hub.nats.linkkeeper import HELD_UP_SECONDS
from potluck.hub.nats.reconnect import Backoff, ServerPool

logger = logging.getLogger(__name__)

WireState = Literal["idle", "connecting", "connected", "refused", "closed"]
LASTING_SECONDS = 5.0  # a connection that lived so long was a good one: the next wait starts small again
ALWAYS_COUNTED = (
    *("connects", "losses", "failed_attempts", "refusals", "protocol_errors", "complaints", "oversized"),
    *("errors", "messages_sent", "bytes_sent", "messages_received", "bytes_received", "congested"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkWireConfig:
    """How patient the wire is, and how much it holds."""

    limits: BulkLimits = field(default_factory=BulkLimits)
    """What one connection may hold."""

    connect_timeout_seconds: float = 10.0
    """How long one attempt at one server may take, the guard's decision included."""

    ping_after_seconds: float = 5.0
    """A hub that has been silent for so long is asked whether it lives."""

    silent_seconds: float = 15.0
    """A connection on which nothing arrives for so long is given up."""

    backoff_first_seconds: float = 0.1
    """The wait before the first attempt after a loss; it doubles with each pass over the servers."""

    backoff_limit_seconds: float = 10.0
    """The longest wait between passes."""

    refused_first_seconds: float = 1.0
    """The wait after the first refusal: a hub that restarts refuses everybody until its guard is there."""

    refused_limit_seconds: float = 30.0
    """The longest wait between attempts while the hub refuses us."""

    def __post_init__(self) -> None:
        for name in ("connect_timeout_seconds", "ping_after_seconds", "backoff_first_seconds", "refused_first_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: it must be more than 0")
        for larger, smaller in (
            ("silent_seconds", "ping_after_seconds"),
            ("backoff_limit_seconds", "backoff_first_seconds"),
            ("refused_limit_seconds", "refused_first_seconds"),
        ):
            if getattr(self, larger) < getattr(self, smaller):
                raise ConfigurationError(f"{larger} is {getattr(self, larger)}: it must be at least {smaller}")


class WireEvents(Protocol):
    """What the wire tells its owner, always on the event loop."""

    def wire_connected(self) -> None:
        """Messages can be published, and those for us arrive from now on."""
        ...

    def wire_lost(self, reason: str) -> None:
        """The connection is gone, with what was in flight; another is being opened."""
        ...

    def wire_writable(self) -> None:
        """Publishing works again after it was refused as congested."""
        ...

    def message_arrived(self, subject: str, payload: memoryview) -> None:
        """One message; its bytes are hostile until decoded. The view stays valid."""
        ...

    def message_skipped(self, subject: str, num_bytes: int) -> None:
        """A message that was larger than any of ours, and was read past."""
        ...


class BulkWire:
    """Keeps one bulk connection to the hub open. Lives on one event loop; `open` starts it."""

    def __init__(
        self, address: HubAddress, *, seed: bytes, token: str = "", config: BulkWireConfig | None = None
    ) -> None:
        """Connect in the name of the nkey `seed`, but not before `open`."""
        self.config = config or BulkWireConfig()
        self.state: WireState = "idle"
        self._ssl_context = address.ssl_context()
        self._signer = Signer(seed)
        self._token = token
        self._pool = ServerPool(address.servers)
        self._events: WireEvents | None = None
        self._subjects: tuple[str, ...] = ()
        self._connection: BulkConnection | None = None
        self._counts: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        """Whether messages can be published now."""
        return self._connection is not None

    @property
    def max_payload_bytes(self) -> int:
        """The largest message that the hub takes; 0 while there is no connection."""
        return self._connection.max_payload_bytes if self._connection is not None else 0

    def open(self, subjects: Collection[str], events: WireEvents) -> None:
        """Begin to connect, and listen to these subjects from then on. Opening it twice is a mistake."""
        if self.state != "idle":
            raise RuntimeError(f"this wire cannot be opened: it is {self.state}")
        self._events = events
        self._subjects = tuple(subjects)
        self.state = "connecting"
        login = BulkLogin(signer=self._signer, token=self._token)
        self._task = asyncio.create_task(self._run(login, events), name="bulk wire")

    def listen(self, subjects: Collection[str]) -> None:
        """Listen to these subjects instead, on this connection and on those that follow it."""
        self._subjects = tuple(subjects)
        if self._connection is not None:
            self._connection.listen(self._subjects)

    def is_writable(self) -> bool:
        """Whether `publish` would take a message now."""
        if self._connection is not None and self._connection.is_congested:
            self._counts["congested"] += 1
            return False
        return self._connection is not None

    def publish(self, subject: str, parts: Sequence[Buffer], *, urgent: bool = False) -> bool:
        """Hand over one message, whose payload is the parts one after another; the last may be large.

        It is not copied: leave it unchanged until its receiver has it. False: not connected, or congested, after which
        `wire_connected` or `wire_writable` follow. What is `urgent`, and small, is never congested.
        """
        connection = self._connection
        if connection is None:
            return False
        if connection.is_congested and not urgent:
            self._counts["congested"] += 1
            return False
        size = sum(map(len, parts))
        if size > connection.max_payload_bytes:
            raise ConfigurationError(
                f"a message of {size} bytes exceeds the hub's limit of {connection.max_payload_bytes}: send it in "
                "smaller pieces, or raise max_payload in the hub's configuration"
            )
        connection.publish(subject, parts)
        self._counts["messages_sent"] += 1
        self._counts["bytes_sent"] += size
        return True

    def statistics(self) -> Mapping[str, int]:
        """Counters: messages and bytes each way, connections made and lost, refusals, what was wrong."""
        counts = Counter(dict.fromkeys(ALWAYS_COUNTED, 0))
        counts.update(self._counts)
        counts["connected"] = int(self.is_connected)
        return counts

    async def close(self) -> None:
        """Send what was written and disconnect; nothing is told any more. Idempotent."""
        self.state = "closed"
        await tasks.end(self._task)
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    # Keeping a connection

    async def _run(self, login: BulkLogin, events: WireEvents) -> None:
        backoff = Backoff(self.config.backoff_first_seconds, self.config.backoff_limit_seconds)
        while True:
            try:
                await self._keep(login, events, backoff)
            except Exception:  # the task ends here: a mistake of our own or of the owner must not end the wire too
                self._counts["errors"] += 1
                logger.exception("the bulk wire failed in an unforeseen way and begins anew")
                connection, self._connection = self._connection, None
                self.state = "connecting"
                if connection is not None:
                    connection.abort("our own error")
                    await connection.close()
                await asyncio.sleep(backoff.next_seconds())

    async def _keep(self, login: BulkLogin, events: WireEvents, backoff: Backoff) -> None:
        order = self._pool.first_order()
        while True:
            connection = await self._connect(login, order, backoff)
            opened_at = connection.heard_at
            self._connection, self.state = connection, "connected"
            self._counts["connects"] += 1
            connection.listen(self._subjects)  # they may have changed while the hub thought about us
            events.wire_connected()
            reason = await self._watch(connection)
            logger.info("the bulk connection to %s is lost: %s", connection.server, reason)
            self._connection, self.state = None, "connecting"
            self._counts["losses"] += 1
            self._counts["protocol_errors"] += connection.broke_protocol
            connection.abort(reason)
            events.wire_lost(reason)
            await connection.close()
            if connection.heard_at - opened_at >= LASTING_SECONDS:
                backoff.reset()
            self._pool.learn(connection.discovered_servers)
            order = self._pool.order_after(connection.server)
            await asyncio.sleep(backoff.next_seconds())

    async def _watch(self, connection: BulkConnection) -> str:
        """Return when the connection has ended or is silent for too long, with the reason."""
        loop = asyncio.get_running_loop()
        config = self.config
        while True:
            heard_at = connection.heard_at
            await asyncio.wait({connection.ended}, timeout=heard_at + config.ping_after_seconds - loop.time())
            if connection.ended.done():
                return connection.ended.result()
            if connection.heard_at > heard_at:
                continue
            connection.ping()
            await asyncio.wait({connection.ended}, timeout=config.silent_seconds - config.ping_after_seconds)
            if connection.heard_at == heard_at and not connection.ended.done():
                connection.abort(f"the hub has been silent for {config.silent_seconds:g} s")

    async def _connect(self, login: BulkLogin, order: Sequence[str], backoff: Backoff) -> BulkConnection:
        refused = Backoff(self.config.refused_first_seconds, self.config.refused_limit_seconds)
        while True:
            for server in order:
                try:
                    connection = await self._open(login, server)
                except NotAdmittedError as error:
                    self._was_refused(error)
                    break  # the other servers ask the same guard
                except (PotluckError, OSError) as error:
                    self._failed(error)
                    logger.info("no bulk connection: %s", explain(server, error))
                except Exception as error:  # an attempt ends here: whatever went wrong, the next one must be made
                    self._failed(error)
                    logger.exception("an attempt to connect to %s failed in an unforeseen way", server)
                else:
                    return connection
            wait = refused if self.state == "refused" else backoff
            await asyncio.sleep(wait.next_seconds())

    async def _open(self, login: BulkLogin, server: str) -> BulkConnection:
        """One attempt; another at once where it is held up, as by a hub whose guard is not there yet."""
        limit_seconds = self.config.connect_timeout_seconds
        began = asyncio.get_running_loop().time()
        try:
            return await self._try(login, server, min(HELD_UP_SECONDS, limit_seconds))
        except HubUnavailableError:
            if asyncio.get_running_loop().time() - began < HELD_UP_SECONDS:
                raise
        return await self._try(login, server, limit_seconds)

    async def _try(self, login: BulkLogin, server: str, timeout_seconds: float) -> BulkConnection:
        return await BulkConnection.open(
            server,
            login,
            self._subjects,
            self,
            ssl_context=self._ssl_context,
            limits=self.config.limits,
            timeout_seconds=timeout_seconds,
        )

    def _was_refused(self, error: NotAdmittedError) -> None:
        self._counts["refusals"] += 1
        if self.state != "refused":
            logger.info("no packets can be relayed yet: %s", error)
        self.state = "refused"

    def _failed(self, error: Exception) -> None:
        self._counts["failed_attempts"] += 1
        self._counts["protocol_errors"] += isinstance(error, ProtocolError)
        self.state = "connecting"

    # What a connection tells (ConnectionEvents)

    def message_arrived(self, subject: str, payload: memoryview) -> None:
        """Something was published for us."""
        self._counts["messages_received"] += 1
        self._counts["bytes_received"] += len(payload)
        if self._connection is not None and self._events is not None:
            self._events.message_arrived(subject, payload)

    def message_skipped(self, subject: str, num_bytes: int) -> None:
        """Something too large was published for us."""
        self._counts["oversized"] += 1
        if self._connection is not None and self._events is not None:
            self._events.message_skipped(subject, num_bytes)

    def writable(self) -> None:
        """Publishing works again."""
        if self._connection is not None and self._events is not None:
            self._events.wire_writable()

    def complained(self, text: str) -> None:
        """The hub refuses something that we did."""
        self._counts["complaints"] += 1
        logger.warning("the hub complains on the bulk connection: %s", text)
