"""The hub's system account: who connects and disconnects, who is connected and publishes how much, and cutting it off.

All servers of a cluster share the system account: events come from each of them, and each can be asked by its id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeVar

import msgspec

from potluck.clock import Clock
from potluck.errors import PotluckError, ProtocolError, RetryableError
from potluck.hub.connection import Delivery, HubConnection, Subscription
from potluck.hub.guard.connections import Connection, Lane, read_user_name
from potluck.hub.guard.floodcore import Traffic
from potluck.hub.guard.presencecore import ConnectionId
from potluck.hub.queues import FLEET_ACCOUNT

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0
PAGE_LENGTH = 1000
MAX_PAGES = 100
MAX_SERVERS = 1024
MAX_EVENT_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 8 * 1024 * 1024
COUNTED_LANES: tuple[Lane, ...] = ("main", "queue")


class _Server(msgspec.Struct):
    id: str
    name: str = ""


class _Client(msgspec.Struct):
    id: int
    user: str = ""
    host: str = ""
    start: str = ""
    stop: str = ""


class _Count(msgspec.Struct):
    msgs: int = 0
    bytes: int = 0


class _Event(msgspec.Struct):
    server: _Server
    client: _Client
    reason: str = ""
    sent: _Count = msgspec.field(default_factory=_Count)


class _Listed(msgspec.Struct):
    cid: int
    authorized_user: str = ""
    ip: str = ""
    port: int = 0
    start: str = ""
    in_msgs: int = 0
    in_bytes: int = 0


class _List(msgspec.Struct):
    now: str = ""
    connections: list[_Listed] = []
    total: int = 0


class _ListAnswer(msgspec.Struct):
    server: _Server
    data: _List | None = None


class _Route(msgspec.Struct):
    remote_id: str = ""


class _Routes(msgspec.Struct):
    routes: list[_Route] = []


class _RoutesAnswer(msgspec.Struct):
    server: _Server
    data: _Routes | None = None


J = TypeVar("J")


class HubSystem:
    """One connection in the system account."""

    def __init__(self, connection: HubConnection, account: str, clock: Clock) -> None:
        self._connection = connection
        self._accounts = (account, FLEET_ACCOUNT)
        self._clock = clock
        self._subscriptions: list[Subscription] = []
        self._names: dict[str, str] = {}  # of servers, by id
        self.num_invalid = 0

    def name_of(self, server: str) -> str:
        """The name of the server with that id, as streams know it; empty while it is not known."""
        return self._names.get(server, "")

    async def follow(
        self,
        opened: Callable[[Connection], None],
        closed: Callable[[ConnectionId, str], None],
        counted: Callable[[Traffic], None],
    ) -> None:
        """Call `opened` and `closed` (with the server's reason) as peers connect and disconnect.

        `counted` is told what a connection had published when it closed, on a lane whose traffic is limited.
        """

        def connect_event(delivery: Delivery) -> None:
            event = self._read(_Event, delivery.payload, MAX_EVENT_BYTES)
            if event is not None and (connection := self._connection_of(event)) is not None:
                opened(connection)

        def disconnect_event(delivery: Delivery) -> None:
            event = self._read(_Event, delivery.payload, MAX_EVENT_BYTES)
            if event is None or (connection := self._connection_of(event)) is None:
                return
            closed(connection.id, event.reason)
            if connection.lane in COUNTED_LANES:
                open_seconds = _seconds(event.client.stop) - connection.opened_at
                counted(_traffic(connection, event.sent.msgs, event.sent.bytes, open_seconds))

        for account in self._accounts:
            prefix = f"$SYS.ACCOUNT.{account}"
            self._subscriptions += [
                await self._connection.subscribe(f"{prefix}.CONNECT", connect_event),
                await self._connection.subscribe(f"{prefix}.DISCONNECT", disconnect_event),
            ]

    async def list_connections(self) -> tuple[list[Connection], set[str]]:
        """All connections of peers, and which servers answered. RetryableError when none did."""
        lists = await self._lists(self._accounts)
        return [connection for listed in lists.values() for connection, _ in listed], set(lists)

    async def list_traffic(self, lane: Lane) -> list[Traffic]:
        """What all connections of a lane have published, as far as servers answer. RetryableError when none did."""
        lists = await self._lists((FLEET_ACCOUNT,) if lane == "queue" else self._accounts[:1])
        return [traffic for listed in lists.values() for connection, traffic in listed if connection.lane == lane]

    async def kick(self, connection_id: ConnectionId) -> bool:
        """Cut a connection; False when the server did not say that it did."""
        subject = f"$SYS.REQ.SERVER.{connection_id.server}.KICK"
        payload = msgspec.json.encode({"cid": connection_id.number})
        try:
            await self._connection.request(subject, payload, timeout_seconds=TIMEOUT_SECONDS)
        except RetryableError as error:
            logger.warning("connection %d could not be cut: %s", connection_id.number, error)
            return False
        return True

    async def close(self) -> None:
        """Follow no more. Idempotent."""
        for subscription in self._subscriptions:
            await subscription.cancel()
        self._subscriptions = []

    async def _servers(self) -> list[str]:
        """The ids of all servers: the first that answers, and those that it has routes to."""
        data = await self._connection.request("$SYS.REQ.SERVER.PING.ROUTEZ", b"", timeout_seconds=TIMEOUT_SECONDS)
        answer = self._read(_RoutesAnswer, data, MAX_ANSWER_BYTES)
        if answer is None:
            raise RetryableError("the hub's answer about its servers cannot be read: try again")
        routes = answer.data.routes if answer.data is not None else []
        return list(dict.fromkeys([answer.server.id, *(route.remote_id for route in routes if route.remote_id)]))

    async def _lists(self, accounts: Sequence[str]) -> dict[str, list[tuple[Connection, Traffic]]]:
        """The connections of peers in some accounts, by the servers that answered."""
        servers = await self._servers()
        lists = await asyncio.gather(*(self._list(server, accounts) for server in servers), return_exceptions=True)
        answered: dict[str, list[tuple[Connection, Traffic]]] = {}
        for server, listed in zip(servers, lists, strict=True):
            if isinstance(listed, PotluckError):
                logger.debug("server %s did not list its connections: %s", server, listed)
            elif isinstance(listed, BaseException):
                raise listed
            else:
                answered[server] = listed
        return answered

    async def _list(self, server: str, accounts: Sequence[str]) -> list[tuple[Connection, Traffic]]:
        return [each for account in accounts for each in await self._list_account(server, account)]

    async def _list_account(self, server: str, account: str) -> list[tuple[Connection, Traffic]]:
        """The connections of one server in one account, page by page."""
        found: list[tuple[Connection, Traffic]] = []
        for page in range(MAX_PAGES):
            options = {"auth": True, "acc": account, "limit": PAGE_LENGTH, "offset": page * PAGE_LENGTH}
            data = await self._connection.request(
                f"$SYS.REQ.SERVER.{server}.CONNZ", msgspec.json.encode(options), timeout_seconds=TIMEOUT_SECONDS
            )
            answer = self._read(_ListAnswer, data, MAX_ANSWER_BYTES)
            if answer is None or answer.data is None:
                raise ProtocolError(f"server {server} sent a list of connections that cannot be read")
            self._learn_name(answer.server)
            for each in answer.data.connections:
                connection = self._make(server, each.cid, each.authorized_user, each.ip, each.start, port=each.port)
                if connection is not None:
                    open_seconds = _seconds(answer.data.now) - connection.opened_at
                    found.append((connection, _traffic(connection, each.in_msgs, each.in_bytes, open_seconds)))
            if (page + 1) * PAGE_LENGTH >= answer.data.total:
                break
        return found

    def _connection_of(self, event: _Event) -> Connection | None:
        client = event.client
        self._learn_name(event.server)
        return self._make(event.server.id, client.id, client.user, client.host, client.start)

    def _learn_name(self, server: _Server) -> None:
        if server.name:
            self._names[server.id] = server.name
        while len(self._names) > MAX_SERVERS:  # each start of a server has an id of its own
            del self._names[next(iter(self._names))]

    def _make(self, server: str, number: int, user: str, host: str, start: str, *, port: int = 0) -> Connection | None:
        """A connection of a peer; None for those of the guard itself."""
        named = read_user_name(user)
        if named is None:
            return None
        peer, lane, session = named
        return Connection(
            id=ConnectionId(server, number),
            peer=peer,
            lane=lane,
            session=session,
            host=host,
            port=port,
            opened_at=_seconds(start),
            seen_at=self._clock.monotonic(),
        )

    def _read(self, kind: type[J], data: bytes, limit_bytes: int) -> J | None:
        if len(data) <= limit_bytes:
            try:
                return msgspec.json.decode(data, type=kind)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                logger.warning("the hub told something that cannot be read: %s", error)
        self.num_invalid += 1
        return None


def _traffic(connection: Connection, num_messages: int, num_bytes: int, open_seconds: float) -> Traffic:
    return Traffic(
        id=connection.id,
        lane=connection.lane,
        peer=connection.peer,
        num_messages=num_messages,
        num_bytes=num_bytes,
        open_seconds=open_seconds,
    )


def _seconds(text: str) -> float:
    """A server's time stamp as seconds since 1970; 0 for what is not one."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
