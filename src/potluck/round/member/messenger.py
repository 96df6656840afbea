"""What a member says by itself: each second to all that it is ready, and to the coordinator how its round goes.

Reports go over the link to the coordinator. When it does not acknowledge them they go by way of the hub: a link that
is broken must not look like a member that is dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from potluck import tasks
from potluck.errors import PotluckError, RetryableError
from potluck.faultpoints import reach
from potluck.link.grouplinks import GroupLinks
from potluck.messages import encode
from potluck.peer.groupsession import GroupSession
from potluck.round.member.roundwork import RoundWork
from potluck.round.plan.messages import Ready, Report

logger = logging.getLogger(__name__)

READY_EVERY_SECONDS = 1.0
REPORT_EVERY_SECONDS = 0.3
REPORT_TIMEOUT_SECONDS = 0.5
UNHEARD_SECONDS = 0.5  # well below a director's patience with silence


@dataclass(frozen=True, slots=True)
class ReportTarget:
    """Who wants to know how a round goes."""

    coordinator: str
    round_work: RoundWork


@dataclass(frozen=True, slots=True)
class _Unheard:
    """A report on its way over a link."""

    coordinator: str
    since: float


class Messenger:
    """Sends Ready while there is a wish, and reports while there is a round."""

    def __init__(
        self,
        links: GroupLinks,
        session: GroupSession,
        *,
        ready: Callable[[], Ready | None],
        target: Callable[[], ReportTarget | None],
    ) -> None:
        self._links = links
        self._session = session
        self._ready = ready
        self._target = target
        self._ready_wanted = asyncio.Event()
        self._report_wanted = asyncio.Event()
        self._unheard: _Unheard | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        self._tasks = [
            asyncio.create_task(self._keep_announcing(), name="round: ready"),
            asyncio.create_task(self._keep_reporting(), name="round: reports"),
        ]

    async def close(self) -> None:
        """Say nothing more. Idempotent."""
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
                reach("round.ready", peer=self._session.peer_id, epoch=ready.epoch, role="none")
            await _wait(self._ready_wanted, READY_EVERY_SECONDS if ready is not None else None)

    async def _keep_reporting(self) -> None:
        while True:
            self._report_wanted.clear()
            if (target := self._target()) is not None:
                await self._send_report(target)
            await _wait(self._report_wanted, REPORT_EVERY_SECONDS if target is not None else None)

    async def _send_report(self, target: ReportTarget) -> None:
        report = target.round_work.report()
        if self._is_heard(target.coordinator):
            try:
                await self._report_by_link(target, report)
            except PotluckError as error:
                logger.debug("the coordinator cannot be told over the link how the round goes: %s", error)
            else:
                return
        await self._report_by_hub(target, report)

    def _is_heard(self, coordinator: str) -> bool:
        unheard = self._unheard
        if unheard is None or unheard.coordinator != coordinator:
            return True
        return self._session.clock.monotonic() - unheard.since < UNHEARD_SECONDS

    async def _report_by_link(self, target: ReportTarget, report: Report) -> None:
        round_work = target.round_work
        receipt = await self._links.send(target.coordinator, report, timeout_seconds=REPORT_TIMEOUT_SECONDS)
        if self._unheard is None or self._unheard.coordinator != target.coordinator:
            self._unheard = _Unheard(target.coordinator, self._session.clock.monotonic())
        unheard = self._unheard

        def settled() -> None:
            if self._unheard is unheard:
                self._unheard = None  # also when the channel broke: another one is tried
            if receipt.acknowledged and report.digest:
                round_work.reported()

        receipt.watch(settled)

    async def _report_by_hub(self, target: ReportTarget, report: Report) -> None:
        session = self._session
        try:
            await session.hub.publish(session.subjects.news(session.peer_id, "report"), encode(report))
        except PotluckError as error:
            logger.debug("the coordinator cannot be told by way of the hub how the round goes: %s", error)
        else:
            if report.digest:
                target.round_work.reported()


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    """Until the event is set, or so long; None: as long as it takes."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
