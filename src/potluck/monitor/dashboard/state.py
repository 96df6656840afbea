"""What all pages of one dashboard share: the run, and the organiser's rights if this dashboard has them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from potluck.errors import PermissionDeniedError, PotluckError
from potluck.fleet.jobs.control import fleet_control
from potluck.hub.access.organise import Organiser
from potluck.hub.connection import Store
from potluck.hub.joinlink import JoinLink
from potluck.hub.keys import Signer
from potluck.monitor.alarms import Alarm
from potluck.monitor.dashboard.actions import Action, ActionLog
from potluck.monitor.dashboard.login import Login, Visitor
from potluck.monitor.fleetqueues import FleetQueues
from potluck.monitor.follower import RunFollower
from potluck.monitor.view import Overview, PeerRow
from potluck.run.hostrecord import HostRecord
from potluck.training.manifest.manifest import Settings
from potluck.training.manifest.steering import Steering

if TYPE_CHECKING:
    from potluck.monitor.previews import Previewer

WAITING_FRESH_SECONDS = 4.0
FRESH_SECONDS = 0.9  # what one page has had computed, the next may show
STALLED_FACTOR = 5.0  # an epoch that takes so many times as long as most is late
STALLED_SECONDS = 60.0

T = TypeVar("T")
Tone = Literal["good", "idle", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Organising:
    """The organiser's rights, and who may use them here."""

    organiser: Organiser
    gate: Login
    log: ActionLog
    helm: Steering
    link: JoinLink
    """For invites; without one."""
    folder: Path
    """Of the run, on the machine that hosts it."""
    record: HostRecord
    history: Store
    """Of the run, as the host may write it."""


class Dashboard:
    """One run, as pages show it."""

    def __init__(
        self,
        follower: RunFollower,
        organising: Organising | None = None,
        *,
        voter: Signer | None = None,
        previewer: Previewer | None = None,
        queues: FleetQueues | None = None,
    ) -> None:
        self.follower = follower
        self.organising = organising
        self.voter = voter
        self.previewer = previewer
        self.queues = queues
        self._at = -1.0
        self._rows: list[PeerRow] = []
        self._overview: Overview | None = None
        self._alarms: list[Alarm] = []
        self._shared: dict[str, tuple[object, Any]] = {}
        self._waiting_at = -math.inf
        self._num_waiting = 0

    @property
    def run(self) -> str:
        """The run's name."""
        return self.follower.session.subjects.run

    @property
    def has_fleet(self) -> bool:
        """Whether there are machines or queues to show."""
        return bool(self.follower.fleet.machines) or (self.queues is not None and bool(self.queues.queues))

    async def read_log(self, job: str, num_lines: int) -> AsyncIterator[bytes]:
        """What a job of the fleet wrote, and goes on writing. In the organiser's name."""
        if self.organising is None:
            raise PermissionDeniedError("this dashboard has no organiser's rights: use the one of the fleet's host")
        async with fleet_control(self.organising.folder, self.organising.record) as control:
            async for data in control.read_log(job, num_lines=num_lines, follow=True):
                yield data

    def now(self) -> float:
        """Hub time."""
        return self.follower.session.now()

    def overview(self) -> Overview:
        """The whole run."""
        self._refresh()
        assert self._overview is not None
        return self._overview

    def rows(self) -> list[PeerRow]:
        """All peers."""
        self._refresh()
        return self._rows

    def alarms(self) -> list[Alarm]:
        """What is wrong with the run."""
        self._refresh()
        return self._alarms

    def status(self) -> tuple[str, Tone]:
        """How the run is doing, in a word or two."""
        machines = [heard for heard in self.follower.fleet.machines.values() if self.follower.fleet.is_there(heard)]
        if machines and self.follower.manifest is None and self.follower.session.hub.is_connected:
            return f"{len(machines)} machine{'s' if len(machines) != 1 else ''} here", "good"
        return status_of(
            self.overview(),
            self.follower.settings,
            is_connected=self.follower.session.hub.is_connected,
            now=self.now(),
        )

    def shared(self, name: str, version: object, make: Callable[[], T]) -> T:
        """What `make` returns, made once for all pages while the version stays the same."""
        known = self._shared.get(name)
        if known is None or known[0] != version:
            known = self._shared[name] = (version, make())
        made: T = known[1]
        return made

    def visitor(self, session: str | None) -> Visitor | None:
        """The organiser whose session that is."""
        return self.organising.gate.visitor(session) if self.organising is not None else None

    async def num_waiting(self) -> int:
        """How many peers wait for an organiser to let them in; asked for at most every few seconds, for all pages."""
        now = self.follower.session.clock.monotonic()
        if self.organising is not None and now - self._waiting_at >= WAITING_FRESH_SECONDS:
            self._waiting_at = now
            requests = await self.organising.organiser.list_requests()
            self._num_waiting = sum(not request.denied for request in requests)
        return self._num_waiting

    async def act(self, session: str | None, what: str, work: Awaitable[T]) -> T:
        """Do what an organiser asks for, if it is one now, and write down who did it and how it ended."""
        visitor = self.visitor(session)
        if visitor is None or self.organising is None:
            if hasattr(work, "close"):
                work.close()
            raise PermissionDeniedError("only organisers may do that: log in again")

        def note(outcome: str) -> None:
            assert self.organising is not None
            at = self.follower.session.clock.wall()
            action = Action(at=at, who=visitor.name, address=visitor.address, what=what, outcome=outcome)
            self.organising.log.append(action)

        try:
            result = await work
        except PotluckError as error:
            note(f"failed: {error}")
            raise
        note("done")
        return result

    def _refresh(self) -> None:
        now = self.follower.session.clock.monotonic()
        if self._overview is None or now - self._at >= FRESH_SECONDS:
            self._at = now
            self._rows = self.follower.view.rows(now)
            self._overview = self.follower.view.overview(now)
            self._alarms = self.follower.watcher.alarms()


def status_of(overview: Overview, settings: Settings | None, *, is_connected: bool, now: float) -> tuple[str, Tone]:
    """How a run is doing, in a word or two, and whether that is well."""
    if not is_connected:
        return "hub away", "bad"
    if settings is not None and settings.paused:
        return "paused", "idle"
    if settings is not None and 0 < settings.end_epoch <= overview.epoch:
        return "done", "good"
    if not overview.num_trainers:
        return "waiting for trainers", "idle"
    usual = overview.seconds_per_epoch
    late = max(STALLED_SECONDS, STALLED_FACTOR * usual) if usual is not None else STALLED_SECONDS
    if overview.committed_at is not None and now - overview.committed_at > late and not overview.samples_per_second:
        return "stalled", "bad"
    return "training", "good"
