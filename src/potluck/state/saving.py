"""Backups of what is published, written by a worker: the training never waits for a disk.

The newest state that was not due, or came while a disk was busy, is held until the next comes; who leaves the run saves
it. So a run that is stopped in an orderly way goes on with nothing lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from potluck.errors import BackupError
from potluck.round.member.workers import Workers
from potluck.state.announcement import KeptState
from potluck.state.backupfile import BackupInfo
from potluck.state.backups import Backups
from potluck.state.shelf import Held
from potluck.state.snapshot import Snapshot

logger = logging.getLogger(__name__)


class Saver:
    """Saves one state at a time."""

    def __init__(self, backups: Backups, workers: Workers, on_backup: Callable[[BackupInfo], None]) -> None:
        """`on_backup` is told of each backup that was written, on the event loop."""
        self.counts: Counter[str] = Counter()
        self.saved: tuple[KeptState, ...] = ()
        """What is on disk, as it is announced."""
        self._backups = backups
        self._workers = workers
        self._on_backup = on_backup
        self._task: asyncio.Task[None] | None = None
        self._unsaved: Held | None = None
        self.is_last_copy = False
        """Whether the newest state would be lost with this peer: then it is saved in the end, due or not."""
        self._is_failing = False

    async def look(self) -> None:
        """See what is on disk."""
        self.saved = await self._workers.run(self._backups.announced)

    def offer(self, epoch: int, snapshot: Snapshot, *, made_at: int, at_once: bool = False) -> None:
        """Save this state, if a backup is due, or `at_once`, and the one before is written."""
        self._drop_unsaved()
        if not (at_once or self._backups.is_due(epoch)):
            self._unsaved = Held(epoch, snapshot.hold(), made_at)
        elif self._task is not None and not self._task.done():
            self.counts["skipped"] += 1
            logger.warning("epoch %d is not saved, since the backup before it is still being written", epoch)
            self._unsaved = Held(epoch, snapshot.hold(), made_at)
        else:
            self._task = asyncio.create_task(self._save(epoch, snapshot.hold(), made_at), name="state: backup")

    async def save_part(self, cut: int, held: Held) -> bool:
        """Save a state as the group's part of a cut, after the backup that is being written; whether it is on disk."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])
        saving = self._save(held.epoch, held.snapshot.hold(), held.made_at, cut)
        self._task = asyncio.create_task(saving, name="state: backup of a cut")
        await asyncio.wait([self._task])
        return any(state.cut == cut for state in self.saved)

    async def close(self) -> None:
        """Finish the backup that is being written, and save what is newer. Idempotent."""
        if self._task is not None:
            await asyncio.wait([self._task])
        last, self._unsaved = self._unsaved, None
        if last is not None and not (self._backups.config.every_epochs or self.is_last_copy):
            last.snapshot.release()
        elif last is not None:
            await self._save(last.epoch, last.snapshot, last.made_at)

    def _drop_unsaved(self) -> None:
        if self._unsaved is not None:
            self._unsaved.snapshot.release()
            self._unsaved = None

    async def _save(self, epoch: int, snapshot: Snapshot, made_at: int, cut: int = 0) -> None:
        try:
            info = await self._workers.run(lambda: self._backups.save(snapshot, epoch=epoch, made_at=made_at, cut=cut))
            await self.look()
            self._on_backup(info)
            if self._is_failing:
                logger.warning("backups are written again: epoch %d is saved in %s", epoch, info.record_path.parent)
            self._is_failing = False
        except BackupError as error:
            self.counts["failed"] += 1
            if not self._is_failing:
                text = "%s. Training goes on without backups, and each one that is due is tried"
                logger.error(text, error)  # noqa: TRY400 - the disk's fault, and the message says it all
            self._is_failing = True
        except Exception:  # a bug here must not stop the training; logged and counted
            self.counts["errors"] += 1
            logger.exception("the backup of epoch %d failed", epoch)
        finally:
            snapshot.release()
