"""A peer's state in a run: published, kept, served, fetched, compared, saved. The interface of this package.

keeper = StateKeeper(peer, averager, StateConfig(folder=folder))
await keeper.start()
fetched = await keeper.resume(timeout_seconds=600)          # at start: whatever the run has; None: begin afresh
keeper.publish(tensors, {"epoch": 7}, epoch=7)              # from any thread, after each epoch
if keeper.deviation is not None:                            # our bits differ from those of the others
    with await keeper.fetch(epoch=7, base=tensors, timeout_seconds=60) as fetched:
        fetched.write_into(tensors)                         # only the chunks that differ
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from potluck.errors import ConfigurationError, StateUnavailableError
from potluck.peer.lease import Lease
from potluck.round.averager import RoundPeer
from potluck.round.lineage import Lineage
from potluck.round.workers import Workers
from potluck.state.announcement import Verdict
from potluck.state.assembly import Assembly
from potluck.state.backupfile import BackupInfo
from potluck.state.backups import BackupConfig, Backups
from potluck.state.chunklog import ChunkLog
from potluck.state.chunkpool import ChunkPool
from potluck.state.fetched import FetchedState
from potluck.state.fetcher import FetchConfig, Fetcher, FetchReport, MovedOnError, Progress
from potluck.state.herald import ASK_EVERY_SECONDS, Herald
from potluck.state.inventory import Metadata
from potluck.state.publishing import Publisher
from potluck.state.resume import Situation, Step, next_step
from potluck.state.saving import Saver
from potluck.state.serving import Serving, ServingConfig
from potluck.state.shelf import Shelf
from potluck.state.snapshot import Snapshot, stage

logger = logging.getLogger(__name__)

NUM_DIGESTS = 16  # of own states that are remembered


class EpochSource(Protocol):
    """Where the run is, and who coordinates; `potluck.round.averager.Averager` is one."""

    lineage: Lineage
    lease: Lease


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

    serving: ServingConfig = field(default_factory=ServingConfig)
    """How much to give to others."""

    fetching: FetchConfig = field(default_factory=FetchConfig)
    """How patiently to fetch."""

    def __post_init__(self) -> None:
        if self.num_kept < 1 or self.num_trainer_keepers < 1:
            raise ConfigurationError(f"{self}: num_kept and num_trainer_keepers are at least 1")
        if not self.grace_seconds >= 0:
            raise ConfigurationError(f"grace_seconds={self.grace_seconds}: it must be 0 or more")


class StateKeeper:
    """One peer's dealings with the run's state. Lives on one event loop; `publish` may be called from any thread."""

    def __init__(
        self,
        peer: RoundPeer,
        averager: EpochSource,
        config: StateConfig | None = None,
        *,
        workers: Workers | None = None,
        on_backup: Callable[[BackupInfo], None] | None = None,
    ) -> None:
        """`on_backup` is told of each backup that was written, on the event loop."""
        self.config = config or StateConfig()
        self.counts: Counter[str] = Counter()
        self.deviation: Verdict | None = None
        """What the others hold, where it is not what this peer has for the same epoch."""
        self._session = session = peer.session
        self._links = peer.links
        self._averager = averager
        self._pool = ChunkPool()
        self._workers = workers or Workers(2)
        self._shelf = Shelf(self.config.num_kept)
        self.herald = Herald(session, self._shelf, self._holders)
        self._serving = Serving(
            self._links,
            self._shelf,
            self.config.serving,
            session.clock,
            peer_id=session.peer_id,
            is_trainer=session.card.role == "trainer",
        )
        self._publisher = Publisher(self._pool, self._workers, newest=self._newest, take=self._published)
        self.backups: Backups | None = None
        self._saver: Saver | None = None
        if self.config.folder is not None and self.config.backups is not None:
            folder = self.config.folder / "backups"
            self.backups = Backups(folder, self.config.backups, run=session.subjects.run, pool=self._pool)
            self._saver = Saver(self.backups, self._workers, on_backup or (lambda _info: None))
        self._digests: dict[int, str] = {}  # of the states that this peer had, by epoch
        self._stop_listening: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Listen to keepers, and serve what there is."""
        self._workers.start()
        try:
            self._publisher.start()
            self._stop_listening = self.herald.listen(self._compare)
            await self.herald.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Finish the backup that is being written, serve nothing more. Calling it twice does no harm."""
        self._stop_listening()
        await self._publisher.close()
        if self._saver is not None:
            await self._saver.close()
        await self.herald.close()
        await self._serving.close()
        await self._workers.close()
        self._shelf.clear()

    # Publishing

    def publish(self, tensors: Mapping[str, Tensor], metadata: Metadata, epoch: int) -> concurrent.futures.Future[str]:
        """Copy the state of an epoch, from any thread; the rest happens elsewhere. The future holds the digest.

        When this returns, the tensors may change. The metadata has to be the same on all peers. The future holds
        StateUnavailableError when states come faster than they can be hashed and this one was passed over.
        """
        return self._publisher.publish(tensors, metadata, epoch)

    def _newest(self) -> Snapshot | None:
        newest = self._shelf.newest()
        return newest.snapshot if newest is not None else None

    async def _published(self, epoch: int, snapshot: Snapshot) -> None:
        await self._put(epoch, snapshot, made_at=epoch)
        if self._saver is not None:
            self._saver.offer(epoch, snapshot, made_at=epoch)

    async def _put(self, epoch: int, snapshot: Snapshot, *, made_at: int, keeps: bool | None = None) -> None:
        self._digests[epoch] = snapshot.digest
        while len(self._digests) > NUM_DIGESTS:
            del self._digests[min(self._digests)]
        if self.keeps if keeps is None else keeps:
            self._shelf.put(epoch, snapshot, made_at=made_at)
        else:
            self._shelf.clear()
        self.herald.announce()
        await self._serving.make_room()
        self._compare()

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

    def _compare(self) -> None:
        """See whether the others hold what this peer has."""
        epoch = max(self._digests, default=None)
        verdict = self.herald.verdict(epoch) if epoch is not None else None
        if verdict is None or verdict.digest == self._digests[verdict.epoch]:
            self.deviation = None
            return
        if self.deviation is None or self.deviation.epoch != verdict.epoch:
            self.counts["deviations"] += 1
            logger.warning(
                "this peer's state of epoch %d is not that of %s: the chunks that differ have to be fetched",
                verdict.epoch,
                ", ".join(verdict.keepers),
            )
        self.deviation = verdict

    # Fetching

    async def fetch(
        self,
        *,
        epoch: int | None = None,
        base: Mapping[str, Tensor] | None = None,
        progress: Progress | None = None,
        timeout_seconds: float,
    ) -> FetchedState:
        """The newest state that can be believed, or that of an epoch, from as many keepers as have it.

        Only what is not in `base`, or on this peer's shelf, is fetched; do not change the tensors meanwhile.
        StateUnavailableError when nobody serves it in time: it says who offers what.
        """
        until = self._session.clock.monotonic() + timeout_seconds
        based = await self._workers.run(lambda: stage(base, {}, self._pool).hashed()) if base is not None else None
        assembly = Assembly(self._pool, self._chunk_log())
        report = FetchReport()
        try:
            while True:
                verdict = await self.herald.until_verdict(epoch, self._averager.lineage, until)
                try:
                    snapshot = await self._fetch_one(verdict, assembly, based, report, progress, until)
                    break
                except MovedOnError as error:
                    logger.info("the fetch of epoch %d starts anew: %s", verdict.epoch, error)
            await self._put(verdict.epoch, snapshot, made_at=verdict.made_at)
            return FetchedState(verdict.epoch, verdict.made_at, snapshot, _changed(snapshot, based), report)
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
            keepers=lambda digest: self.herald.keepers(verdict.epoch, digest),
            report=report,
            progress=progress,
        )
        stop_listening = self.herald.listen(fetcher.keepers_changed)
        try:
            snapshot = await fetcher.fetch(verdict.digest, bases, until=until)
        finally:
            stop_listening()
            for base in bases:
                base.release()
        self.counts["fetched"] += 1
        return snapshot

    # Going on

    async def resume(self, *, progress: Progress | None = None, timeout_seconds: float) -> FetchedState | None:
        """The state to go on from, whoever has it, on disk or in memory; None: nothing is there yet, begin.

        Everybody calls it when starting, and when the state of the run's epoch is to be had from nobody. See resume.py.
        """
        clock, lineage = self._session.clock, self._averager.lineage
        until = clock.monotonic() + timeout_seconds
        await self._offer_backup()
        head, since = lineage.epoch, clock.monotonic()
        while True:
            if lineage.epoch != head:
                head, since = lineage.epoch, clock.monotonic()
            step = next_step(self._situation(head, clock.monotonic() - since), self.config.grace_seconds)
            if step.kind == "begin":
                return None
            if step.verdict is not None and (taken := await self._take_step(step, step.verdict, head, progress, until)):
                self._shelf.drop_backup()
                self._pool.trim()
                self.herald.announce()
                return taken
            if clock.monotonic() >= until:
                raise StateUnavailableError(
                    f"the run cannot go on yet: {step.reason}. Start a peer that has a newer backup, or a coordinator"
                )
            await self.herald.ask()
            await self.herald.until_changed(min(max(until - clock.monotonic(), 0.0), ASK_EVERY_SECONDS))

    async def _offer_backup(self) -> None:
        if self.backups is None or any(held.is_backup for held in self._shelf):
            return
        restored = await self._workers.run(self.backups.restore)
        if restored is not None:
            self._shelf.put(restored.info.epoch, restored.snapshot, made_at=restored.info.made_at, is_backup=True)
            restored.snapshot.release()
            self.herald.announce()

    def _situation(self, head: int, waited_seconds: float) -> Situation:
        herald = self.herald
        offers = [herald.newest(head - 1), herald.newest(backups=True)]
        return Situation(
            head_epoch=head,
            present=herald.verdict(head),
            offers=[offer for offer in offers if offer is not None],
            is_coordinator=self._averager.lease.is_held,
            waited_seconds=waited_seconds,
        )

    async def _take_step(
        self, step: Step, verdict: Verdict, head: int, progress: Progress | None, until: float
    ) -> FetchedState | None:
        """Take the state that was chosen; None if it cannot be had after all."""
        report = FetchReport()
        own = self._shelf.find(verdict.digest)
        if own is not None:
            snapshot = own.hold()
        else:
            assembly = Assembly(self._pool, self._chunk_log())
            try:
                snapshot = await self._fetch_one(verdict, assembly, None, report, progress, until)
            except MovedOnError as error:
                logger.info("another state to go on from is looked for: %s", error)
                return None
            finally:
                assembly.close()
        keeps = None
        self._regret_newer_backup(verdict)
        if step.kind == "adopt":
            (logger.info if verdict.made_at == head else logger.warning)("%s", step.reason)
            self.counts["adopted"] += 1
            keeps = True  # whatever it does otherwise: all others get it from here
        await self._put(head, snapshot, made_at=verdict.made_at, keeps=keeps)
        return FetchedState(head, verdict.made_at, snapshot, None, report)

    def _regret_newer_backup(self, verdict: Verdict) -> None:
        for held in self._shelf:
            if held.is_backup and held.made_at > verdict.made_at:
                logger.warning(
                    "this peer has a backup of epoch %d, and the run goes on from a state of epoch %d: the backup "
                    "stays on disk. If the run should go on from it, stop all peers and start this one first",
                    held.made_at,
                    verdict.made_at,
                )

    def statistics(self) -> dict[str, int | str]:
        """Counters."""
        parts = {"": self.counts, "publish_": self._publisher.counts, "serve_": self._serving.counts}
        parts["announce_"] = self.herald.counts
        if self._saver is not None:
            parts["save_"] = self._saver.counts
        found: dict[str, int | str] = {f"{prefix}{k}": v for prefix, counts in parts.items() for k, v in counts.items()}
        if self.backups is not None:
            found |= {f"backup_{name}": value for name, value in self.backups.statistics().items()}
        return found | self._pool.statistics()


def _changed(snapshot: Snapshot, base: Snapshot | None) -> frozenset[int] | None:
    """The chunks of a state that are not the same in tensors of the same kind."""
    if base is None or base.inventory.tensors != snapshot.inventory.tensors:
        return None
    inventory, other = snapshot.inventory, base.inventory
    return frozenset(n for n in range(inventory.num_chunks) if inventory.hash_of(n) != other.hash_of(n))
