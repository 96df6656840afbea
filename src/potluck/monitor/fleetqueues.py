"""A fleet's queues as an organiser sees them over time: depth, rates, age; and the value network that is pooled there.

Looked at every few seconds, with the organiser's rights. What members published is shown, never trusted: it is decoded
without torch, and bounded.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from potluck import tasks
from potluck.errors import PotluckError
from potluck.fleet.member import FleetConfig, FleetMember
from potluck.fleet.topic import Topic
from potluck.hub.address import HubAddress
from potluck.hub.queues import QueueDepth
from potluck.peer.identity import Identity
from potluck.plaintext import clean

logger = logging.getLogger(__name__)

EVERY_SECONDS = 2.0
IDLE_SECONDS = 15.0  # where there is no queue
PATIENCE_SECONDS = 5.0
RATE_SECONDS = 10.0  # over which rates are counted
MAX_POINTS = 600
MAX_QUEUES = 100
MAX_HEADS = 100
MOST_VALUE_BYTES = 32 * 1024 * 1024


@dataclass(slots=True)
class QueueSeries:
    """One queue or topic, now and before."""

    depth: QueueDepth
    points: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    """Hub time, items that were ever put, and items that are there."""

    def add(self, at: float, depth: QueueDepth) -> None:
        """Look again."""
        self.depth = depth
        self.points.append((at, depth.num_put, depth.items))

    @property
    def rates(self) -> tuple[float, float]:
        """Items put, and items that left (done, dropped or dead), for each of the last seconds."""
        if len(self.points) < 2:
            return 0.0, 0.0
        last = self.points[-1]
        first = next(point for point in self.points if last[0] - point[0] <= RATE_SECONDS)
        seconds = last[0] - first[0]
        if seconds <= 0:
            return 0.0, 0.0
        put = max(last[1] - first[1], 0)
        return put / seconds, max(put - (last[2] - first[2]), 0) / seconds


@dataclass(slots=True)
class HeadSeries:
    """One head of the pooled value network: whose it is, and how well it predicts."""

    num_fragments: int = 0
    points: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    """Hub time and normalised error."""


@dataclass(slots=True)
class ValueSeries:
    """A pooled value network."""

    topic: str
    number: int = 0
    learnt: float = 0.0
    too_old: float = 0.0
    staleness: float = 0.0
    """Mean of all fragments that came, in versions."""
    heads: dict[str, HeadSeries] = field(default_factory=dict)

    def add(self, at: float, value: Mapping[str, Any]) -> None:
        """A version, as it was published."""
        statistics = {str(k): float(v) for k, v in value["statistics"].items()}
        self.number = int(value["number"])
        self.learnt = statistics.get("fragments/learnt", 0.0)
        self.too_old = statistics.get("fragments/too_old", 0.0)
        self.staleness = statistics.get("fragments/staleness", 0.0) / max(self.learnt + self.too_old, 1.0)
        for name, record in list(value["heads"].items())[:MAX_HEADS]:
            head = self.heads.setdefault(clean(str(name))[:130], HeadSeries())
            head.num_fragments = int(record["num_fragments"])
            error = statistics.get(f"error/{name}", math.nan)
            if math.isfinite(error):
                head.points.append((at, error))


class FleetQueues:
    """Looks at all queues of a fleet, again and again. Lives on an event loop."""

    def __init__(self, address: HubAddress, run: str, organiser_seed: bytes, now: Callable[[], float]) -> None:
        config = FleetConfig(name="dashboard", patience_seconds=PATIENCE_SECONDS)
        self._member = FleetMember(address, run, Identity(organiser_seed), config)
        self._now = now
        self.queues: dict[str, QueueSeries] = {}
        self.values: dict[str, ValueSeries] = {}
        self.version = 0
        self.counts: Counter[str] = Counter()
        self._seen: dict[str, int] = {}  # by topic: the newest item that was looked at
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._watch(), name="fleet queues")

    async def close(self) -> None:
        """Look no more. Idempotent."""
        await tasks.end(self._task)
        await self._member.close()

    async def _watch(self) -> None:
        is_open = False
        while True:
            try:
                if not is_open:
                    await self._member.open(is_member=True)
                    is_open = True
                await self._look()
            except PotluckError as error:
                self.counts["failed"] += 1
                logger.debug("the queues cannot be looked at now: %s", error)
            await asyncio.sleep(EVERY_SECONDS if self.queues else IDLE_SECONDS)

    async def _look(self) -> None:
        depths = {depth.definition.name: depth for depth in (await self._member.list_queues())[:MAX_QUEUES]}
        self.queues = {name: self.queues.get(name) or QueueSeries(depth) for name, depth in depths.items()}
        for name, depth in depths.items():
            self.queues[name].add(self._now(), depth)
            if depth.definition.kind == "topic" and self._seen.get(name) != depth.num_put:
                await self._look_at_value(name, depth)
                self._seen[name] = depth.num_put
        self.version += 1

    async def _look_at_value(self, name: str, depth: QueueDepth) -> None:
        """Whether a value network is published there, and how it does."""
        if depth.num_put == 0 or depth.bytes + depth.parts_bytes > MOST_VALUE_BYTES:
            return
        newest = await Topic[Any](self._member, name).latest()
        value = newest.value if newest is not None else None
        if not isinstance(value, Mapping) or not {"number", "heads", "statistics"} <= set(value):
            return
        try:
            series = self.values.get(name) or ValueSeries(name)
            series.add(self._now(), value)
            self.values[name] = series
        except (KeyError, TypeError, ValueError, AttributeError):
            self.counts["bad_versions"] += 1
