"""What a fleet's machines report, as it comes in: the newest of each, and what their jobs' figures were before.

Shown, never trusted: reports are bounded, and so is what is remembered of them.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass

from potluck.errors import ProtocolError, RetryableError
from potluck.fleet.jobs.control import read_report
from potluck.fleet.jobs.machine import ASK_TOPIC, TOPIC, MachineReport
from potluck.hub.connection import Delivery, Subscription
from potluck.peer.session import Session

logger = logging.getLogger(__name__)

AWAY_SECONDS = 20.0  # machines report every five
MAX_MACHINES = 500
MAX_CURVES = 500
MAX_POINTS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A machine's newest report."""

    peer: str
    report: MachineReport
    at: float
    """Hub time."""


class FleetNews:
    """All machines of a fleet, by what they say."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._subscription: Subscription | None = None
        self.machines: dict[str, Heard] = {}
        self.curves: dict[tuple[str, str], deque[tuple[float, float]]] = {}  # by job and figure: hub time and value
        self.version = 0
        self.counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Listen, and have all machines say at once how they are."""
        subjects, hub = self._session.subjects, self._session.hub
        self._subscription = await hub.subscribe(subjects.news("*", TOPIC), self._heard)
        try:
            await hub.publish(subjects.news(self._session.peer_id, ASK_TOPIC), b"")
        except RetryableError as error:  # they report by themselves in a few seconds
            logger.debug("nobody was asked: %s", error)

    async def close(self) -> None:
        """Listen no more. Idempotent."""
        if self._subscription is not None:
            await self._subscription.cancel()
            self._subscription = None

    def is_there(self, heard: Heard) -> bool:
        """Whether a machine has reported lately."""
        return self._session.now() - heard.at < AWAY_SECONDS

    def _heard(self, delivery: Delivery) -> None:
        peer = delivery.subject.split(".")[3]
        presence = self._session.roster.get(peer)
        if presence is None or presence.card.role != "machine":
            self.counts["not_of_machines"] += 1  # the hub lets every member publish news
            return
        try:
            report = read_report(delivery.payload)
        except ProtocolError:
            self.counts["bad_reports"] += 1
            return
        if peer in self.machines or len(self.machines) < MAX_MACHINES:
            self.machines[peer] = Heard(peer=peer, report=report, at=self._session.now())
            self._remember(report)
            self.version += 1

    def _remember(self, report: MachineReport) -> None:
        now = self._session.now()
        for job in report.jobs:
            for figure, value in job.metrics.items():
                key = (job.name, figure)
                if key in self.curves or len(self.curves) < MAX_CURVES:
                    self.curves.setdefault(key, deque(maxlen=MAX_POINTS)).append((now, value))
