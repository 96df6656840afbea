"""The host looks at held-out data every so many epochs: keeps the best state, and rolls back what leaves the band.

Built on the previews (previews.py), which compute the figures from the host's own backups and write them into the run's
history, where all monitors find them.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from potluck.errors import PotluckError, ProtocolError
from potluck.hub.connection import Store
from potluck.messages import Message, decode
from potluck.state.backupfile import BackupInfo, record_path
from potluck.state.backups import Backups
from potluck.training.books.history import EVALUATION_LOSS, Preview, RoundRecord
from potluck.training.books.lossband import Evaluated, good_ones, leaves_band, members_between, upper_edge
from potluck.training.manifest.manifest import Manifest

logger = logging.getLogger(__name__)

BEST = "best"  # beside `backups` in the host's folder of states
LAST_GOOD = "last-good"  # what the gate goes back to: backups may have made room for newer ones by then

M = TypeVar("M", bound=Message)
RollBack = Callable[[BackupInfo, str], Awaitable[None]]
"""Orders the run back to this state, for this reason."""


class Evaluations:
    """What the host makes of each evaluation. Lives on the event loop."""

    def __init__(
        self, states: Path, history: Store, manifest: Callable[[], Manifest | None], roll_back: RollBack
    ) -> None:
        """`states` is the host's folder of states; `manifest` returns the newest one."""
        self.good: list[Evaluated] = []
        self._knows_the_past = False  # a host that starts again goes on with what the run's history has
        self._backups = states / "backups"
        self._best = states / BEST
        self._last_good = states / LAST_GOOD
        self._history = history
        self._manifest = manifest
        self._roll_back = roll_back

    async def judge(self, preview: Preview, info: BackupInfo) -> None:
        """One more evaluation, of the state in this backup."""
        loss, manifest = preview.figures.get(EVALUATION_LOSS), self._manifest()
        if loss is None or manifest is None:
            return
        newest = Evaluated(preview.epoch, loss)
        if not self._knows_the_past:
            self.good = good_ones(await self._evaluated_before(newest.epoch), manifest.evaluation)
            self._knows_the_past = True
        if leaves_band(self.good, newest, manifest.evaluation):
            await self._refuse(newest, manifest)
            return
        if math.isfinite(loss):
            if all(loss < each.loss for each in self.good):
                keep_only(info, self._best)
            if manifest.evaluation.gate:
                keep_only(info, self._last_good)
            self.good.append(newest)

    async def _refuse(self, newest: Evaluated, manifest: Manifest) -> None:
        before, edge = self.good[-1], upper_edge(self.good, manifest.evaluation)
        who = ", ".join(members_between(await self._rounds(), before.epoch, newest.epoch)) or "nobody known"
        reason = f"held-out loss {newest.loss:.4f} at epoch {newest.epoch} is above {edge:.4f}; since then: {who}"
        if not manifest.evaluation.gate:
            logger.warning("%s", reason)
            return
        there = self._backup_of(before.epoch)
        if there is None:
            logger.error("%s; but the backup of epoch %d is gone: is the disk full?", reason, before.epoch)
            return
        logger.warning("back to epoch %d: %s", before.epoch, reason)
        try:
            await self._roll_back(there, reason)
        except PotluckError as error:
            logger.warning("the order to go back was not given, the next evaluation tries again: %s", error)

    def _backup_of(self, epoch: int) -> BackupInfo | None:
        """Among the backups, where those who go back look for it."""
        backups, kept = Backups(self._backups), Backups(self._last_good)
        lost = [info for info in kept.infos() if info.epoch == epoch and epoch not in backups.epochs()]
        for info in lost:
            link_backup(info, self._backups)
        return next((info for info in backups.infos() if info.epoch == epoch), None)

    async def _rounds(self) -> list[RoundRecord]:
        return await self._read(RoundRecord, "round.")

    async def _evaluated_before(self, epoch: int) -> list[Evaluated]:
        found = [
            Evaluated(each.epoch, each.figures[EVALUATION_LOSS])
            for each in await self._read(Preview, "preview.")
            if each.epoch < epoch and EVALUATION_LOSS in each.figures
        ]
        return sorted(found, key=lambda each: each.epoch)

    async def _read(self, kind: type[M], prefix: str) -> list[M]:
        found = []
        for entry in await self._history.entries(prefix):
            try:
                found.append(decode(kind, entry.value or b""))
            except ProtocolError:
                logger.warning("%s in the run's history is no %s: passed over", entry.key, kind.__name__)
        return found


def keep_only(info: BackupInfo, folder: Path) -> None:
    """Have a folder hold this backup, and no other: by the same files on disk, so it costs no space of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        link_backup(info, folder)
    except OSError as error:  # cleared away just now, or a disk without links
        logger.warning("the backup of epoch %d could not be kept in %s: %s", info.epoch, folder, error)
        return
    record = record_path(folder, info.epoch)
    for path in folder.iterdir():
        if path.name not in (info.tensors_path.name, record.name):
            path.unlink()


def link_backup(info: BackupInfo, folder: Path) -> None:
    """Have a folder hold this backup too."""
    record = record_path(info.tensors_path.parent, info.epoch)
    for path in (info.tensors_path, record):  # the record last: it makes the backup count
        if not (folder / path.name).exists():
            os.link(path, folder / path.name)
