"""What the servers of a cluster say of their connections, as the guard reads it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from potluck.errors import DeadlineExceededError, RetryableError
from potluck.hub.connection import Delivery
from potluck.hub.guard.connections import Connection, user_name
from potluck.hub.guard.floodcore import Traffic
from potluck.hub.guard.hubsystem import PAGE_LENGTH, HubSystem
from potluck.hub.guard.presencecore import ConnectionId
from potluck.hub.keys import new_seed, public_key
from potluck.sim.virtualclock import VirtualClock

ANN = public_key(new_seed("user"))
OPENED, NOW = "2026-01-01T10:00:00.123456789Z", "2026-01-01T10:00:05.123456789Z"


def listed(number: int, lane: str = "main", **counts: int) -> dict[str, Any]:
    name = user_name(ANN, lane, "s1")  # type: ignore[arg-type]
    return {"cid": number, "authorized_user": name, "ip": "192.0.2.1", "start": OPENED, **counts}


class Cluster:
    """A system connection to servers whose lists the test writes; None: that server does not answer."""

    def __init__(self, **lists: list[dict[str, Any]] | None) -> None:
        self.lists = lists
        self.handlers: dict[str, Any] = {}

    async def request(self, subject: str, payload: bytes, *, timeout_seconds: float) -> bytes:
        first, *others = self.lists
        if subject == "$SYS.REQ.SERVER.PING.ROUTEZ":
            routes = [{"remote_id": server} for server in others for _ in range(2)]  # several routes to each
            return msgspec.json.encode({"server": {"id": first}, "data": {"routes": routes}})
        server = subject.split(".")[3]
        connections = self.lists[server]
        if connections is None:
            raise DeadlineExceededError("no answer")
        options = msgspec.json.decode(payload)
        if options["acc"] != "RUN":
            connections = []  # no queues in these tests
        page = connections[options["offset"] :][: options["limit"]]
        data = {"now": NOW, "connections": page, "total": len(connections)}
        return msgspec.json.encode({"server": {"id": server, "name": f"hub-{server}"}, "data": data})

    async def subscribe(self, subject: str, handler: Any) -> None:
        self.handlers[subject.rpartition(".")[2]] = handler


def system(cluster: Cluster) -> HubSystem:
    return HubSystem(cluster, "RUN", VirtualClock())  # type: ignore[arg-type]


async def test_traffic_is_that_of_main_connections_on_all_servers_that_answer() -> None:
    cluster = Cluster(
        one=[listed(1, in_msgs=7, in_bytes=700), listed(2, "bulk", in_msgs=9, in_bytes=9000)],
        two=None,
        three=[listed(1, in_msgs=1, in_bytes=10), {"cid": 5, "authorized_user": "guard"}],
    )
    found = await system(cluster).list_traffic("main")
    assert found == [
        Traffic(id=ConnectionId("one", 1), peer=ANN, num_messages=7, num_bytes=700, open_seconds=5.0),
        Traffic(id=ConnectionId("three", 1), peer=ANN, num_messages=1, num_bytes=10, open_seconds=5.0),
    ]
    connections, answered = await system(cluster).list_connections()
    assert [(each.id.server, each.id.number, each.lane) for each in connections] == [
        ("one", 1, "main"),
        ("one", 2, "bulk"),
        ("three", 1, "main"),
    ]
    assert answered == {"one", "three"}


async def test_long_lists_are_read_page_by_page() -> None:
    cluster = Cluster(one=[listed(number, in_msgs=number) for number in range(2 * PAGE_LENGTH + 1)])
    found = await system(cluster).list_traffic("main")
    assert [each.num_messages for each in found] == list(range(2 * PAGE_LENGTH + 1))


async def test_without_any_server_it_is_worth_to_try_again() -> None:
    class Away(Cluster):
        async def request(self, subject: str, payload: bytes, *, timeout_seconds: float) -> bytes:
            raise DeadlineExceededError("no answer")

    with pytest.raises(RetryableError):
        await system(Away()).list_traffic("main")


async def test_a_closing_tells_what_a_main_connection_had_published() -> None:
    cluster = Cluster(one=[])
    closed: list[tuple[ConnectionId, str]] = []
    counted: list[Traffic] = []
    opened: list[Connection] = []
    await system(cluster).follow(opened.append, lambda *closing: closed.append(closing), counted.append)

    def close(number: int, lane: str) -> None:
        event = {
            "server": {"id": "one"},
            "client": {
                "id": number,
                "user": user_name(ANN, lane, "s1") if lane else "guard",  # type: ignore[arg-type]
                "start": OPENED,
                "stop": NOW,
            },
            "sent": {"msgs": 100, "bytes": 5000},  # by the client, though it is the server that speaks
            "received": {"msgs": 3, "bytes": 30},
            "reason": "Client Closed",
        }
        cluster.handlers["DISCONNECT"](_Event(msgspec.json.encode(event)))

    close(1, "main")
    close(2, "bulk")
    close(3, "")
    assert closed == [(ConnectionId("one", 1), "Client Closed"), (ConnectionId("one", 2), "Client Closed")]
    assert counted == [Traffic(id=ConnectionId("one", 1), peer=ANN, num_messages=100, num_bytes=5000, open_seconds=5.0)]
    assert opened == []


class _Event(Delivery):
    """A message from the hub."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    @property
    def payload(self) -> bytes:
        return self._payload
