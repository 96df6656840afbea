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

from potluck.errors import PotluckError, ProtocolError
from potluck.hub.connection import Store
from potluck.messages import decode
from potluck.state.backupfile import BackupInfo, record_path
from potluck.state.backups import Backups
from potluck.training.books.history import EVALUATION_LOSS, Preview, RoundRecord
from potluck.training.books.lossband import Evaluated, leaves_band, members_between, upper_edge
from potluck.training.manifest.manifest import Manifest

logger = logging.getLogger(__name__)

BEST = "best"  # beside `backups` in the host's folder of states

RollBack = Callable[[BackupInfo, str], Awaitable[None]]
"""Orders the run back to this state, for this reason."""


class Evaluations:
    """What the host makes of each evaluation. Lives on the event loop."""

    def __init__(
        self, states: Path, history: Store, manifest: Callable[[], Manifest | None], roll_back: RollBack
    ) -> None:
        """`states` is the host's folder of states; `manifest` returns the newest one."""
        self.good: list[Evaluated] = []
        self._backups = states / "backups"
        self._best = states / BEST
        self._history = history
        self._manifest = manifest
        self._roll_back = roll_back

    async def judge(self, preview: Preview, info: BackupInfo) -> None:
        """One more evaluation, of the state in this backup."""
        loss, manifest = preview.figures.get(EVALUATION_LOSS), self._manifest()
        if loss is None or manifest is None:
            return
        newest = Evaluated(preview.epoch, loss)
        if leaves_band(self.good, newest, manifest.evaluation):
            await self._refuse(newest, manifest)
            return
        if math.isfinite(loss):
            if all(loss < each.loss for each in self.good):
                keep_best(info, self._best)
            self.good.append(newest)

    async def _refuse(self, newest: Evaluated, manifest: Manifest) -> None:
        before, edge = self.good[-1], upper_edge(self.good, manifest.evaluation)
        who = ", ".join(members_between(await self._rounds(), before.epoch, newest.epoch)) or "nobody known"
        reason = f"held-out loss {newest.loss:.4f} at epoch {newest.epoch} is above {edge:.4f}; since then: {who}"
        if not manifest.evaluation.gate:
            logger.warning("%s", reason)
            return
        there = next((info for info in Backups(self._backups).infos() if info.epoch == before.epoch), None)
        if there is None:
            logger.error("%s; but the backup of epoch %d is gone: keep more of them", reason, before.epoch)
            return
        logger.warning("back to epoch %d: %s", before.epoch, reason)
        try:
            await self._roll_back(there, reason)
        except PotluckError as error:
            logger.warning("the order to go back was not given, the next evaluation tries again: %s", error)

    async def _rounds(self) -> list[RoundRecord]:
        found = []
        for entry in await self._history.entries("round."):
            try:
                found.append(decode(RoundRecord, entry.value or b""))
            except ProtocolError:
                logger.warning("%s in the run's history is no round: passed over", entry.key)
        return found


def keep_best(info: BackupInfo, folder: Path) -> None:
    """Have a folder hold this backup, and no other: by the same files on disk, so it costs no space of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    record = record_path(info.tensors_path.parent, info.epoch)
    for path in (info.tensors_path, record):  # the record last: it makes the backup count
        if not (folder / path.name).exists():
            os.link(path, folder / path.name)
    for path in folder.iterdir():
        if path.name not in (info.tensors_path.name, record.name):
            path.unlink()
