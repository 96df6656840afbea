"""A feeder: reads data, sends micro-batches into the first stage, and hears when they are through.

The data of a micro-batch depend on (step, id) alone, so that another feeder can send the same when this one dies. What
was read is kept until the step is over: a replay needs it again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Protocol

from potluck import tasks
from potluck.clock import Clock
from potluck.errors import PeerError, RetryableError
from potluck.faultpoints import reach
from potluck.link.dispatch import Incoming
from potluck.link.links import Links
from potluck.pipeline.blocks import State
from potluck.pipeline.following import Following
from potluck.pipeline.messages import Fed, Feed, FeedItem, Forward, Locate, Located, Lost, Place, Returned, Sent
from potluck.pipeline.pushing import HandOverError, Pusher
from potluck.pipeline.routing import RouterConfig
from potluck.pipeline.wire import RAW, encode_tensors
from potluck.pipeline.witnessing import Witness

logger = logging.getLogger(__name__)


class Source(Protocol):
    """The run's data. Called in threads, several at a time."""

    def batch(self, step: int, place: Place, first: int, samples: int) -> State:
        """A micro-batch: so many samples, from the `first` on of those that the step has from this place on."""

    def after(self, step: int, place: Place, samples: int) -> Place:
        """Where the data go on after so many samples."""


@dataclass(frozen=True, kw_only=True)
class FeederConfig:
    """How much is under way."""

    in_flight: int = 8
    """Micro-batches of this feeder between its send and their return."""

    router: RouterConfig = field(default_factory=RouterConfig)
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise ValueError(f"in_flight={self.in_flight}: nothing would ever be sent")


class Feeder:
    """One peer's data."""

    def __init__(
        self,
        links: Links,
        clock: Clock,
        conductor: Following,
        source: Source,
        witness: Witness,
        config: FeederConfig | None = None,
    ) -> None:
        self._links = links
        self._witness = witness
        self._conductor = conductor
        self._source = source
        self._config = config or FeederConfig()
        self._pusher = Pusher(links, clock, self._config.router, timeout_seconds=self._config.timeout_seconds)
        self._feed: Feed | None = None
        self._task: asyncio.Task[None] | None = None
        self._returned: dict[int, asyncio.Future[float]] = {}
        self._kept: dict[tuple[int, int], State] = {}  # (first, samples)
        self._kept_step = -1
        self.num_sent = 0
        links.handle(Feed, self._feed_came)
        links.handle(Returned, self._came_back)
        links.handle(Locate, self._locate)

    async def close(self) -> None:
        """Stop. Idempotent."""
        for kind in (Feed, Returned, Locate):
            self._links.unhandle(kind)
        await tasks.end(self._task)

    async def _locate(self, incoming: Incoming[Locate]) -> Located:
        ask = incoming.message
        place = await asyncio.to_thread(self._source.after, ask.step, ask.place, ask.samples)
        return Located(place=place)

    def sent(self) -> tuple[Sent, ...]:
        """What was handed to the first stage so far."""
        return tuple(Sent(server=server, stage=0, count=count) for server, count in self._pusher.sent.items())

    def statistics(self) -> dict[str, int]:
        """Counters."""
        return {"sent": self.num_sent, "in_flight": len(self._returned), "kept": len(self._kept)}

    async def _feed_came(self, incoming: Incoming[Feed]) -> None:
        feed = incoming.message
        if not await self._conductor.accepts(incoming.sender):
            return
        current = self._feed
        if (
            current is not None
            and feed.life == current.life
            and (feed.step, feed.attempt) <= (current.step, current.attempt)
        ):
            return
        self._feed = feed
        if self._task is not None:
            self._task.cancel()
        self._returned.clear()
        self._pusher.forget_tasks()
        self._pusher.set_servers(feed.servers)
        if feed.step != self._kept_step or (current is not None and feed.life != current.life):
            self._kept_step, self._kept = feed.step, {}
        self._witness.watch(feed.step, feed.checks)
        self._task = asyncio.create_task(self._send_all(feed), name="pipeline-feed")

    async def _send_all(self, feed: Feed) -> None:
        room = asyncio.Semaphore(self._config.in_flight)
        async with asyncio.TaskGroup() as group:
            for item in feed.items:
                await room.acquire()
                group.create_task(self._send(feed, item, room))

    async def _send(self, feed: Feed, item: FeedItem, room: asyncio.Semaphore) -> None:
        returned: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        try:
            key = (item.first, item.samples)
            batch = self._kept.get(key)
            if batch is None:
                batch = await asyncio.to_thread(self._source.batch, feed.step, feed.place, item.first, item.samples)
                self._kept[key] = batch
            self._returned[item.id] = returned
            specs, frames = encode_tensors(batch, RAW)
            message = Forward(
                step=feed.step,
                attempt=feed.attempt,
                id=item.id,
                stage=0,
                samples=item.samples,
                held_by=item.held_by,
                tensors=specs,
            )
            self.num_sent += 1
            if (server := await self._pusher.push(message, frames)) is None:
                return
            self._witness.testify("input", server, 0, feed.attempt, item.id, specs, frames, samples=item.samples)
            reach("pipeline.fed", step=feed.step, micro=item.id)
            loss = await returned
            fed = Fed(step=feed.step, attempt=feed.attempt, id=item.id, loss=loss)
            await self._links.send(self._conductor.peer, fed, timeout_seconds=self._config.timeout_seconds)
        except HandOverError as error:
            await self._tell_lost(feed, error)
        except (PeerError, RetryableError) as error:
            logger.warning("the conductor cannot be told of micro-batch %d: %s", item.id, error)
        finally:
            if self._returned.get(item.id) is returned:  # or else the next attempt waits for the same one
                del self._returned[item.id]
            room.release()

    async def _tell_lost(self, feed: Feed, error: HandOverError) -> None:
        lost = Lost(step=feed.step, attempt=feed.attempt, peer=error.peer, reason=error.reason[:500])
        try:
            await self._links.send(self._conductor.peer, lost, timeout_seconds=self._config.timeout_seconds)
        except (PeerError, RetryableError) as failure:
            logger.warning("the conductor cannot be told that %s is lost: %s", error.peer, failure)

    def _came_back(self, incoming: Incoming[Returned]) -> None:
        message, feed = incoming.message, self._feed
        if feed is None or (message.step, message.attempt) != (feed.step, feed.attempt):
            return
        self._witness.testify("input gradient", incoming.sender, 0, message.attempt, message.id, loss=message.loss)
        returned = self._returned.get(message.id)
        if returned is not None and not returned.done():
            returned.set_result(message.loss)
