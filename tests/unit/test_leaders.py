"""Where the leaders of the stores go, with a JetStream that only says who leads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from potluck.errors import NobodyAnswersError
from potluck.hub.connection import Delivery
from potluck.hub.guard.connections import Connection, Connections, user_name
from potluck.hub.guard.hubsystem import HubSystem
from potluck.hub.guard.leaders import LeaderKeeper
from potluck.hub.leaserecord import KEY, LeaseRecord
from potluck.hub.stores import STORES
from potluck.hub.subjects import Subjects
from potluck.messages import encode
from potluck.sim.memoryhub import MemoryHub
from potluck.sim.virtualclock import VirtualClock
from potluck.testing.polling import poll_until

SUBJECTS = Subjects("bakery")
ANN, BOB = "U" + "A" * 55, "U" + "B" * 55
SERVERS = ("hub-0", "hub-1", "hub-2")


class Cluster:
    """Three servers: who leads which store, and who is connected where."""

    def __init__(self) -> None:
        self.hub = MemoryHub("bakery")
        self.leaders = {store.name: SERVERS[number % 3] for number, store in enumerate(STORES)}
        self.lagging: set[str] = set()
        self.silent: set[str] = set()
        self.moves: list[tuple[str, str]] = []
        self.connections = Connections()
        self.guard = self.hub.connect("GUARD")
        self.system = HubSystem(self.guard, "RUN", VirtualClock())
        self.keeper = LeaderKeeper(self.guard, self.system, self.connections, SUBJECTS)

    async def open(self) -> None:
        jetstream = self.hub.connect("JETSTREAM")
        await jetstream.subscribe("$JS.API.STREAM.INFO.*", self._info)
        await jetstream.subscribe("$JS.API.STREAM.LEADER.STEPDOWN.*", self._step_down)
        await self.system.follow(self._opened, lambda _connection, _reason: None, lambda _traffic: None)
        await self.keeper.start()

    async def come(self, peer: str, server: str, number: int) -> None:
        """The hub tells of a new connection."""
        user, start = user_name(peer, "main", "s"), f"2026-01-01T00:00:{number:02d}Z"
        client = {"id": number, "user": user, "host": "192.0.2.1", "start": start}
        event = {"server": {"id": f"id of {server}", "name": server}, "client": client}
        number_before = len(self.connections.of_peer(peer))
        await self.hub.connect("SERVER").publish("$SYS.ACCOUNT.RUN.CONNECT", msgspec.json.encode(event))
        await poll_until(lambda: len(self.connections.of_peer(peer)) > number_before, 10, "the guard to hear of it")

    async def coordinate(self, peer: str) -> None:
        await self.hub.connect(peer).store("lease").put(KEY, encode(LeaseRecord(holder=peer)))
        await poll_until(lambda: self.keeper._holder == peer, 10, "the guard to know the coordinator")

    def _opened(self, connection: Connection) -> None:
        self.connections.opened(connection)
        self.keeper.opened(connection.peer)

    async def _info(self, delivery: Delivery) -> None:
        leader = self.leaders[delivery.subject.rpartition("_")[2]]
        others = [
            {"name": s, "current": s not in self.lagging, "active": 10**9 * (9 if s in self.silent else 1)}
            for s in SERVERS
            if s != leader
        ]
        await delivery.respond(msgspec.json.encode({"cluster": {"leader": leader, "replicas": others}}))

    async def _step_down(self, delivery: Delivery) -> None:
        store = delivery.subject.rpartition("_")[2]
        self.leaders[store] = msgspec.json.decode(delivery.payload)["placement"]["preferred"]
        self.moves.append((store, self.leaders[store]))
        await delivery.respond(b'{"success":true}')


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    opened = Cluster()
    await opened.open()
    try:
        yield opened
    finally:
        await opened.keeper.stop()


async def test_all_stores_are_led_by_one_server_that_is_not_the_coordinators() -> None:
    async with cluster() as three:
        home = three.leaders["lease"]
        await three.keeper.gather()
        assert set(three.leaders.values()) == {home}  # nobody coordinates yet
        await three.come(ANN, home, 1)
        await three.come(BOB, "hub-2" if home != "hub-2" else "hub-1", 2)
        await three.coordinate(ANN)
        await three.keeper.gather()
        assert set(three.leaders.values()) == {three.leaders["lease"]} != {home}
        num_moves = len(three.moves)
        await three.keeper.gather()
        assert len(three.moves) == num_moves == three.keeper.num_moved


async def test_it_follows_a_coordinator_that_comes_from_elsewhere() -> None:
    async with cluster() as three:
        await three.come(ANN, "hub-0", 1)
        await three.coordinate(ANN)
        for number, server in enumerate((*SERVERS, *SERVERS)):
            await three.come(ANN, server, number + 2)
            await three.keeper.gather()
            assert server not in three.leaders.values()


async def test_a_server_that_may_have_died_is_not_made_to_lead() -> None:
    async with cluster() as three:
        three.leaders = dict.fromkeys(three.leaders, "hub-1")
        await three.come(ANN, "hub-1", 1)
        await three.coordinate(ANN)
        three.silent = {"hub-0"}
        await three.keeper.gather()
        assert set(three.leaders.values()) == {"hub-2"}


async def test_a_server_that_lags_behind_is_not_made_to_lead() -> None:
    async with cluster() as three:
        three.leaders = dict.fromkeys(three.leaders, "hub-1")
        await three.come(ANN, "hub-1", 1)
        await three.coordinate(ANN)
        three.lagging = {"hub-0"}
        await three.keeper.gather()
        assert set(three.leaders.values()) == {"hub-2"}
        three.lagging = {"hub-0", "hub-1"}
        await three.come(ANN, "hub-2", 2)
        await three.keeper.gather()
        assert set(three.leaders.values()) == {"hub-2"}  # nobody else can


async def test_a_hub_that_does_not_answer_is_an_error_to_try_again_after() -> None:
    hub = MemoryHub("bakery")
    guard = hub.connect("GUARD")
    keeper = LeaderKeeper(guard, HubSystem(guard, "RUN", VirtualClock()), Connections(), SUBJECTS)
    with pytest.raises(NobodyAnswersError):
        await keeper.gather()
