"""One group's part in the cuts of its run (run/cuts.py): named by its coordinator, held by its keepers, saved.

As the group's coordinator: name a committed epoch when a cut is wanted, have keepers hold the state, write down the
part once somebody does, and once a peer that is trusted or may coordinate has it on disk. As a keeper: hold what the
coordinator named until a later cut is made or this one is safe. As a peer that writes backups: save the part, under the
number of the cut; one that does not train fetches it for that.

Keepers have the newest few epochs alone, and the next may come before they have heard. So where nobody holds the epoch
that was named, one that is yet to come is: keepers know of it before they have it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from potluck import tasks
from potluck.errors import RetryableError
from potluck.peer.groupsession import GroupSession
from potluck.run.cutboard import Cut, CutPart, PartRecord, WantedCut, board_of
from potluck.state.announcement import Verdict
from potluck.state.archive import Archive
from potluck.state.directory import StateDirectory
from potluck.state.fetcher import FetchReport, MovedOnError
from potluck.state.resuming import EpochSource, StateTaker
from potluck.state.shelf import Held, Shelf

logger = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 1.0  # while a cut is made
HEARD_SECONDS = 2.0  # for keepers to say that they hold the epoch that was named
COMING_SECONDS = 15.0  # for an epoch that is yet to come, until one that is there is named again
GONE_SECONDS = 10.0  # for somebody to hold the very epoch that a program wants
FETCH_SECONDS = 600.0  # without anything coming
SAVE_AGAIN_SECONDS = 10.0  # after a disk or a fetch has failed


@dataclass(slots=True)
class _Naming:
    """The coordinator's search for an epoch that somebody holds."""

    number: int
    began: float
    epoch: int = -1
    named_at: float = field(default=0.0)
    num_ahead: int = 0  # how far ahead of the lineage the epoch is that was named


