"""A peer's state in a run: published, kept, served, fetched, compared, saved. The package's docstring shows its use."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from torch import Tensor

from potluck.hub.subjects import MAIN
from potluck.round.averager import Averager, RoundPeer
from potluck.round.member.workers import Workers, workers_for
from potluck.run.cutboard import board_of
from potluck.run.group import group_of
from potluck.state.announcement import Verdict
from potluck.state.appraising import Appraiser
from potluck.state.archive import Archive
from potluck.state.backups import Backups
from potluck.state.checkedfetch import CheckedFetch
from potluck.state.chunkpool import ChunkPool
from potluck.state.comparing import Comparison
from potluck.state.config import StateConfig
from potluck.state.cutdesk import CutDesk
from potluck.state.cutting import Cutting
from potluck.state.directory import StateDirectory
from potluck.state.fetched import FetchedState
from potluck.state.fetcher import FetchReport, MovedOnError, Progress
from potluck.state.handingover import hand_over
from potluck.state.inventory import Metadata
from potluck.state.publishing import Publication, Publisher
from potluck.state.reinstating import Reinstating
from potluck.state.resuming import EpochSource, Resuming
from potluck.state.returning import Returning
from potluck.state.serving import Serving
from potluck.state.shelf import Held, Shelf
from potluck.state.sketch import SEED_BYTES, difference, sketch
from potluck.state.snapshot import Snapshot, specs_of, stage

logger = logging.getLogger(__name__)

T = TypeVar("T")

SETTLE_SECONDS = 2.0  # how long a repair waits for the last of the others to speak
VERDICT_SECONDS = 5.0  # how long it looks for a state to take over: the training waits for it


class StateKeeper:
    """One peer's dealings with the run's state. Lives on one event loop; `publish` may be called from any thread."""

    def __init__(
        self,
        peer: RoundPeer,
        averager: EpochSource,
        config: StateConfig | None = None,
        *,
        workers: Workers | None = None,
    ) -> None:
        self.config = config or StateConfig()
        self.counts: Counter[str] = Counter()
        group = group_of(peer)
        self._session = session = group.session
        self._links = group.links
        self._averager = averager
        self._pool = ChunkPool()
        self._workers = workers or workers_for(session.whole, group.name, "states", 2)
        self._has_workers = False
        self.shelf = Shelf(self.config.num_kept)
        """What this peer holds."""
        self._comparison = Comparison(
            lambda epoch: self.directory.verdict(epoch),
            lambda verdict: self._appraiser.difference(verdict),
            lambda state: self._appraiser.suspect(state),
        )
        self.directory = StateDirectory(
            session, self.shelf, self._holders, self._comparison.past, lambda: self.archive.saved()
        )
        self._appraiser = Appraiser(
            session,
            self._links,
            self.directory,
            self.shelf,
            self._workers,
            averager.lineage,
            check_every_seconds=self.config.compare_every_seconds,
            on_checked=self._comparison.checked,
        )
        self._checked_fetch = CheckedFetch(
            session,
            self._links,
            self._workers,
            self._pool,
            self.directory,
            self.shelf,
            self._appraiser,
            averager.lineage,
            self.config,
        )
        self._serving = Serving(
            self._links,
            self.shelf,
            self.config.serving,
            session.clock,
            self._workers,
            peer_id=session.peer_id,
            is_trainer=session.card.role == "trainer",
            is_in_round=lambda: averager.is_in_round,
        )
        self._publisher = Publisher(self._pool, self._workers, newest=self._newest, take=self._published)
        self.archive = Archive(self.config, session.subjects, self._pool, self._workers, self.directory.announce)
        self._resuming = Resuming(
            session,
            averager,
            self.directory,
            self.shelf,
            self,
            backups=self.archive.backups,
            workers=self._workers,
            grace_seconds=self.config.grace_seconds,
            cuts=board_of(session.whole),
        )
        self.restoring = Reinstating(
            session, self.directory, self.shelf, self, backups=self.archive.backups, workers=self._workers
        )
        is_watching = session.card.role == "observer"
        self.cutting = (
            None if is_watching else Cutting(session, averager, self.directory, self.shelf, self, self.archive)
        )
        """This group's part in the cuts of the run; None: this peer only looks."""
        self.cut_desk: CutDesk | None = None
        """What makes them, where this peer coordinates main."""
        if group.name == MAIN and not is_watching:
            self.cut_desk = CutDesk(session, self._links, averager.lease, self.config.cut_every_seconds)
        self._handed_over: int | None = None  # the epoch
        self._stop_listening: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Listen to keepers, and serve what there is."""
        self._workers.start()
        self._has_workers = True
        try:
            self._publisher.start()
            await self.archive.start()
            self._stop_listening = self.directory.listen(self._comparison.compare)
            await self.directory.start()
            if self.cutting is not None:
                await self.cutting.start()
            if self.cut_desk is not None:
                await self.cut_desk.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Finish the backup that is being written, serve nothing more. Idempotent.

        What is uploaded gets there first, if it does in 30 s.
        """
        self._stop_listening()
        if self.cut_desk is not None:
            await self.cut_desk.close()
        if self.cutting is not None:
            await self.cutting.close()
        await self._appraiser.close()
        await self._publisher.close()
        await self.archive.finish_writing()
        await self.directory.close()
        await self._serving.close()
        await self.archive.close()
        if self._has_workers:
            self._has_workers = False
            await self._workers.close()
        self.shelf.close()

    # Publishing

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        metadata: Metadata,
        epoch: int,
        *,
        own: Collection[str] = (),
        steady: Collection[str] = (),
        is_held: bool = False,
    ) -> Publication:
        """Copy the state of an epoch, from any thread; the rest happens elsewhere. The future holds the digest.

        When this returns, the tensors may change, but for those that `steady` names: a worker copies them, and who is
        about to change them calls `wait_until_copied()` of what is returned. If somebody does not, the future holds
        StateUnavailableError; and so it does when states come faster than they can be hashed and this one was passed
        over. With `is_held` the state can be had back (`tensors()`), until `release()`.

        All who hold the epoch should hold these very bits and this metadata, and that is compared; but for the tensors
        that `own` names, and what the metadata has under "own".
        """
        return self._publisher.publish(tensors, metadata, epoch, own=own, steady=steady, is_held=is_held)

    def _newest(self) -> Snapshot | None:
        newest = self.shelf.newest()
        return newest.snapshot if newest is not None else None

    async def _published(self, epoch: int, snapshot: Snapshot) -> None:
        is_first = epoch == 0 and self._resuming.has_begun  # all others get it from here
        await self._put(Held(epoch, snapshot, made_at=epoch), keeps=is_first or None)
        self.save(epoch, snapshot, made_at=epoch)

    def save(self, epoch: int, snapshot: Snapshot, *, made_at: int, at_once: bool = False) -> None:
        """Have a state written to disk, if a backup is due, or at once."""
        self.archive.save(epoch, snapshot, made_at=made_at, at_once=at_once)

    @property
    def backups(self) -> Backups | None:
        """What is on disk; None: nothing is saved."""
        return self.archive.backups

    async def _put(self, held: Held, *, keeps: bool | None = None, is_taken: bool = False) -> None:
        if held.snapshot.inventory.has_common_tensors:
            self._comparison.note(held.announced(), is_taken=is_taken)
        if self.keeps if keeps is None else keeps:
            self.shelf.put(held.epoch, held.snapshot, made_at=held.made_at)
        else:
            self.shelf.clear()
        if self.cutting is not None:
            self.cutting.came()
        self.directory.announce()
        await self._serving.make_room()
        self._appraiser.came(held)
        self._comparison.compare()

    async def hand_over(self, *, timeout_seconds: float, most_seconds: float | None = None) -> bool:
        """Before leaving: wait until somebody who stays has the newest state, or trains on; False: not in time.

        While somebody fetches it, it waits for `most_seconds`. If nobody has it then, it is saved here, if this peer
        may write: the run goes on from it when this peer comes back.
        """
        await self._publisher.until_idle()
        if self.kept_epoch is not None and self.kept_epoch == self._handed_over:
            return True
        is_safe = await hand_over(
            self._session,
            self.directory,
            self.shelf,
            lambda: self._serving.counts["chunks"],
            timeout_seconds=timeout_seconds,
            most_seconds=timeout_seconds if most_seconds is None else most_seconds,
        )
        self._handed_over = self.kept_epoch if is_safe else None
        if not is_safe and self.archive.keep_last_copy():
            logger.warning("the state is saved in %s: start this peer again, and the run has it", self.config.folder)
        return is_safe

    @property
    def kept_epoch(self) -> int | None:
        """The newest epoch whose state this peer holds for others."""
        newest = self.shelf.newest()
        return newest.epoch if newest is not None else None

    @property
    def keeps(self) -> bool:
        """Whether this peer keeps states for others."""
        role = self._session.card.role
        if self.config.keep != "auto":
            return self.config.keep == "always"
        if role != "trainer":
            return role == "aux"
        trainers = [p.peer for p in self._session.roster.alive() if p.card.role == "trainer"]
        ranked = sorted(trainers, key=lambda peer: hashlib.sha256(peer.encode()).digest())
        return self._session.peer_id in ranked[: self.config.num_trainer_keepers]

    # Comparing

    def _holders(self, epoch: int) -> tuple[str, ...]:
        head = self._averager.lineage.head
        return head.holders if head is not None and head.epoch == epoch else ()

    @property
    def deviation(self) -> Verdict | None:
        """What the others hold, where it is not what this peer has for the same epoch. Any thread may read it."""
        return self._comparison.deviation

    async def repair(self, tensors: Mapping[str, Tensor], *, epoch: int, timeout_seconds: float) -> FetchedState | None:
        """What the others hold, of that epoch or a later one; None where it turns out that this peer holds it.

        Only the chunks that differ from the tensors are fetched; do not change them meanwhile.
        """
        await self._publisher.until_idle()
        self._comparison.compare()
        if self.deviation is None:
            return None
        fetched = await self.fetch(
            at_least_epoch=epoch,
            base=tensors,
            settle_seconds=SETTLE_SECONDS,
            verdict_seconds=VERDICT_SECONDS,
            is_patient=False,
            timeout_seconds=timeout_seconds,
        )
        self.counts["repaired"] += 1
        return fetched

    async def look_for_damage(self) -> None:
        """Compare the others' newest states by value, where their digests differ; who holds a damaged one is named."""
        await self._appraiser.look()

    async def is_rounding(self, fetched: FetchedState, tensors: Mapping[str, Tensor]) -> bool:
        """Whether a state that was fetched differs from these tensors, and by no more than rounding, everywhere."""
        snapshot, seed = fetched.snapshot, secrets.token_bytes(SEED_BYTES)
        if snapshot.inventory.tensors != specs_of(tensors):
            return False

        def compare() -> bool:
            own = snapshot.inventory.own_names
            mine = stage(tensors, fetched.metadata, self._pool, own=own).hashed()
            try:
                apart = difference(sketch(snapshot, seed), sketch(mine, seed))
            finally:
                mine.release()
            return apart.is_rounding and not apart.is_confined

        return await self._workers.run(compare)

    # Fetching

    async def fetch(
        self,
        *,
        epoch: int | None = None,
        at_least_epoch: int = 0,
        base: Mapping[str, Tensor] | None = None,
        progress: Progress | None = None,
        settle_seconds: float = 0.0,
        verdict_seconds: float | None = None,
        is_patient: bool = True,
        timeout_seconds: float,
    ) -> FetchedState:
        """The newest state that can be believed, or that of an epoch, from as many keepers as have it.

        Only what is not in `base`, or on this peer's shelf, is fetched; do not change the tensors meanwhile. For
        `settle_seconds` it waits for all keepers to have spoken, so that none is taken that most do not have; and for
        `verdict_seconds` at most until it is known which state to fetch. With `is_patient` the timeout begins anew
        with each byte that comes.
        StateUnavailableError when nobody serves it in time: it says who offers what.
        """
        now = self._session.clock.monotonic()
        until = now + timeout_seconds
        patience_seconds = timeout_seconds if is_patient else 0.0
        known_until = until if verdict_seconds is None else min(until, now + verdict_seconds)
        await self._publisher.until_idle()  # what is older than the state to come must not be put in its place
        based = await self.staged(base) if base is not None else None
        assembly = self._checked_fetch.new_assembly()
        report = FetchReport()
        try:
            while True:
                verdict = await self.directory.until_verdict(
                    epoch, self._averager.lineage, known_until, at_least=at_least_epoch, settle_seconds=settle_seconds
                )
                own = self.shelf.find(verdict.digest)
                try:
                    if own is not None:  # this peer went back to it on behalf of all
                        snapshot = own.hold()
                    else:
                        snapshot = await self._checked_fetch.fetch(
                            verdict,
                            assembly,
                            based,
                            report,
                            progress,
                            until,
                            patience_seconds,
                            is_any=epoch is None,
                        )
                    break
                except MovedOnError as error:
                    logger.info("the fetch of epoch %d starts anew: %s", verdict.epoch, error)
                    until = max(until, report.came_at + patience_seconds)
                    known_until = until if verdict_seconds is None else known_until
            await self.take_over(Held(verdict.epoch, snapshot, verdict.made_at))
            changed = snapshot.inventory.changed_since(based.inventory) if based is not None else None
            return FetchedState(verdict.epoch, verdict.made_at, snapshot, changed, report)
        finally:
            assembly.close()
            if based is not None:
                based.release()
            self._pool.trim()  # so much memory is not needed otherwise

    # Going on

    async def resume(
        self,
        *,
        base: Mapping[str, Tensor] | None = None,
        progress: Progress | None = None,
        timeout_seconds: float,
    ) -> FetchedState | None:
        """The state to go on from, of any peer, on disk or in memory; None: nothing is there yet, begin.

        Everybody calls it when starting, and when no peer has the state of the run's epoch (see
        resumechoice.py). What is in `base` is not fetched.
        """
        try:
            return await self._resuming.resume(base, progress=progress, timeout_seconds=timeout_seconds)
        finally:
            self._pool.trim()

    @property
    def is_in_the_making(self) -> bool:
        """Whether trainers have the averages of the present epoch, and will have its state."""
        return self._resuming.is_in_the_making

    async def fetch_for_resuming(
        self,
        verdict: Verdict,
        base: Mapping[str, Tensor] | None,
        report: FetchReport,
        progress: Progress | None,
        until: float,
    ) -> Snapshot:
        """Fetch a state that was chosen; MovedOnError when nobody serves it any more."""
        based = await self.staged(base) if base is not None else None
        assembly = self._checked_fetch.new_assembly()
        patience_seconds = max(until - self._session.clock.monotonic(), 0.0)
        try:
            return await self._checked_fetch.fetch(verdict, assembly, based, report, progress, until, patience_seconds)
        finally:
            assembly.close()
            if based is not None:
                based.release()

    async def staged(self, base: Mapping[str, Tensor]) -> Snapshot:
        """A copy of these tensors, hashed."""
        return await self._workers.run(lambda: stage(base, {}, self._pool).hashed())

    async def take_over(self, held: Held, *, keeps: bool | None = None) -> None:
        """This is the peer's state from now on, whatever it had before."""
        self._comparison.start_anew()
        await self._put(held, keeps=keeps, is_taken=True)

    def go_back_with(self, averager: Averager) -> Returning:
        """Carry out orders to go back to a cut, from now on; to be closed before this keeper is."""
        return Returning(self._session.group, averager, self.restoring, board_of(self._session.whole))

    async def work(self, on_tensors: Callable[[], T]) -> T:
        """Have work on tensors done by one of the workers."""
        return await self._workers.run(on_tensors)

    def statistics(self) -> dict[str, int | str]:
        """Counters."""
        parts = {
            "": self.counts + self._checked_fetch.counts + self._comparison.counts + self._resuming.counts,
            "appraise_": self._appraiser.counts,
            "publish_": self._publisher.counts,
            "serve_": self._serving.counts,
            "announce_": self.directory.counts,
        }
        found: dict[str, int | str] = {f"{prefix}{k}": v for prefix, counts in parts.items() for k, v in counts.items()}
        return found | self.archive.statistics() | self._pool.statistics()
