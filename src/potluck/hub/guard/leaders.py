"""Keeps the leaders of all stores on one server of a cluster, and not on the coordinator's.

A store that loses its leader has none for 4 to 9 seconds: nats-server waits that long before it elects another. When a
machine dies on which the coordinator *and* the leader of the lease are, nobody can take the lease before that time is
over. So the guard keeps them apart: then the death of the coordinator's machine leaves the stores alone, and the death
of the leaders' machine leaves the coordinator. Stores that are led from one place are all there or all away, where a
newcomer, who needs several of them, would otherwise have to wait whichever machine dies.
"""

from __future__ import annotations

import asyncio
import logging
import random

import msgspec

from potluck.errors import ProtocolError, RetryableError
from potluck.hub.connection import Entry, HubConnection, Subscription
from potluck.hub.guard.connections import Connections
from potluck.hub.guard.hubsystem import HubSystem
from potluck.hub.leaserecord import KEY, LeaseRecord
from potluck.hub.stores import STORES
from potluck.hub.subjects import Subjects
from potluck.messages import decode

logger = logging.getLogger(__name__)

CHECK_EVERY_SECONDS = 20.0
# A coordinator that has just moved may have done so because its server died, and nobody may know yet that that one
# cannot lead. Each guard waits a different time, and finds it done if another was faster.
SETTLE_SECONDS = (5.0, 8.0)
MAX_SILENT_SECONDS = 3.0  # of a follower that shall lead; its leader hears from it each second
TIMEOUT_SECONDS = 2.0  # while leaders change, a question may go unanswered


class _Replica(msgspec.Struct):
    name: str
    current: bool = False
    offline: bool = False
    active: int = 0  # nanoseconds since its leader heard from it


class _Cluster(msgspec.Struct):
    leader: str = ""
    replicas: list[_Replica] = []

    def followers(self) -> list[str]:
        """Those who could lead at once."""
        return [
            replica.name
            for replica in self.replicas
            if replica.current and not replica.offline and replica.active < MAX_SILENT_SECONDS * 1e9
        ]


class _StreamInfo(msgspec.Struct):
    cluster: _Cluster | None = None


class LeaderKeeper:
    """One guard's part in this; on a hub of one server there is nothing to do."""

    def __init__(self, hub: HubConnection, system: HubSystem, connections: Connections, subjects: Subjects) -> None:
        self._hub = hub
        self._system = system
        self._connections = connections
        self._subjects = subjects
        self._holder = ""
        self._wanted = asyncio.Event()
        self._watch: Subscription | None = None
        self._chance = random.Random()
        self.num_moved = 0

    async def start(self) -> None:
        """Follow who coordinates."""
        self._watch = await self._hub.store("lease").watch(self._lease_changed)

    async def stop(self) -> None:
        """Follow no more. Idempotent."""
        if self._watch is not None:
            await self._watch.cancel()
            self._watch = None

    def opened(self, peer: str) -> None:
        """A peer has a new main connection."""
        if peer == self._holder:
            self._wanted.set()

    async def keep_forever(self) -> None:
        """Look whenever the coordinator may have moved, and now and then."""
        while True:
            try:
                async with asyncio.timeout(CHECK_EVERY_SECONDS):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(self._chance.uniform(*SETTLE_SECONDS))
            self._wanted.clear()
            try:
                await self.gather()
            except RetryableError as error:
                logger.debug("the leaders of the stores cannot be looked at now: %s", error)

    async def gather(self) -> None:
        """Move the leaders to where the lease is led, which is not where the coordinator is."""
        places = self._connections.of_peer(self._holder, "main") if self._holder else []
        server = self._system.name_of(places[-1].id.server) if places else ""
        lease = await self._cluster_of("lease")
        if lease is None or not lease.leader:
            return
        home = lease.leader
        if home == server:
            others = lease.followers()
            if not others:
                return
            home = self._chance.choice(others)
            await self._move("lease", home)
        for store in STORES:
            cluster = await self._cluster_of(store.name)
            if cluster is not None and cluster.leader != home and home in cluster.followers():
                await self._move(store.name, home)

    async def _cluster_of(self, store: str) -> _Cluster | None:
        subject = f"$JS.API.STREAM.INFO.{self._subjects.stream(store)}"
        answer = await self._hub.request(subject, b"", timeout_seconds=TIMEOUT_SECONDS)
        try:
            return msgspec.json.decode(answer, type=_StreamInfo).cluster
        except msgspec.MsgspecError as error:
            logger.warning("the hub's answer about the store %s cannot be read: %s", store, error)
            return None

    async def _move(self, store: str, server: str) -> None:
        subject = f"$JS.API.STREAM.LEADER.STEPDOWN.{self._subjects.stream(store)}"
        wish = msgspec.json.encode({"placement": {"preferred": server}})
        await self._hub.request(subject, wish, timeout_seconds=TIMEOUT_SECONDS)
        self.num_moved += 1
        logger.info("%s shall lead the store %s", server, store)

    def _lease_changed(self, entry: Entry) -> None:
        if entry.key != KEY:
            return
        try:
            holder = decode(LeaseRecord, entry.value).holder if entry.value is not None else ""
        except ProtocolError:
            return
        if holder and holder != self._holder:
            self._holder = holder
            self._wanted.set()