class Cutting:
    """One peer's part in the cuts, for one group. Lives on the event loop."""

    def __init__(
        self,
        session: GroupSession,
        averager: EpochSource,
        directory: StateDirectory,
        shelf: Shelf,
        taker: StateTaker,
        archive: Archive,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.board = board_of(session.whole)
        self._session = session
        self._averager = averager
        self._directory = directory
        self._shelf = shelf
        self._taker = taker
        self._archive = archive
        self._naming: _Naming | None = None
        self._told: PartRecord | None = None  # the newest that this peer has written, or found
        self._save_at = 0.0
        self._wake = asyncio.Event()
        self._stops: list[Callable[[], None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._saving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Follow what is said about cuts."""
        await self.board.start()
        self._stops = [self.board.listen(self._wake.set), self._directory.listen(self._heard)]
        self._tasks = [asyncio.create_task(self._run(), name="cuts: part of a group")]

    async def close(self) -> None:
        """Hold and save nothing more for cuts. Idempotent."""
        ours, self._tasks = self._tasks, []
        await tasks.end(*ours, self._saving)
        for stop in self._stops:
            stop()
        self._stops = []
        if ours:
            await self.board.close()

    def came(self) -> None:
        """This peer has another state: it may be what is wanted, and the next will take its place."""
        if self._keep():
            self._directory.announce()

    # What is under way

    @property
    def _wanted(self) -> WantedCut | None:
        """The cut that is being made, if this group is to be part of it."""
        wanted = self.board.wanted
        if wanted is None or wanted.number in self.board.made or self._is_over(wanted.number):
            return None
        return wanted if self._session.group in wanted.epochs else None

    @property
    def _made(self) -> Cut | None:
        """The newest cut, while it is not on trusted disks."""
        cut = self.board.made.get(max(self.board.made, default=0))
        if cut is None or self._is_over(cut.number):
            return None
        return cut if self._session.group in cut.parts else None

    def _is_over(self, number: int) -> bool:
        newest = max(self.board.made, default=0)
        return number < newest or (self.board.safe is not None and number <= self.board.safe.number)

    def _heard(self) -> None:
        if self._wanted is not None or self._made is not None:
            self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                if self._keep():
                    self._directory.announce()
                if self._averager.lease.is_held:
                    await self._coordinate()
                else:
                    self._stop_naming()
                self._save()
            except RetryableError as error:
                self.counts["failed"] += 1
                logger.debug("a cut waits: %s", error)
            except Exception:  # without cuts the run goes on; logged and counted
                self.counts["errors"] += 1
                logger.exception("the part of group %s in a cut failed", self._session.group)
            is_busy = self._wanted is not None or self._made is not None
            try:
                async with asyncio.timeout(LOOK_EVERY_SECONDS if is_busy else None):
                    await self._wake.wait()
            except TimeoutError:
                pass

    # As a keeper

    def _keep(self) -> bool:
        """Hold what is wanted, and nothing that is over; whether others should hear of it."""
        shelf, session = self._shelf, self._session
        wanted, made = self._wanted, self._made
        is_new = False
        if wanted is not None:
            holder = self._averager.lease.view.holder or ""
            number, epoch = self._directory.announcements.wanted_for_cut(holder, session.roster)
            if number == wanted.number:
                is_new |= shelf.keep_for_cut(number, epoch)
        if made is not None:
            is_new |= shelf.keep_for_cut(made.number, made.parts[session.group].epoch)
        return shelf.release_cuts(lambda number: not self._is_over(number)) or is_new

    # As the coordinator

    async def _coordinate(self) -> None:
        wanted, made = self._wanted, self._made
        if wanted is not None:
            await self._name_part(wanted)
        else:
            self._stop_naming()
        if made is not None:
            await self._tell_saved(made)

    def _stop_naming(self) -> None:
        self._naming = None
        if self._directory.cut:
            self._directory.cut = self._directory.cut_epoch = 0
            self._directory.announce()

    async def _name_part(self, wanted: WantedCut) -> None:
        number, group = wanted.number, self._session.group
        if self._told is None or self._told.number != number:
            found = await self.board.part(group)  # a coordinator before us may have got that far
            self._told = found if found is not None and found.number == number else None
        if self._told is not None:
            return
        now = self._session.clock.monotonic()
        if self._naming is None or self._naming.number != number:
            self._naming = _Naming(number, now)
        exact = wanted.epochs[group]
        if exact < 0 and self._has_nothing():
            await self._tell(PartRecord(number=number))
            return
        self._name_epoch(self._naming, exact, now)
        epoch = self._naming.epoch
        if epoch < 0:
            return
        verdict = self._directory.verdict(epoch)
        if verdict is None and epoch <= self._averager.lineage.epoch:
            await self._directory.settle(epoch, 0)
            verdict = self._directory.verdict(epoch)
        if verdict is not None and self._is_held(verdict, number):
            part = CutPart(
                epoch=epoch,
                digest=verdict.digest,
                common=verdict.common or verdict.digest,
                num_bytes=verdict.num_bytes,
            )
            await self._tell(PartRecord(number=number, part=part))
            return
        is_past = exact >= 0 and epoch < self._averager.lineage.epoch
        if is_past and now - self._naming.began >= GONE_SECONDS:
            await self._tell(PartRecord(number=number, trouble=self._describe_gone(epoch)))

    def _has_nothing(self) -> bool:
        """Whether nothing is committed yet, and nobody has a state."""
        return self._averager.lineage.epoch == 0 and self._directory.offered(0) is None

    def _name_epoch(self, naming: _Naming, exact: int, now: float) -> None:
        """Choose the epoch, and have keepers know it."""
        if exact >= 0:
            epoch = exact
        elif naming.epoch < 0:
            newest = self._directory.offered(self._averager.lineage.epoch)
            epoch = newest[0] if newest is not None else -1
        elif naming.num_ahead == 0 and now - naming.named_at >= HEARD_SECONDS:
            naming.num_ahead = 2
            epoch = self._averager.lineage.epoch + naming.num_ahead
        elif naming.num_ahead and now - naming.named_at >= COMING_SECONDS:
            # It has come and nobody has held it, or none comes: then the one that is there stays there.
            is_past = naming.epoch <= self._averager.lineage.epoch
            naming.num_ahead = 2 * naming.num_ahead if is_past else 0
            newest = self._directory.offered(self._averager.lineage.epoch)
            present = newest[0] if newest is not None else -1
            epoch = self._averager.lineage.epoch + naming.num_ahead if naming.num_ahead else present
        else:
            epoch = naming.epoch
        if epoch != naming.epoch:
            naming.epoch, naming.named_at = epoch, now
        if epoch >= 0 and (self._directory.cut, self._directory.cut_epoch) != (naming.number, epoch):
            self._directory.cut, self._directory.cut_epoch = naming.number, epoch
            self._directory.announce()
            self.came()

    def _is_held(self, verdict: Verdict, number: int) -> bool:
        """Whether somebody holds the state for this cut, and says so."""
        # What was told, not what was compared by value: that may be from before the cut was wanted.
        told = self._directory.announcements.claims(verdict.epoch, self._session.roster)
        return any(
            claim.peer in verdict.keepers and claim.state is not None and claim.state.cut == number for claim in told
        )

    def _describe_gone(self, epoch: int) -> str:
        newest = self._directory.offered(self._averager.lineage.epoch)
        there = f"the newest that is held is {newest[0]}" if newest is not None else "nobody holds any state of it"
        return (
            f"group {self._session.group} is at epoch {self._averager.lineage.epoch}, and nobody holds the state of "
            f"epoch {epoch} any more ({there}): name an epoch that is yet to come, or none"
        )

    async def _tell_saved(self, cut: Cut) -> None:
        part = cut.parts[self._session.group]
        if self._told is None or self._told.number != cut.number:
            self._told = await self.board.part(self._session.group)
        told = self._told
        if told is None or told.number != cut.number or told.is_saved:
            return
        if self._directory.announcements.savers(cut.number, part.epoch, self._session.roster):
            await self._tell(PartRecord(number=cut.number, part=part, is_saved=True))

    async def _tell(self, record: PartRecord) -> None:
        await self.board.put_part(self._session.group, record)
        self._told = record
        self.counts["parts"] += 1

    # As a peer that writes backups

    def _save(self) -> None:
        cut = self._made
        if cut is None or self._archive.backups is None or self._session.clock.monotonic() < self._save_at:
            return
        if any(state.cut == cut.number for state in self._archive.saved()):
            return
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save_part(cut), name="cuts: saving")

    async def _save_part(self, cut: Cut) -> None:
        part = cut.parts[self._session.group]
        is_saved = False
        try:
            held = await self._obtain(cut.number, part)
            if held is not None:
                try:
                    is_saved = await self._archive.save_part(cut.number, held)
                finally:
                    held.snapshot.release()
        except RetryableError as error:
            logger.info("cut %d is not saved here yet: %s", cut.number, error)
        except Exception:  # a bug here must not stop the training; logged and counted
            self.counts["errors"] += 1
            logger.exception("saving the part of group %s in cut %d failed", self._session.group, cut.number)
        self.counts["saved" if is_saved else "not_saved"] += 1
        if not is_saved:
            self._save_at = self._session.clock.monotonic() + SAVE_AGAIN_SECONDS
        self._directory.announce()
        self._wake.set()

    async def _obtain(self, number: int, part: CutPart) -> Held | None:
        """The state, held; None where this peer has it not, and its disk would not count: no fetch is worth that."""
        own = self._shelf.of_cut(number)
        if own is not None and own.snapshot.common_digest == part.common:
            return Held(part.epoch, own.snapshot.hold(), own.made_at)
        presence = self._session.roster.get(self._session.peer_id)
        if presence is None or not (presence.trusted or presence.coordinates):
            return None
        return await fetch_part(part, self._session, self._directory, self._taker)


async def fetch_part(part: CutPart, session: GroupSession, directory: StateDirectory, taker: StateTaker) -> Held:
    """The state of a part, from a peer that serves it; RetryableError where nobody does."""
    for claim in (*directory.claims(part.epoch), *directory.claims(part.epoch, backups=True)):
        state = claim.state
        if state is None or not state.is_served or state.compared != part.common:
            continue
        if claim.peer == session.peer_id:
            continue
        verdict = Verdict(
            epoch=part.epoch,
            digest=state.digest,
            common=part.common,
            num_bytes=state.num_bytes,
            made_at=state.made_at,
            keepers=(claim.peer,),
            is_trusted=True,
        )
        until = session.clock.monotonic() + FETCH_SECONDS
        try:
            snapshot = await taker.fetch_for_resuming(verdict, None, FetchReport(), None, until)
        except MovedOnError as error:
            logger.info("the state of epoch %d is looked for elsewhere: %s", part.epoch, error)
            continue
        return Held(part.epoch, snapshot, state.made_at)
    raise RetryableError(f"nobody serves the state of epoch {part.epoch} ({part.digest[:12]}…) now")
