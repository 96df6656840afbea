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

    async def close(self) -> None:
        """Finish the backup that is being written, and save what is newer. Calling it twice does no harm."""
        if self._task is not None:
            await asyncio.wait([self._task])
        last, self._unsaved = self._unsaved, None
        if last is not None:
            await self._save(last.epoch, last.snapshot, last.made_at)

    def _drop_unsaved(self) -> None:
        if self._unsaved is not None:
            self._unsaved.snapshot.release()
            self._unsaved = None

    async def _save(self, epoch: int, snapshot: Snapshot, made_at: int) -> None:
        try:
            info = await self._workers.run(lambda: self._backups.save(snapshot, epoch=epoch, made_at=made_at))
            await self.look()
            self._on_backup(info)
        except BackupError as error:
            logger.error("%s. Training goes on without this backup", error)  # noqa: TRY400 - the disk's fault, and the message says it all
        except Exception:  # a bug here must not stop the training; logged and counted
            self.counts["errors"] += 1
            logger.exception("the backup of epoch %d failed", epoch)
        finally:
            snapshot.release()
