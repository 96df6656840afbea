"""Backups of what is published, written by a worker: the training never waits for a disk."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from potluck.errors import BackupError
from potluck.round.workers import Workers
from potluck.state.backupfile import BackupInfo
from potluck.state.backups import Backups
from potluck.state.snapshot import Snapshot

logger = logging.getLogger(__name__)


class Saver:
    """Saves one state at a time."""

    def __init__(self, backups: Backups, workers: Workers, on_backup: Callable[[BackupInfo], None]) -> None:
        """`on_backup` is told of each backup that was written, on the event loop."""
        self.counts: Counter[str] = Counter()
        self._backups = backups
        self._workers = workers
        self._on_backup = on_backup
        self._task: asyncio.Task[None] | None = None

    def offer(self, epoch: int, snapshot: Snapshot, *, made_at: int) -> None:
        """Save this state, if a backup is due and the one before is written."""
        if not self._backups.is_due(epoch):
            return
        if self._task is not None and not self._task.done():
            self.counts["skipped"] += 1
            logger.warning("epoch %d is not saved, since the backup before it is still being written", epoch)
            return
        self._task = asyncio.create_task(self._save(epoch, snapshot.hold(), made_at), name="state: backup")

    async def close(self) -> None:
        """Finish the backup that is being written. Calling it twice does no harm."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _save(self, epoch: int, snapshot: Snapshot, made_at: int) -> None:
        try:
            info = await self._workers.run(lambda: self._backups.save(snapshot, epoch=epoch, made_at=made_at))
            self._on_backup(info)
        except BackupError as error:
            logger.error("%s", error)  # noqa: TRY400 - the disk's fault, and the message says it all
        except Exception:  # a bug here must not stop the training; logged and counted
            self.counts["errors"] += 1
            logger.exception("the backup of epoch %d failed", epoch)
        finally:
            snapshot.release()
