"""Backups in a folder: written now and then, kept by a rule, restored at start.

    backups = Backups(folder, BackupConfig(every_epochs=10, keep_last=3), run="my-first-run")
    backups.save(snapshot, epoch=120, made_at=120)      # blocking: for a thread
    restored = backups.restore()                        # the newest that is whole, whatever became of those after it

A disk that is full or broken is an error to be told (BackupError), and never a reason to stop training.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from potluck.errors import BackupError, ConfigurationError
from potluck.faultpoints import reach
from potluck.hub.server.diskspace import measure
from potluck.hub.subjects import MAIN
from potluck.state.announcement import MAX_SAVED, KeptState
from potluck.state.backupfile import BackupInfo, read_info, read_snapshot, record_path, write_backup, write_cut

if TYPE_CHECKING:  # they import torch, which a list of backups does not need
    from potluck.state.chunkpool import ChunkPool
    from potluck.state.snapshot import Snapshot

logger = logging.getLogger(__name__)

DRAFT_SECONDS = 3600.0  # a draft or tensors without a record that are so old belong to nobody any more
SPARE_BYTES = 1024 * 1024  # beside the tensors
_RECORD = re.compile(r"epoch-(\d{8,})\.json")
_TENSORS = re.compile(r"epoch-(\d{8,})-[0-9a-f]{12}\.safetensors|\..*\.draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupConfig:
    """How often backups are written, and which of them stay."""

    every_epochs: int = 10
    """A backup is due when so many epochs have passed since the last one; 0: only when this peer leaves and nobody else
    has the newest state."""

    keep_last: int = 3
    """The newest so many stay."""

    keep_every: int = 0
    """Of those before, each whose epoch is a multiple of this stays for good; 0: none does."""

    spread: int = 16
    """Of the others, so many stay, the further back the wider apart: a run can go back far; 0: none does."""

    most_bytes: int = 10 * 10**9
    """All of them take no more of the disk than this; the spread makes room. The newest stay in any case."""

    def __post_init__(self) -> None:
        least = min(self.every_epochs, self.keep_every, self.spread, self.most_bytes)
        if self.keep_last < 1 or least < 0:
            raise ConfigurationError(
                f"{self}: keep_last must be at least 1, every_epochs, keep_every, spread and most_bytes at least 0"
            )


def superfluous(sizes: Mapping[int, int], config: BackupConfig) -> list[int]:
    """Which backups may go (pure), of the epochs that there are, each with its bytes.

    One after the other of the spread goes where it leaves the smallest gap for its age. So ages grow by about the same
    factor from one to the next, however often backups are written; the oldest goes last.
    """
    ordered = sorted(sizes)
    newest, older = ordered[-config.keep_last :], ordered[: -config.keep_last]
    spread = [epoch for epoch in older if not config.keep_every or epoch % config.keep_every != 0]
    num_bytes, gone = sum(sizes.values()), []
    while len(spread) > config.spread or (spread and num_bytes > config.most_bytes):
        gone.append(spread.pop(_most_crowded([*spread, newest[0]], newest[-1])))
        num_bytes -= sizes[gone[-1]]
    return sorted(gone)


def _most_crowded(epochs: list[int], now: int) -> int:
    """The place of the epoch, but for the last, without which the gap is smallest for its age."""
    gaps = [(after - before) / (now - before) for before, after in zip(epochs, epochs[2:], strict=False)]
    return gaps.index(min(gaps)) + 1 if gaps else 0


@dataclass(frozen=True, slots=True)
class Restored:
    """A state that was read from disk; release the snapshot when done."""

    info: BackupInfo
    snapshot: Snapshot


def backup_folder(folder: Path, group: str = MAIN) -> Path:
    """Where the backups of a group are, in the folder of a run."""
    return folder / "backups" if group == MAIN else folder / "groups" / group / "backups"


class Backups:
    """The backups of one group of a run in one folder. Its methods block; one thread at a time may save."""

    def __init__(
        self, folder: Path, config: BackupConfig | None = None, *, run: str = "", pool: ChunkPool | None = None
    ) -> None:
        self.folder = folder
        self.config = config or BackupConfig()
        self.counts: Counter[str] = Counter()
        self.last_error = ""
        self._run = run
        self._pool = pool
        self._last_epoch: int | None = None

    def is_due(self, epoch: int) -> bool:
        """Whether this epoch should be saved."""
        if not self.config.every_epochs:
            return False
        last = self._last_epoch
        return last is None or epoch < last or epoch >= last + self.config.every_epochs

    def save(self, snapshot: Snapshot, *, epoch: int, made_at: int | None = None, cut: int = 0) -> BackupInfo:
        """Write a backup, then remove those that are not to be kept. BackupError when it cannot be written.

        With `cut` it is the group's part of one: later epochs may be here already, and stay.
        """
        last = self._last_epoch if cut else None
        self._last_epoch = max(epoch, last or 0)  # also if it fails: the next attempt is as far off as the next backup
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            info = self._tagged(epoch, snapshot.digest, cut) if cut else None
            if info is None:
                self._make_room(snapshot.inventory.num_bytes)
                info = write_backup(
                    self.folder,
                    snapshot,
                    epoch=epoch,
                    made_at=epoch if made_at is None else made_at,
                    run=self._run,
                    saved_at=time.time(),
                    cut=cut,
                )
            reach("state.backup_saved", epoch=epoch)
            if not cut:
                self._put_aside(epoch)
            self._clear_away(self.config)
        except OSError as error:
            self.counts["failed"] += 1
            self.last_error = (
                f"epoch {epoch} could not be saved in {self.folder}: {error}. Make room there, or choose another folder"
            )
            raise BackupError(self.last_error) from error
        self.counts["saved"] += 1
        self.last_error = ""
        return info

    def _tagged(self, epoch: int, digest: str, cut: int) -> BackupInfo | None:
        """The backup of that state, now part of a cut; None where it is not here, or cannot be read."""
        if epoch not in self.epochs():
            return None
        try:
            info = self._info(epoch)
            return write_cut(info, cut) if info.digest == digest and info.tensors_path.is_file() else None
        except BackupError:
            return None

    def _make_room(self, num_bytes: int) -> None:
        space = measure(self.folder)
        spare_bytes = max(SPARE_BYTES, space.reserve_bytes)  # others write to that disk too: on a host, the hub
        if space.free_bytes < num_bytes + spare_bytes:
            self._clear_away(replace(self.config, spread=0))  # the newest state is worth more than all of the spread
            space = measure(self.folder)
        if space.free_bytes < num_bytes + spare_bytes:
            needed = f"{num_bytes / 1e6:.1f} MB are needed, {spare_bytes / 1e6:.1f} MB are to stay free for others"
            raise OSError(f"the disk is too full, {space}: {needed}")

    def epochs(self) -> list[int]:
        """The epochs that there are records of, the newest first; they may be broken."""
        if not self.folder.is_dir():
            return []
        found = (_RECORD.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def _newest_first(self) -> Iterator[int]:
        """Each epoch once. The folder is looked at each time: another process may save and clear away meanwhile."""
        tried: set[int] = set()
        while left := [epoch for epoch in self.epochs() if epoch not in tried]:
            tried.add(left[0])
            yield left[0]

    def infos(self) -> list[BackupInfo]:
        """The backups whose records can be read, the newest first; their tensors are looked at by `read` only."""
        found = []
        for epoch in self._newest_first():
            try:
                found.append(self._info(epoch))
            except BackupError as error:
                self._say_broken(epoch, error)
        return found

    def announced(self) -> tuple[KeptState, ...]:
        """The newest backups whose records can be read, as others are told of them, and the newest part of a cut."""
        infos = []
        for epoch in self._newest_first():
            with contextlib.suppress(BackupError):  # told when somebody wants to read it
                infos.append(self._info(epoch))
        told = infos[:MAX_SAVED]
        part = next((info for info in infos if info.cuts), None)
        if part is not None and part not in told:
            told[-1] = part
        return tuple(
            KeptState(
                epoch=info.epoch,
                digest=info.digest,
                num_bytes=info.inventory.num_bytes,
                made_at=info.made_at,
                is_backup=True,
                cut=info.cut,
            )
            for info in told
        )

    def read(self, info: BackupInfo) -> Snapshot:
        """The state of a backup, every byte of it checked; BackupError when something is wrong."""
        from potluck.state.chunkpool import ChunkPool

        if self._pool is None:
            self._pool = ChunkPool()
        return read_snapshot(info, self._pool)

    def latest(self) -> BackupInfo | None:
        """The newest backup whose record can be read; its tensors are looked at by `restore` only."""
        for epoch in self._newest_first():
            try:
                return self._info(epoch)
            except BackupError as error:
                self._say_broken(epoch, error)
        return None

    def restore(self, epoch: int | None = None) -> Restored | None:
        """The newest backup that is whole, or that of an epoch; None when there is none. Broken ones are named."""
        for candidate in self._newest_first() if epoch is None else [epoch]:
            try:
                info = self._info(candidate)
                snapshot = self.read(info)
            except BackupError as error:
                self._say_broken(candidate, error)
                continue
            self._last_epoch = info.epoch
            logger.info("the backup of epoch %d is read: %s", info.epoch, info.inventory.describe())
            return Restored(info, snapshot)
        return None

    def _info(self, epoch: int) -> BackupInfo:
        info = read_info(record_path(self.folder, epoch))
        if info.epoch != epoch:
            raise BackupError(f"{info.record_path} is of epoch {info.epoch}: its name is wrong")
        if self._run and info.run != self._run:
            raise BackupError(f"{info.record_path} is of the run {info.run!r}, not of {self._run!r}")
        return info

    def _say_broken(self, epoch: int, error: BackupError) -> None:
        if not record_path(self.folder, epoch).exists():
            return  # cleared away while it was looked at
        self.counts["broken"] += 1
        self.last_error = str(error)
        logger.warning("the backup of epoch %d cannot be used, the one before it is tried: %s", epoch, error)

    def _put_aside(self, epoch: int) -> None:
        """Epochs only grow, so later ones are of a lineage that the run did not go on with: they get other names."""
        for later in self.epochs():
            if later > epoch:
                suffix = f".abandoned-at-{epoch}"
                tensors = self.folder / (self._tensors_of(later) or "none")
                for path in (record_path(self.folder, later), tensors):
                    if path.exists():
                        path.rename(path.with_name(path.name + suffix))
                logger.warning("the run went on from epoch %d: the backup of epoch %d is put aside", epoch, later)

    def _clear_away(self, config: BackupConfig) -> None:
        sizes, cuts = self._sizes(), self._cuts()
        # Parts of cuts are counted apart, by the numbers of the cuts: so all groups of a run keep the same ones.
        plain = superfluous({epoch: size for epoch, size in sizes.items() if epoch not in cuts}, config)
        of_cuts = set(superfluous({cut: sizes.get(epoch, 0) for epoch, cut in cuts.items()}, config))
        for epoch in [*plain, *(epoch for epoch, cut in cuts.items() if cut in of_cuts)]:
            record_path(self.folder, epoch).unlink(missing_ok=True)
        kept = set(self.epochs())
        named = {self._tensors_of(epoch) for epoch in kept}
        for path in self.folder.iterdir():
            match = _TENSORS.fullmatch(path.name)
            if match and path.name not in named and self._is_nobodys(path, match[1], kept):
                path.unlink(missing_ok=True)

    def _sizes(self) -> dict[int, int]:
        """The bytes of the tensors of each epoch that there is a record of."""
        sizes = dict.fromkeys(self.epochs(), 0)
        for path in self.folder.iterdir():
            match = _TENSORS.fullmatch(path.name)
            if match and match[1] and int(match[1]) in sizes:
                with contextlib.suppress(FileNotFoundError):  # another process has cleared it away
                    sizes[int(match[1])] += path.stat().st_size
        return sizes

    def _cuts(self) -> dict[int, int]:
        """The epochs that are parts of cuts, and of which."""
        found: dict[int, int] = {}
        for epoch in self.epochs():
            with contextlib.suppress(BackupError):  # told when somebody wants to read it
                cut = read_info(record_path(self.folder, epoch)).cut
                found |= {epoch: cut} if cut else {}
        return found

    def _tensors_of(self, epoch: int) -> str:
        try:
            return read_info(record_path(self.folder, epoch)).tensors_path.name
        except BackupError:  # it will be told when somebody wants to restore it
            return ""

    def _is_nobodys(self, path: Path, epoch: str | None, kept: set[int]) -> bool:
        """Whether a file is of a backup that was removed, or so old that nobody can be writing it."""
        if epoch is not None and int(epoch) not in kept and kept and int(epoch) < max(kept):
            return True
        try:
            return time.time() - path.stat().st_mtime > DRAFT_SECONDS
        except FileNotFoundError:
            return False

    def statistics(self) -> dict[str, int | str]:
        """Counters, and what went wrong last."""
        return {**self.counts, "last_error": self.last_error}
