"""What the model says now, over epochs: out of the backups that a host keeps, by the recipe's own preview.

Computed in a thread of its own, at most every so often, and kept in a file in the run's folder, so that a dashboard
that is started again still knows what the model said before.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from potluck import tasks
from potluck.errors import PotluckError
from potluck.recipes.catalogue import open_recipe
from potluck.state.backupfile import BackupInfo
from potluck.state.backups import Backups
from potluck.training.manifest import Manifest
from potluck.training.models import load, preview

logger = logging.getLogger(__name__)

PREVIEW_FILE = "previews.jsonl"
EVERY_SECONDS = 15.0
KEPT = 200
LONGEST_TEXT = 4000


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said at one epoch."""

    epoch: int
    at: float  # when that state was saved, seconds since 1970
    text: str
    figures: dict[str, float] = {}  # the recipe's evaluation


class Previewer:
    """Looks for new backups, and has the model speak. Lives on the event loop."""

    def __init__(self, folder: Path, manifest: Callable[[], Manifest | None], recipe_file: Path | None = None) -> None:
        """`folder` is that of the run; `manifest` returns the newest one."""
        self.previews: deque[Preview] = deque(maxlen=KEPT)
        self.problem = ""  # why there are no new ones
        self.counts: Counter[str] = Counter()
        self._path = folder / PREVIEW_FILE
        self._backups = folder / "states" / "backups"
        self._manifest = manifest
        self._recipe_file = recipe_file
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, after what was said before."""
        self.read()
        self._task = asyncio.create_task(self._keep_looking(), name="previews")

    def read(self) -> None:
        """What was said before, from the file."""
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines()[-KEPT:]:
                try:
                    self.previews.append(msgspec.json.decode(line, type=Preview))
                except msgspec.MsgspecError:
                    logger.warning("a line of %s cannot be read and is passed over", self._path)

    async def close(self) -> None:
        """Look no more. Calling it twice does no harm."""
        await tasks.end(self._task)

    async def _keep_looking(self) -> None:
        while True:
            manifest = self._manifest()
            if manifest is not None:
                try:
                    made = await asyncio.to_thread(self._look, manifest, {each.epoch for each in self.previews})
                except PotluckError as error:
                    self.problem = str(error)
                except Exception as error:  # a recipe may do anything: it is no reason for a dashboard to end
                    self.counts["errors"] += 1
                    self.problem = f"the recipe's preview failed: {error!r}"
                    logger.exception("the preview failed")
                else:
                    self.problem = ""
                    if made is not None:
                        self.previews.append(made)
            await asyncio.sleep(EVERY_SECONDS)

    def _look(self, manifest: Manifest, known: set[int]) -> Preview | None:
        backups = Backups(self._backups, run=manifest.run)
        newest = next(iter(backups.infos()), None)
        if newest is None or newest.epoch in known:
            return None
        made = self._preview(manifest, backups, newest)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(made) + b"\n")
        self.counts["made"] += 1
        return made

    def _preview(self, manifest: Manifest, backups: Backups, info: BackupInfo) -> Preview:
        recipe = open_recipe(manifest.recipe, manifest.model, self._recipe_file)
        model = recipe.model()
        snapshot = backups.read(info)
        try:
            load(model, snapshot.tensors())
        finally:
            snapshot.release()
        text, figures = preview(recipe, model)
        return Preview(epoch=info.epoch, at=info.saved_at, text=text[:LONGEST_TEXT], figures=figures)
