"""Checkpoints on their way to somewhere else, in the background.

    uploads = Uploads(target_of("s3://bucket/run", keep_last=3))
    uploads.start()
    uploads.offer(backup)                # a StateKeeper does so with each that it writes (StateConfig.upload_to)

Only the newest counts: a backup that is offered while another is being sent, or waits for a server that is away, takes
the place of whatever waits. Nothing here ever stops the training.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from dataclasses import dataclass

from potluck import tasks
from potluck.errors import ConfigurationError, PotluckError, RetryableError
from potluck.faultpoints import reach
from potluck.round.member.workers import Workers
from potluck.state.backupfile import BackupInfo
from potluck.state.uploadtargets import UploadTarget

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadConfig:
    """How often to upload, and how patiently."""

    every_backups: int = 1
    """Each so many-th backup is uploaded."""

    first_pause_seconds: float = 5.0
    """After a failure; doubles with each."""

    longest_pause_seconds: float = 600.0
    """But is never longer than this."""

    def __post_init__(self) -> None:
        if self.every_backups < 1 or not 0 < self.first_pause_seconds <= self.longest_pause_seconds:
            raise ConfigurationError(f"{self}: every_backups is at least 1, and pauses are more than 0 and grow")


class Uploads:
    """Uploads to one target. Lives on one event loop."""

    def __init__(
        self, target: UploadTarget, config: UploadConfig | None = None, *, workers: Workers | None = None
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.last_error = ""
        self.last_epoch: int | None = None
        """Of the checkpoint that was uploaded last."""
        self._target = target
        self._config = config or UploadConfig()
        self._workers = workers or Workers(1)
        self._offered: BackupInfo | None = None
        self._news = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._workers.start()
        self._task = asyncio.create_task(self._run(), name="state: uploads")

    async def close(self, *, timeout_seconds: float = 0.0) -> None:
        """Give what is offered so long to get there, then end, when what is being sent is there.

        Idempotent.
        """
        if timeout_seconds > 0 and self._task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_seconds):
                    await self._is_idle.wait()
        await tasks.end(self._task)
        self._task = None
        await self._workers.close()

    def offer(self, info: BackupInfo) -> None:
        """A backup was written."""
        self.counts["offered"] += 1
        if (self.counts["offered"] - 1) % self._config.every_backups:
            return
        if self._offered is not None:
            self.counts["passed_over"] += 1
        self._offered = info
        self._is_idle.clear()
        self._news.set()

    async def _run(self) -> None:
        num_failures = 0
        while True:
            await self._news.wait()
            self._news.clear()
            info, self._offered = self._offered, None
            if info is None:
                continue
            if await self._upload(info):
                num_failures = 0
            else:
                num_failures += 1
                if self._offered is None:
                    self._offered = info
                self._news.set()
                pause = self._config.first_pause_seconds * 2 ** (num_failures - 1)
                await asyncio.sleep(min(pause, self._config.longest_pause_seconds))
            if self._offered is None:
                self._is_idle.set()

    async def _upload(self, info: BackupInfo) -> bool:
        """Returns whether this is done with, for good or for bad."""
        try:
            await self._workers.run(lambda: self._target.upload(info))
        except RetryableError as error:
            if not info.record_path.exists():  # the folder has gone on without it
                self.counts["passed_over"] += 1
                return True
            self.counts["retries"] += 1
            self.last_error = str(error)
            logger.warning("%s: tried again later", error)
            return False
        except Exception as error:  # whatever the target's libraries raise, the training goes on; logged and counted
            self.counts["failed"] += 1
            self.last_error = str(error)
            if isinstance(error, PotluckError):
                logger.error("%s", error)  # noqa: TRY400 - somebody has to change something, and the message says what
            else:
                logger.exception("epoch %d could not be uploaded to %s", info.epoch, self._target.name)
            return True
        self.counts["uploaded"] += 1
        self.last_epoch, self.last_error = info.epoch, ""
        logger.info("epoch %d was uploaded to %s", info.epoch, self._target.name)
        reach("state.uploaded", epoch=info.epoch)
        return True

    def statistics(self) -> dict[str, int | str | None]:
        """Counters, and what went wrong last."""
        return {**self.counts, "last_epoch": self.last_epoch, "last_error": self.last_error}
