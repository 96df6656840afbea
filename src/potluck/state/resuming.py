"""Going on from whatever the run has: what resumechoice.py decides, done."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from potluck.errors import RevisionConflictError, StateUnavailableError
from potluck.peer.groupsession import GroupSession
from potluck.peer.lease import Lease
from potluck.round.lineage import Lineage
from potluck.round.member.workers import Workers
from potluck.run.cutboard import CutBoard, CutPart
from potluck.state.announcement import Verdict
from potluck.state.backups import Backups
from potluck.state.directory import ASK_EVERY_SECONDS, StateDirectory
from potluck.state.fetched import FetchedState
from potluck.state.fetcher import FetchReport, MovedOnError, Progress
from potluck.state.resumechoice import BEGIN_SECONDS, Beginner, Situation, Step, next_step
from potluck.state.shelf import Held, Shelf
from potluck.state.snapshot import Snapshot

logger = logging.getLogger(__name__)

LOST_SECONDS = 60.0  # without anybody offering any state, until a coordinator that has no backup has the run begun anew


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

    async def staged(self, base: Mapping[str, Tensor]) -> Snapshot:
        """A copy of these tensors."""
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
        session: GroupSession,
        averager: EpochSource,
        directory: StateDirectory,
        shelf: Shelf,
        taker: StateTaker,
        *,
        backups: Backups | None,
        workers: Workers,
        grace_seconds: float,
        cuts: CutBoard,
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
        self._cuts = cuts
        self.has_begun = False
        """Whether the run began with this peer's own state."""
        self._beginner = Beginner()
        self._lost_since: float | None = None
        self._asking: tuple[int, set[str]] = (
            0,
            set(),
        )  # an epoch, and who asked for a state since
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
            if self.is_in_the_making:
                since = clock.monotonic()
            if lineage.epoch != head:
                head, since = lineage.epoch, clock.monotonic()
            waited = clock.monotonic() - since
            step = next_step(self._situation(head, waited, has_moved=head != first), self._grace_seconds)
            if step.kind == "begin":
                self.has_begun = True
                return None
            if step.kind == "begin anew" and base is not None:
                logger.warning("%s", step.reason)
                self.counts["begun_anew"] += 1
                snapshot = await self._taker.staged(base)
                await self._taker.take_over(Held(head, snapshot, 0), keeps=True)
                return FetchedState(head, 0, snapshot, None, FetchReport())
            if step.verdict is not None:
                began = clock.monotonic()
                taken = await self._take_step(step, step.verdict, head, base, progress, until)
                until += clock.monotonic() - began  # so long something came
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
        backups, part = self._backups, self._part()
        restored = await self._workers.run(lambda: backups.restore(part.epoch)) if part is not None else None
        if restored is not None and part is not None and restored.snapshot.common_digest != part.common:
            restored.snapshot.release()  # another state of that epoch: the run went on from an earlier one
            restored = None
        if restored is None:
            restored = await self._workers.run(backups.restore)
        if restored is not None:
            self._shelf.put(restored.info.epoch, restored.snapshot, made_at=restored.info.made_at, is_backup=True)
            restored.snapshot.release()
            self._directory.announce()

    def _part(self) -> CutPart | None:
        """What this group should go back to, if nobody has its present state."""
        cut = self._cuts.safe_for(self._session.group)
        return cut.parts[self._session.group] if cut is not None else None

    def _cut_offer(self) -> Verdict | None:
        """The same, if somebody offers it, from memory or from disk."""
        part = self._part()
        if part is None:
            return None
        both = [self._directory.verdict(part.epoch, backups=backups) for backups in (True, False)]
        return next((verdict for verdict in both if verdict is not None and verdict.common == part.common), None)

    @property
    def is_in_the_making(self) -> bool:
        """Whether others have the averages of the present epoch, and will have its state.

        A trainer that was started again has them no more, but it asks for a state.
        """
        head, roster = self._averager.lineage.head, self._session.roster
        if head is None:
            return False
        epoch, asking = self._asking
        gone = {self._session.peer_id, *(asking if epoch == head.epoch else ())}
        holders = [roster.get(peer) for peer in head.holders if peer not in gone]
        return any(holder is not None and holder.card.role == "trainer" for holder in holders)

    def _asked(self, peer: str) -> None:
        """As the coordinator of a run that has nothing, or nothing any more: choose who begins it."""
        if self._asking[0] != self._averager.lineage.epoch:
            self._asking = self._averager.lineage.epoch, set()
        self._asking[1].add(peer)
        roster = self._session.roster
        presence = roster.get(peer)
        is_trainer = presence is not None and presence.card.role == "trainer"
        if not (self._averager.lease.is_held and is_trainer):
            return
        epoch = self._averager.lineage.epoch
        if epoch and not self._is_all_lost():
            return
        if epoch != self._directory.begins_at:
            self._beginner, self._directory.begins_at = Beginner(), epoch
        if self._beginner.asked_by(peer, self._session.clock.monotonic(), roster.__contains__):
            self._directory.beginner = peer
            self._directory.announce()

    def _is_all_lost(self) -> bool:
        """Whether this peer should have a backup and has none, and nobody has offered any state for a while."""
        offered, roster = self._directory.announcements, self._session.roster
        is_saved = self._backups is None or bool(self._backups.epochs())
        if is_saved or offered.epochs(roster) or offered.epochs(roster, backups=True):
            self._lost_since = None
            return False
        now = self._session.clock.monotonic()
        self._lost_since = now if self._lost_since is None else self._lost_since
        return now >= self._lost_since + LOST_SECONDS

    def _begins(self) -> bool | None:
        """Whether the coordinator has chosen this peer to begin; None: it has chosen nobody."""
        coordinator = self._averager.lease.view.holder or ""
        epoch = self._averager.lineage.epoch
        chosen = self._directory.announcements.beginner(coordinator, self._session.roster, epoch)
        return chosen == self._session.peer_id if chosen else None

    def _situation(self, head: int, waited_seconds: float, *, has_moved: bool) -> Situation:
        directory, own = self._directory, self._session.peer_id
        offers = [directory.newest(head - 1), directory.newest(backups=True)]
        others = [presence.card.role for presence in self._session.roster if presence.peer != own]
        cut = self._cuts.safe_for(self._session.group)
        return Situation(
            cut=cut.number if cut is not None else 0,
            cut_offer=self._cut_offer(),
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
            if step.cut:
                await self._cuts.note_return(step.cut)
                self.counts["returned_to_cut"] += 1
            if own is not None:
                snapshot = own.hold()
            else:
                snapshot = await self._taker.fetch_for_resuming(verdict, base, report, progress, until)
        except (MovedOnError, RevisionConflictError) as error:
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
