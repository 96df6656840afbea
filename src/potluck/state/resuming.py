"""Going on from whatever the run has: what resume.py decides, done."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from potluck.errors import StateUnavailableError
from potluck.peer.lease import Lease
from potluck.peer.session import Session
from potluck.round.lineage import Lineage
from potluck.round.member.workers import Workers
from potluck.state.announcement import Verdict
from potluck.state.backups import Backups
from potluck.state.directory import ASK_EVERY_SECONDS, StateDirectory
from potluck.state.fetched import FetchedState
from potluck.state.fetcher import FetchReport, MovedOnError, Progress
from potluck.state.resumechoice import BEGIN_SECONDS, Beginner, Situation, Step, next_step
from potluck.state.shelf import Held, Shelf
from potluck.state.snapshot import Snapshot

logger = logging.getLogger(__name__)


class EpochSource(Protocol):
    """Where the run is, and who coordinates; `potluck.round.averager.Averager` is one."""

    lineage: Lineage
    lease: Lease

    @property
    def is_in_round(self) -> bool:
        """Whether others count on this peer now."""
        ...


class StateTaker(Protocol):
    """What going on needs of the keeper."""

    async def fetch_for_resuming(
        self,
        verdict: Verdict,
        base: Mapping[str, Tensor] | None,
        report: FetchReport,
        progress: Progress | None,
        until: float,
    ) -> Snapshot:
        """Fetch a state that was chosen; MovedOnError when nobody serves it any more."""
        ...

    async def take_over(self, held: Held, *, keeps: bool | None = None) -> None:
        """This is the peer's state from now on, whatever it had before."""
        ...

    def save(self, epoch: int, snapshot: Snapshot, *, made_at: int) -> None:
        """Have a state written to disk, if a backup is due."""
        ...


class Resuming:
    """One peer's part in going on."""

    def __init__(
        self,
        session: Session,
        averager: EpochSource,
        directory: StateDirectory,
        shelf: Shelf,
        taker: StateTaker,
        *,
        backups: Backups | None,
        workers: Workers,
        grace_seconds: float,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._session = session
        self._averager = averager
        self._directory = directory
        self._shelf = shelf
        self._taker = taker
        self._backups = backups
        self._workers = workers
        self._grace_seconds = grace_seconds
        self.has_begun = False
        """Whether the run began with this peer's own state."""
        self._beginner = Beginner()
        directory.on_asked = self._asked

    async def resume(
        self, base: Mapping[str, Tensor] | None, *, progress: Progress | None, timeout_seconds: float
    ) -> FetchedState | None:
        """The state to go on from; None: nothing is there yet, begin. What is in `base` is not fetched."""
        clock, lineage, directory = self._session.clock, self._averager.lineage, self._directory
        until = clock.monotonic() + timeout_seconds
        await self._offer_backup()
        first = head = lineage.epoch
        since = clock.monotonic()
        while True:
            await directory.ask()
            self._asked(self._session.peer_id)
            if lineage.epoch and directory.verdict(lineage.epoch) is None:
                await directory.settle(None, 0)
            if directory.disputed(lineage.epoch, at_least=max(lineage.epoch - 1, 1)) is not None:
                since = clock.monotonic()  # others have a state, and cannot agree yet: nothing is adopted
            if lineage.epoch != head:
                head, since = lineage.epoch, clock.monotonic()
            waited = clock.monotonic() - since
            step = next_step(self._situation(head, waited, has_moved=head != first), self._grace_seconds)
            if step.kind == "begin":
                self.has_begun = True
                return None
            if step.verdict is not None:
                taken = await self._take_step(step, step.verdict, head, base, progress, until)
                if taken is not None:
                    self._shelf.drop_backup()
                    directory.announce()
                    return taken
            if clock.monotonic() >= until:
                raise StateUnavailableError(
                    f"the run cannot go on yet: {step.reason}. Start a peer that has a newer backup, or a coordinator"
                )
            pause = ASK_EVERY_SECONDS if head else BEGIN_SECONDS / 4
            await directory.until_changed(min(max(until - clock.monotonic(), 0.0), pause))

    async def _offer_backup(self) -> None:
        if self._backups is None or any(held.is_backup for held in self._shelf):
            return
        restored = await self._workers.run(self._backups.restore)
        if restored is not None:
            self._shelf.put(restored.info.epoch, restored.snapshot, made_at=restored.info.made_at, is_backup=True)
            restored.snapshot.release()
            self._directory.announce()

    def _asked(self, peer: str) -> None:
        """As the coordinator of a run that has nothing: choose who begins it."""
        roster = self._session.roster
        presence = roster.get(peer)
        is_trainer = presence is not None and presence.card.role == "trainer"
        if not (self._averager.lease.is_held and self._averager.lineage.epoch == 0 and is_trainer):
            return
        if self._beginner.asked_by(peer, self._session.clock.monotonic(), roster.__contains__):
            self._directory.beginner = peer
            self._directory.announce()

    def _begins(self) -> bool | None:
        """Whether the coordinator has chosen this peer to begin; None: it has chosen nobody."""
        coordinator = self._averager.lease.view.holder or ""
        chosen = self._directory.announcements.beginner(coordinator, self._session.roster)
        return chosen == self._session.peer_id if chosen else None

    def _situation(self, head: int, waited_seconds: float, *, has_moved: bool) -> Situation:
        directory, own = self._directory, self._session.peer_id
        offers = [directory.newest(head - 1), directory.newest(backups=True)]
        others = [presence.card.role for presence in self._session.roster if presence.peer != own]
        return Situation(
            head_epoch=head,
            present=directory.verdict(head),
            live=directory.newest(head) if has_moved else None,
            offers=[offer for offer in offers if offer is not None],
            is_coordinator=self._averager.lease.is_held,
            is_alone="trainer" not in others,
            begins=self._begins(),
            waited_seconds=waited_seconds,
        )

    async def _take_step(
        self,
        step: Step,
        verdict: Verdict,
        head: int,
        base: Mapping[str, Tensor] | None,
        progress: Progress | None,
        until: float,
    ) -> FetchedState | None:
        """Take the state that was chosen; None if it cannot be had after all."""
        report = FetchReport()
        own = self._shelf.find(verdict.digest)
        try:
            if own is not None:
                snapshot = own.hold()
            else:
                snapshot = await self._taker.fetch_for_resuming(verdict, base, report, progress, until)
        except MovedOnError as error:
            logger.info("another state to go on from is looked for: %s", error)
            return None
        # A run that moves on while we look is taken where it is; otherwise this is the state of the present epoch.
        epoch = verdict.epoch if step.kind == "join" else head
        keeps = None
        self._regret_newer_backup(verdict)
        if step.kind == "adopt":
            (logger.info if verdict.made_at == head else logger.warning)("%s", step.reason)
            self.counts["adopted"] += 1
            keeps = True  # whatever it does otherwise: all others get it from here
        await self._taker.take_over(Held(epoch, snapshot, verdict.made_at), keeps=keeps)
        return FetchedState(epoch, verdict.made_at, snapshot, None, report)

    def _regret_newer_backup(self, verdict: Verdict) -> None:
        for held in self._shelf:
            if held.is_backup and held.made_at > verdict.made_at:
                logger.warning(
                    "this peer has a backup of epoch %d, and the run goes on from a state of epoch %d: the backup "
                    "stays on disk. If the run should go on from it, stop all peers and start this one first",
                    held.made_at,
                    verdict.made_at,
                )
