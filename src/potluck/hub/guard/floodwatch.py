"""Cuts off who floods the run, and keeps it out for a while.

The hub is asked several times a second what each main connection has published; floodcore.py judges. Who floods is cut
off at once and gets a ban that ends by itself. The ban stands in the hub's store like any other: all guards of a
cluster respect it, the lobby tells the peer why and for how long, organisers see it and may lift it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from potluck.clock import Clock
from potluck.errors import ProtocolError, RetryableError
from potluck.hub.access.member import Ban, ban_key
from potluck.hub.guard.connections import Connection, Lane
from potluck.hub.guard.floodcore import Flood, FloodCore, Traffic
from potluck.hub.guard.hubsystem import HubSystem
from potluck.hub.guard.registry import Registry

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.25  # on a gigabit line 30 MB are published meanwhile
QUEUE_PAUSE_SECONDS = 1.0  # nobody but one taker hears what goes into a queue
LONGEST_PAUSE_SECONDS = 2.0
PAUSES_PER_LIST = 50  # a long list takes servers and guard their time: no more than a fiftieth of it
BANNED_BY = "guard"


class FloodWatch:
    """The guard's part that concerns those who publish too much."""

    def __init__(
        self,
        core: FloodCore,
        system: HubSystem,
        connections_of: Callable[[str], Iterable[Connection]],
        registry: Registry,
        clock: Clock,
        lane: Lane = "main",
    ) -> None:
        """`connections_of` gives those that a peer has."""
        self._lane = lane
        self._core = core
        self._system = system
        self._connections_of = connections_of
        self._registry = registry
        self._clock = clock
        self._found: dict[str, Flood] = {}  # by peer; those that were not dealt with yet
        self._wanted = asyncio.Event()
        self.counts: Counter[str] = Counter()

    def closed(self, traffic: Traffic) -> None:
        """A connection has closed: a peer that comes and goes faster than we look is judged by this."""
        if traffic.lane != self._lane:
            return
        flood = self._core.closed(traffic)
        if flood is not None:
            self._found[flood.peer] = flood
            self._wanted.set()

    async def watch_forever(self) -> None:
        """Look at what is published, for as long as the guard lives."""
        is_failing = False
        while True:
            began = self._clock.monotonic()
            try:
                self._found |= {
                    flood.peer: flood for flood in self._core.listed(await self._system.list_traffic(self._lane))
                }
                while self._found:
                    await self._stop(next(iter(self._found.values())))
                is_failing = False
            except (RetryableError, ProtocolError) as error:
                self.counts["flood_checks_failed"] += 1
                level = logging.DEBUG if is_failing else logging.WARNING  # a hub that is away is told once
                logger.log(
                    level, "the member that floods the run could not be found or kept out; trying again: %s", error
                )
                is_failing = True
            took_seconds = self._clock.monotonic() - began
            least_seconds = QUEUE_PAUSE_SECONDS if self._lane == "queue" else PAUSE_SECONDS
            await self._pause(min(max(least_seconds, PAUSES_PER_LIST * took_seconds), LONGEST_PAUSE_SECONDS))

    async def _stop(self, flood: Flood) -> None:
        """Cut its connections, and then write the ban: of the two, that is what the flood may hold up."""
        peer = flood.peer
        cut = await asyncio.gather(*(self._system.kick(each.id) for each in self._connections_of(peer)))
        self.counts["cut_floods"] += sum(cut)
        if not self._registry.bans_of(peer):
            seconds, now = self._core.sentence(peer), self._clock.wall()
            ban = Ban(target=peer, reason=flood.reason, banned_at=now, banned_by=BANNED_BY, until=now + seconds)
            await self._registry.bans.create(ban_key(peer), ban, ttl_seconds=seconds)
            self._core.sentenced(peer)
            self.counts["floods"] += 1
            logger.warning("%s is kept out for %d s: %s", peer, seconds, flood.reason)
        del self._found[peer]

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wanted.wait()
        except TimeoutError:
            pass
        self._wanted.clear()
