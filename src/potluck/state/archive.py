"""A peer's backups: written now and then, announced, uploaded. What a keeper has on disk, and elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from potluck.hub.subjects import MAIN, Subjects
from potluck.round.member.workers import Workers
from potluck.state.announcement import KeptState
from potluck.state.backupfile import BackupInfo
from potluck.state.backups import Backups, backup_folder
from potluck.state.chunkpool import ChunkPool
from potluck.state.config import StateConfig
from potluck.state.saving import Saver
from potluck.state.shelf import Held
from potluck.state.snapshot import Snapshot
from potluck.state.uploads import Uploads
from potluck.state.uploadtargets import target_of

LAST_UPLOAD_SECONDS = 30.0  # for the last backup to get where backups are uploaded to


class Archive:
    """One peer's backups; empty, and of no effect, where it writes none. Lives on the event loop."""

    def __init__(
        self, config: StateConfig, subjects: Subjects, pool: ChunkPool, workers: Workers, on_backup: Callable[[], None]
    ) -> None:
        """`on_backup` is told that what is on disk has changed."""
        self.backups: Backups | None = None
        """The folder; None: nothing is saved."""
        self._saver: Saver | None = None
        self._uploads: Uploads | None = None
        self._on_backup = on_backup
        if config.folder is None or config.backups is None:
            return
        folder = backup_folder(config.folder, subjects.group)
        self.backups = Backups(folder, config.backups, run=subjects.scope, pool=pool)
        self._saver = Saver(self.backups, workers, self._backed_up)
        target = config.upload_to
        if target is not None:
            if isinstance(target, str) and subjects.group != MAIN and not target.startswith("hf://"):
                target = f"{target.rstrip('/')}/groups/{subjects.group}"  # as on disk; a repository is for one group
            keep_last = config.backups.keep_last
            self._uploads = Uploads(target_of(target, keep_last=keep_last) if isinstance(target, str) else target)

    async def start(self) -> None:
        """See what is on disk, and upload from now on."""
        if self._uploads is not None:
            self._uploads.start()
        if self._saver is not None:
            await self._saver.look()

    async def finish_writing(self) -> None:
        """Finish the backup that is being written, and save what is newer. Idempotent."""
        if self._saver is not None:
            await self._saver.close()

    async def close(self) -> None:
        """Let the last backup get where it is uploaded to, if it does in 30 s. Idempotent."""
        if self._uploads is not None:
            await self._uploads.close(timeout_seconds=LAST_UPLOAD_SECONDS)

    def save(self, epoch: int, snapshot: Snapshot, *, made_at: int, at_once: bool = False) -> None:
        """Have a state written to disk, if a backup is due, or at once."""
        if self._saver is not None:
            self._saver.offer(epoch, snapshot, made_at=made_at, at_once=at_once)

    async def save_part(self, cut: int, held: Held) -> bool:
        """Save a state as the group's part of a cut; whether it is on disk."""
        return self._saver is not None and await self._saver.save_part(cut, held)

    def keep_last_copy(self) -> bool:
        """Save the newest state in the end, due or not: it would be lost with this peer. False: nothing is saved."""
        if self._saver is None:
            return False
        self._saver.is_last_copy = True
        return True

    def saved(self) -> tuple[KeptState, ...]:
        """What is on disk, as it is announced."""
        return self._saver.saved if self._saver is not None else ()

    def _backed_up(self, info: BackupInfo) -> None:
        self._on_backup()
        if self._uploads is not None:
            self._uploads.offer(info)

    @property
    def upload_counts(self) -> Counter[str]:
        """How many backups were offered, uploaded, passed over."""
        return self._uploads.counts if self._uploads is not None else Counter()

    def statistics(self) -> dict[str, int | str]:
        """Counters."""
        found: dict[str, int | str] = {f"upload_{name}": count for name, count in self.upload_counts.items()}
        if self._saver is not None:
            found |= {f"save_{name}": count for name, count in self._saver.counts.items()}
        if self.backups is not None:
            found |= {f"backup_{name}": value for name, value in self.backups.statistics().items()}
        return found
