"""The watch over floods: it asks, cuts, writes a ban that ends by itself, and goes on whatever fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from potluck import tasks
from potluck.errors import HubUnavailableError
from potluck.hub.access.member import Ban, ban_key
from potluck.hub.guard.backgroundwork import BackgroundWork
from potluck.hub.guard.connections import Connection
from potluck.hub.guard.floodcore import FloodCore, FloodLimits, Traffic
from potluck.hub.guard.floodwatch import LONGEST_PAUSE_SECONDS, PAUSE_SECONDS, FloodWatch
from potluck.hub.guard.presencecore import ConnectionId
from potluck.hub.guard.registry import Registry
from potluck.sim.memoryhub import MemoryHub
from potluck.sim.virtualloop import LoopClock, in_virtual_time

MALLORY = "MALLORY"
LIMITS = FloodLimits(burst_messages=100, messages_per_second=1.0, first_seconds=10)
MOMENT_SECONDS = 2 * PAUSE_SECONDS


class Station:
    """A watch, with a hub whose counters the test sets."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.hub = MemoryHub("run")
        self.background = BackgroundWork(100)
        self.registry = Registry(self.hub.connect("GUARD"), self.background.spawn)
        self.published = 0
        self.looks_at: list[float] = []
        self.kicked: list[ConnectionId] = []
        self.is_away = False
        self.list_seconds = 0.0
        self.connection = Connection(id=ConnectionId("one", 1), peer=MALLORY, lane="main")
        connections = {MALLORY: [self.connection]}
        core = FloodCore(LIMITS, self.clock)
        self.watch = FloodWatch(core, self, lambda peer: connections.get(peer, []), self.registry, self.clock)  # type: ignore[arg-type]

    async def list_traffic(self, _lane: str) -> list[Traffic]:
        self.looks_at.append(self.clock.monotonic())
        await asyncio.sleep(self.list_seconds)
        if self.is_away:
            raise HubUnavailableError("the hub is away")
        return [self.traffic()]

    async def kick(self, connection: ConnectionId) -> bool:
        self.kicked.append(connection)
        return True

    def traffic(self) -> Traffic:
        return Traffic(id=self.connection.id, peer=MALLORY, num_messages=self.published, num_bytes=0, open_seconds=0.0)

    @property
    def ban(self) -> Ban | None:
        return self.registry.bans.get(ban_key(MALLORY))

    async def run(self, work: Any) -> None:
        await self.registry.bans.start()
        task = asyncio.create_task(self.watch.watch_forever())
        try:
            await asyncio.sleep(MOMENT_SECONDS)
            await work()
        finally:
            await tasks.end(task)
            await self.registry.bans.stop()
            await self.background.close()


@in_virtual_time
async def test_who_floods_is_cut_and_banned_until_its_time_is_over() -> None:
    station = Station()

    async def work() -> None:
        assert station.ban is None
        station.published = 101
        await asyncio.sleep(MOMENT_SECONDS)
        assert station.kicked == [station.connection.id]
        assert station.ban is not None
        assert (station.ban.target, station.ban.banned_by) == (MALLORY, "guard")
        assert station.ban.until == station.ban.banned_at + 10
        assert station.watch.counts == {"floods": 1, "cut_floods": 1}
        await asyncio.sleep(11.0)
        assert station.ban is None

    await station.run(work)


@in_virtual_time
async def test_a_connection_that_is_gone_by_then_counts_all_the_same() -> None:
    station = Station()

    async def work() -> None:
        station.published = 101
        station.watch.closed(station.traffic())
        await asyncio.sleep(MOMENT_SECONDS)
        assert station.ban is not None

    await station.run(work)


@in_virtual_time
async def test_what_comes_before_the_cut_works_is_no_second_offence() -> None:
    station = Station()

    async def work() -> None:
        for _ in range(5):
            station.published += 200
            await asyncio.sleep(MOMENT_SECONDS)
        assert len(station.kicked) == 5
        assert station.watch.counts["floods"] == 1
        assert station.ban is not None
        assert station.ban.until == station.ban.banned_at + 10

    await station.run(work)


@in_virtual_time
async def test_an_organisers_ban_stays_as_it_is() -> None:
    station = Station()

    async def work() -> None:
        for_good = Ban(target=MALLORY, reason="noise")
        await station.registry.bans.put(ban_key(MALLORY), for_good)
        station.published = 101
        await asyncio.sleep(MOMENT_SECONDS)
        assert station.kicked
        assert station.ban == for_good

    await station.run(work)


@in_virtual_time
async def test_while_the_hub_is_away_it_is_tried_again_and_nothing_is_forgotten() -> None:
    station = Station()

    async def work() -> None:
        station.is_away = True
        station.published = 101
        station.watch.closed(station.traffic())
        station.published = 0  # what is listed by then is another connection's
        await asyncio.sleep(1.0)
        assert station.ban is None
        assert station.watch.counts["flood_checks_failed"] >= 2
        station.is_away = False
        await asyncio.sleep(MOMENT_SECONDS)
        assert station.ban is not None
        assert station.watch.counts["floods"] == 1

    await station.run(work)


@in_virtual_time
@pytest.mark.parametrize(("list_seconds", "pause_seconds"), [(0.0, PAUSE_SECONDS), (0.01, 0.5), (1.0, 2.0)])
async def test_long_lists_are_asked_for_less_often(list_seconds: float, pause_seconds: float) -> None:
    station = Station()
    station.list_seconds = list_seconds

    async def work() -> None:
        await asyncio.sleep(4 * (LONGEST_PAUSE_SECONDS + list_seconds))
        first, second = station.looks_at[1:3]
        assert second - first == pytest.approx(list_seconds + pause_seconds, abs=0.01)

    await station.run(work)
