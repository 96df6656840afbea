"""What a member says by itself: each second to all that it is ready, and to the coordinator how its round goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from potluck import tasks
from potluck.errors import PotluckError, RetryableError
from potluck.link.links import Links
from potluck.messages import encode
from potluck.peer.session import Session
from potluck.round.exchanger import Exchanger
from potluck.round.plan import Ready

logger = logging.getLogger(__name__)

READY_EVERY_SECONDS = 1.0
REPORT_EVERY_SECONDS = 0.3
REPORT_TIMEOUT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Audience:
    """Who wants to know how a round goes."""

    coordinator: str
    exchanger: Exchanger


class Messenger:
    """Sends Ready while there is a wish, and reports while there is a round."""

    def __init__(
        self,
        links: Links,
        session: Session,
        *,
        ready: Callable[[], Ready | None],
        audience: Callable[[], Audience | None],
    ) -> None:
        self._links = links
        self._session = session
        self._ready = ready
        self._audience = audience
        self._ready_wanted = asyncio.Event()
        self._report_wanted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        self._tasks = [
            asyncio.create_task(self._keep_announcing(), name="round: ready"),
            asyncio.create_task(self._keep_reporting(), name="round: reports"),
        ]

    async def close(self) -> None:
        """Say nothing more. Calling it twice does no harm."""
        await tasks.end(*self._tasks)
        self._tasks = []

    def announce(self) -> None:
        """Say now whether we are ready."""
        self._ready_wanted.set()

    def report(self) -> None:
        """Tell the coordinator now."""
        self._report_wanted.set()

    async def publish(self, ready: Ready) -> None:
        """Tell everybody; nothing happens while the hub is away."""
        session = self._session
        try:
            await session.hub.publish(session.subjects.news(session.peer_id, "ready"), encode(ready))
        except RetryableError as error:
            logger.debug("readiness could not be told: %s", error)

    async def _keep_announcing(self) -> None:
        while True:
            self._ready_wanted.clear()
            if (ready := self._ready()) is not None:
                await self.publish(ready)
            await _wait(self._ready_wanted, READY_EVERY_SECONDS if ready is not None else None)

    async def _keep_reporting(self) -> None:
        while True:
            self._report_wanted.clear()
            if (audience := self._audience()) is not None:
                await self._send_report(audience)
            await _wait(self._report_wanted, REPORT_EVERY_SECONDS if audience is not None else None)

    async def _send_report(self, audience: Audience) -> None:
        exchanger = audience.exchanger
        report = exchanger.report()
        try:
            receipt = await self._links.send(audience.coordinator, report, timeout_seconds=REPORT_TIMEOUT_SECONDS)
        except PotluckError as error:
            logger.debug("the coordinator could not be told how the round goes: %s", error)
            return
        if report.digest:
            receipt.watch(lambda: exchanger.reported() if receipt.acknowledged else None)


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    """Until the event is set, or so long; None: as long as it takes."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
