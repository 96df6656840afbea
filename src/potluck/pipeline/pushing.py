"""Handing a micro-batch to a server of the next stage that has room.

A push is one request. Its answer comes when the micro-batch is computed (done), at once when there is no room (busy:
another server is asked), or when its attempt is over (stale). If the server cannot be reached it is unknown whether it
has the micro-batch: that is never sent a second time under the same attempt, the conductor is told instead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence

from potluck.clock import Clock
from potluck.errors import PeerError, RetryableError
from potluck.link.carrier import Buffer
from potluck.link.links import Links
from potluck.pipeline.messages import Forward, Pushed
from potluck.pipeline.routing import LinkCost, RouterConfig, StageRouter
from potluck.round.codecs.memory import num_bytes

LOOK_AGAIN_SECONDS = 1.0


class HandOverError(PeerError):
    """A server cannot be reached, or its answer did not come."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer} does not take a micro-batch: {reason}")
        self.peer = peer
        self.reason = reason


class Pusher:
    """One peer's way to the servers of one stage."""

    def __init__(self, links: Links, clock: Clock, config: RouterConfig, *, timeout_seconds: float) -> None:
        self._links = links
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._changed = asyncio.Event()
        self._bytes_per_sample = 0.0
        self.sent: Counter[str] = Counter()
        """Micro-batches by server, so far."""
        self.router = StageRouter(config)

    def set_servers(self, servers: Iterable[str], *, unreachable: frozenset[str] = frozenset()) -> None:
        """Who serves the stage now; those we could not reach are left out where there are others."""
        wanted = set(servers)
        wanted = (wanted - unreachable) or wanted
        for server in set(self.router.servers) - wanted:
            self.router.gone(server)
        for server in sorted(wanted):
            self.router.add(server, link=self._cost_of(server))
        self._wake()

    def _cost_of(self, server: str) -> LinkCost:
        """By what the link has measured so far, and the size of the last micro-batch."""
        known = self._links.statistics().peers.get(server)
        if known is None:
            return LinkCost()
        speed = known.upload_bytes_per_second
        return LinkCost(
            latency_seconds=(known.rtt_seconds or 0.0) / 2,
            transfer_seconds_per_sample=self._bytes_per_sample / speed if speed else 0.0,
        )

    def forget_tasks(self) -> None:
        """An attempt is over: what is under way says nothing about the servers."""
        self.router.forget_tasks()
        self._wake()

    async def push(self, message: Forward, frames: Sequence[Buffer]) -> str | None:
        """The server that has computed it; None where the attempt is over. HandOverError where one is lost."""
        task = (message.attempt, message.id)
        self._bytes_per_sample = sum(map(num_bytes, frames)) / max(message.samples, 1)
        while True:
            server = await self._choose(message.samples)
            self.router.accepted(server, task, samples=message.samples, now=self._clock.monotonic())
            try:
                reply = await self._links.request(
                    server, message, frames, reply=Pushed, timeout_seconds=self._timeout_seconds, bulk=True
                )
            except (PeerError, RetryableError) as error:
                self.router.gone(server)
                raise HandOverError(server, str(error)) from error
            except asyncio.CancelledError:
                self.router.dropped(server, task)
                raise
            answer = reply.message.answer
            now = self._clock.monotonic()
            if answer == "busy":
                self.router.busy(server, now, task)
                continue
            if answer == "done":
                self.sent[server] += 1
                self.router.finished(server, task, now)
            else:
                self.router.dropped(server, task)
            self._wake()
            return server if answer == "done" else None

    async def _choose(self, samples: int) -> str:
        while True:
            now = self._clock.monotonic()
            if (server := self.router.choose(samples=samples, now=now)) is not None:
                return server
            again = self.router.next_free_at(now)
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(again - now, 0.001) if again is not None else LOOK_AGAIN_SECONDS):
                    await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
