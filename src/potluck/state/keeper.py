"""A peer's state in a run: published, kept, served, fetched, compared, saved. The package's docstring shows its use."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from torch import Tensor

from potluck.errors import ConfigurationError
from potluck.round.averager import RoundPeer
from potluck.round.member.workers import Workers
from potluck.state.announcement import KeptState, Verdict
from potluck.state.appraising import Appraiser
from potluck.state.assembly import Assembly
from potluck.state.backupfile import BackupInfo
from potluck.state.backups import BackupConfig, Backups
from potluck.state.chunklog import ChunkLog
from potluck.state.chunkpool import ChunkPool
from potluck.state.comparing import Comparison
from potluck.state.directory import StateDirectory
from potluck.state.fetched import FetchedState
from potluck.state.fetcher import FetchConfig, Fetcher, FetchReport, MovedOnError, Progress
from potluck.state.handingover import hand_over
from potluck.state.inventory import Metadata
from potluck.state.publishing import Publication, Publisher
from potluck.state.reinstating import Reinstating
from potluck.state.resuming import EpochSource, Resuming
from potluck.state.saving import Saver
from potluck.state.serving import Serving, ServingConfig
from potluck.state.shelf import Held, Shelf
from potluck.state.sketch import SEED_BYTES, difference, sketch
from potluck.state.snapshot import Snapshot, specs_of, stage
from potluck.state.uploads import Uploads
from potluck.state.uploadtargets import UploadTarget, target_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 0.5  # after a state that was not what it was said to be
SETTLE_SECONDS = 2.0  # how long a repair waits for the last of the others to speak
VERDICT_SECONDS = 5.0  # how long it looks for a state to take over: the training waits for it
LAST_UPLOAD_SECONDS = 30.0  # for the last backup to get where backups are uploaded to


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """What this peer does with the run's state."""

    keep: Literal["auto", "always", "never"] = "auto"
    """Whether to keep states for others. Auto: aux peers do, and a few of the trainers; observers do not."""

    num_trainer_keepers: int = 4
    """How many of the trainers keep states where each decides by itself."""

    num_kept: int = 2
    """How many epochs a keeper has in memory; those that are being fetched stay longer."""

    grace_seconds: float = 10.0
    """How long a coordinator waits, when a run goes on, for a newer state than anybody has offered."""

    folder: Path | None = None
    """For backups and for what is fetched half; None: nothing is written to disk."""

    backups: BackupConfig | None = field(default_factory=BackupConfig)
    """How often to save, and what to keep; None: never save."""

    upload_to: str | UploadTarget | None = None
    """Where each backup is uploaded to, in the background: `hf://USER/REPOSITORY`, or any folder that fsspec knows, as
    `s3://BUCKET/RUN`. One peer of a run is enough."""

    serving: ServingConfig = field(default_factory=ServingConfig)
    """How much to give to others."""

    fetching: FetchConfig = field(default_factory=FetchConfig)
    """How patiently to fetch."""

    on_progress: Progress | None = field(default=None, repr=False)
    """Told, on the event loop, how many bytes of a state are here, of how many, while it is fetched."""

    def __post_init__(self) -> None:
        if self.num_kept < 1 or self.num_trainer_keepers < 1:
            raise ConfigurationError(f"{self}: num_kept and num_trainer_keepers are at least 1")
        if not self.grace_seconds >= 0:
            raise ConfigurationError(f"grace_seconds={self.grace_seconds}: it must be 0 or more")
        if self.upload_to is not None and (self.folder is None or self.backups is None):
            raise ConfigurationError(
                "upload_to sends backups, and none are written: give a folder, and do not turn them off"
            )


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
        self._session = session = peer.session
        self._links = peer.links
        self._averager = averager
        self._pool = ChunkPool()
        self._workers = workers or Workers(2)
        self._shelf = Shelf(self.config.num_kept)
        self._comparison = Comparison(
            lambda epoch: self.directory.verdict(epoch),
            lambda verdict: self._appraiser.difference(verdict),
            lambda state: self._appraiser.suspect(state),
        )
        self.directory = StateDirectory(session, self._shelf, self._holders, self._comparison.past, self._saved)
        self._appraiser = Appraiser(
            session,
            self._links,
            self.directory,
            self._shelf,
            self._workers,
            averager.lineage,
            on_checked=self._comparison.checked,
        )
        self._serving = Serving(
            self._links,
            self._shelf,
            self.config.serving,
            session.clock,
            self._workers,
            peer_id=session.peer_id,
            is_trainer=session.card.role == "trainer",
            is_in_round=lambda: averager.is_in_round,
        )
        self._publisher = Publisher(self._pool, self._workers, newest=self._newest, take=self._published)
        self.backups: Backups | None = None
        self._saver: Saver | None = None
        if self.config.folder is not None and self.config.backups is not None:
            folder = self.config.folder / "backups"
            self.backups = Backups(folder, self.config.backups, run=session.subjects.run, pool=self._pool)
            self._saver = Saver(self.backups, self._workers, self._backed_up)
        self._uploads = _uploads_by(self.config)
        self._resuming = Resuming(
            session,
            averager,
            self.directory,
            self._shelf,
            self,
            backups=self.backups,
            workers=self._workers,
            grace_seconds=self.config.grace_seconds,
        )
        self.restoring = Reinstating(
            session, self.directory, self._shelf, self, backups=self.backups, workers=self._workers
        )
        self._stop_listening: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Listen to keepers, and serve what there is."""
        self._workers.start()
        try:
            self._publisher.start()
            if self._uploads is not None:
                self._uploads.start()
            if self._saver is not None:
                await self._saver.look()
            self._stop_listening = self.directory.listen(self._comparison.compare)
            await self.directory.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Finish the backup that is being written, serve nothing more. Calling it twice does no harm.

        What is uploaded gets there first, if it does in 30 s.
        """
        self._stop_listening()
        await self._appraiser.close()
        await self._publisher.close()
        if self._saver is not None:
            await self._saver.close()
        await self.directory.close()
        await self._serving.close()
        if self._uploads is not None:
            await self._uploads.close(timeout_seconds=LAST_UPLOAD_SECONDS)
        await self._workers.close()
        self._shelf.close()

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
        newest = self._shelf.newest()
        return newest.snapshot if newest is not None else None

    async def _published(self, epoch: int, snapshot: Snapshot) -> None:
        is_first = epoch == 0 and self._resuming.has_begun  # all others get it from here
        await self._put(Held(epoch, snapshot, made_at=epoch), keeps=is_first or None)
        self.save(epoch, snapshot, made_at=epoch)

    def save(self, epoch: int, snapshot: Snapshot, *, made_at: int, at_once: bool = False) -> None:
        """Have a state written to disk, if a backup is due, or at once."""
        if self._saver is not None:
            self._saver.offer(epoch, snapshot, made_at=made_at, at_once=at_once)

    def _saved(self) -> tuple[KeptState, ...]:
        return self._saver.saved if self._saver is not None else ()

    def _backed_up(self, info: BackupInfo) -> None:
        self.directory.announce()
        if self._uploads is not None:
            self._uploads.offer(info)

    @property
    def upload_counts(self) -> Counter[str]:
        """How many backups were offered, uploaded, passed over."""
        return self._uploads.counts if self._uploads is not None else Counter()

    async def _put(self, held: Held, *, keeps: bool | None = None, is_taken: bool = False) -> None:
        if held.snapshot.inventory.has_common_tensors:
            self._comparison.note(held.announced(), is_taken=is_taken)
        if self.keeps if keeps is None else keeps:
            self._shelf.put(held.epoch, held.snapshot, made_at=held.made_at)
        else:
            self._shelf.clear()
        self.directory.announce()
        await self._serving.make_room()
        self._appraiser.came(held)
        self._comparison.compare()

    async def hand_over(self, *, timeout_seconds: float) -> bool:
        """Before leaving: wait until somebody who stays has the newest state, or trains on; False: not in time."""
        await self._publisher.until_idle()
        return await hand_over(self._session, self.directory, self._shelf, timeout_seconds)

    @property
    def kept_epoch(self) -> int | None:
        """The newest epoch whose state this peer holds for others."""
        newest = self._shelf.newest()
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
        timeout_seconds: float,
    ) -> FetchedState:
        """The newest state that can be believed, or that of an epoch, from as many keepers as have it.

        Only what is not in `base`, or on this peer's shelf, is fetched; do not change the tensors meanwhile. For
        `settle_seconds` it waits for all keepers to have spoken, so that none is taken that most do not have; and for
        `verdict_seconds` at most until it is known which state to fetch.
        StateUnavailableError when nobody serves it in time: it says who offers what.
        """
        now = self._session.clock.monotonic()
        until = now + timeout_seconds
        known_until = until if verdict_seconds is None else min(until, now + verdict_seconds)
        await self._publisher.until_idle()  # what is older than the state to come must not be put in its place
        based = await self._staged(base)
        assembly = Assembly(self._pool, self._chunk_log())
        report = FetchReport()
        try:
            while True:
                verdict = await self.directory.until_verdict(
                    epoch, self._averager.lineage, known_until, at_least=at_least_epoch, settle_seconds=settle_seconds
                )
                own = self._shelf.find(verdict.digest)
                try:
                    if own is not None:  # this peer went back to it on behalf of all
                        snapshot = own.hold()
                    else:
                        snapshot = await self._fetch_one(verdict, assembly, based, report, progress, until)
                    break
                except MovedOnError as error:
                    logger.info("the fetch of epoch %d starts anew: %s", verdict.epoch, error)
            await self.take_over(Held(verdict.epoch, snapshot, verdict.made_at))
            changed = snapshot.inventory.changed_since(based.inventory) if based is not None else None
            return FetchedState(verdict.epoch, verdict.made_at, snapshot, changed, report)
        finally:
            assembly.close()
            if based is not None:
                based.release()
            self._pool.trim()  # so much memory is not needed otherwise

    def _chunk_log(self) -> ChunkLog | None:
        return ChunkLog(self.config.folder / "fetching.chunks") if self.config.folder is not None else None

    async def _fetch_one(
        self,
        verdict: Verdict,
        assembly: Assembly,
        based: Snapshot | None,
        report: FetchReport,
        progress: Progress | None,
        until: float,
    ) -> Snapshot:
        bases = [held.snapshot.hold() for held in self._shelf] + ([based.hold()] if based is not None else [])
        fetcher = Fetcher(
            self._links,
            self._session.clock,
            self._workers,
            self.config.fetching,
            assembly,
            keepers=lambda digest: self.directory.keepers(verdict.epoch, digest),
            report=report,
            progress=progress or self.config.on_progress,
            is_replaceable=verdict.is_replaceable,
        )
        stop_listening = self.directory.listen(fetcher.keepers_changed)
        try:
            snapshot = await fetcher.fetch(verdict.digest, bases, until=until)
        except MovedOnError:
            self.directory.note_failure(verdict)
            raise
        except ConfigurationError as error:  # one keeper's word, where others have not been asked yet
            if not (verdict.is_replaceable and self.directory.note_failure(verdict)):
                raise
            raise MovedOnError(f"the state {verdict.digest[:12]} is of no use here: {error}") from error
        finally:
            stop_listening()
            for base in bases:
                base.release()
        if verdict.common and snapshot.common_digest != verdict.common:  # only a keeper's own part is taken on trust
            snapshot.release()
            self.directory.note_failure(verdict)
            await asyncio.sleep(RETRY_SECONDS)
            raise MovedOnError(f"{verdict.digest[:12]} was announced to be {verdict.common[:12]} in part, and is not")
        if not await self._appraiser.verify(verdict, snapshot):
            snapshot.release()
            self.directory.note_failure(verdict)
            raise MovedOnError(f"the state {verdict.digest[:12]} is not what its keeper answered for")
        self.counts["fetched"] += 1
        return snapshot

    # Going on

    async def resume(
        self,
        *,
        base: Mapping[str, Tensor] | None = None,
        progress: Progress | None = None,
        timeout_seconds: float,
    ) -> FetchedState | None:
        """The state to go on from, whoever has it, on disk or in memory; None: nothing is there yet, begin.

        Everybody calls it when starting, and when the state of the run's epoch is to be had from nobody. See resume.py.
        What is in `base` is not fetched.
        """
        try:
            return await self._resuming.resume(base, progress=progress, timeout_seconds=timeout_seconds)
        finally:
            self._pool.trim()

    async def fetch_for_resuming(
        self,
        verdict: Verdict,
        base: Mapping[str, Tensor] | None,
        report: FetchReport,
        progress: Progress | None,
        until: float,
    ) -> Snapshot:
        """Fetch a state that was chosen; MovedOnError when nobody serves it any more."""
        based = await self._staged(base)
        assembly = Assembly(self._pool, self._chunk_log())
        try:
            return await self._fetch_one(verdict, assembly, based, report, progress, until)
        finally:
            assembly.close()
            if based is not None:
                based.release()

    async def _staged(self, base: Mapping[str, Tensor] | None) -> Snapshot | None:
        return await self._workers.run(lambda: stage(base, {}, self._pool).hashed()) if base is not None else None

    async def take_over(self, held: Held, *, keeps: bool | None = None) -> None:
        """This is the peer's state from now on, whatever it had before."""
        self._comparison.start_anew()
        await self._put(held, keeps=keeps, is_taken=True)

    async def work(self, on_tensors: Callable[[], T]) -> T:
        """Have work on tensors done by one of the workers."""
        return await self._workers.run(on_tensors)

    def statistics(self) -> dict[str, int | str]:
        """Counters."""
        parts = {
            "": self.counts + self._comparison.counts + self._resuming.counts,
            "appraise_": self._appraiser.counts,
            "publish_": self._publisher.counts,
            "serve_": self._serving.counts,
        }
        parts["announce_"] = self.directory.counts
        if self._saver is not None:
            parts["save_"] = self._saver.counts
        parts["upload_"] = self.upload_counts
        found: dict[str, int | str] = {f"{prefix}{k}": v for prefix, counts in parts.items() for k, v in counts.items()}
        if self.backups is not None:
            found |= {f"backup_{name}": value for name, value in self.backups.statistics().items()}
        return found | self._pool.statistics()


def _uploads_by(config: StateConfig) -> Uploads | None:
    target = config.upload_to
    if target is None:
        return None
    assert config.backups is not None, "checked when it was made"
    return Uploads(target_of(target, keep_last=config.backups.keep_last) if isinstance(target, str) else target)
