"""What the model says now, over epochs: out of the backups that a host keeps, by the recipe's own preview.

Computed in a thread of its own, at most every so often, and written into the run's history, so that every dashboard of
the run shows it, wherever it is, and one that is started again still knows what the model said before.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from potluck import tasks
from potluck.errors import PotluckError, ProtocolError
from potluck.hub.connection import Store
from potluck.messages import decode, encode
from potluck.recipes.catalogue import open_recipe
from potluck.state.backupfile import BackupInfo
from potluck.state.backups import Backups
from potluck.training.history import LONGEST_PREVIEW, Preview, preview_key
from potluck.training.manifest import Manifest
from potluck.training.models import load, preview

logger = logging.getLogger(__name__)

EVERY_SECONDS = 15.0


class Previewer:
    """Looks for new backups, and has the model speak. Lives on the event loop."""

    def __init__(
        self, folder: Path, manifest: Callable[[], Manifest | None], history: Store, recipe_file: Path | None = None
    ) -> None:
        """`folder` is that of the run; `manifest` returns the newest one; `history` can be written."""
        self.problem = ""  # why there are no new ones
        self.counts: Counter[str] = Counter()
        self._backups = folder / "states" / "backups"
        self._manifest = manifest
        self._history = history
        self._recipe_file = recipe_file
        self._newest: int | None = None  # epoch that the model has spoken of
        self._place: int | None = None  # of the next one, in the store; None: not known yet
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, after what was said before."""
        self._task = asyncio.create_task(self._keep_looking(), name="previews")

    async def close(self) -> None:
        """Look no more. Calling it twice does no harm."""
        await tasks.end(self._task)

    async def _keep_looking(self) -> None:
        while True:
            manifest = self._manifest()
            if manifest is not None:
                try:
                    await self._look(manifest)
                except PotluckError as error:
                    self.problem = str(error)
                except Exception as error:  # a recipe may do anything: it is no reason for a dashboard to end
                    self.counts["errors"] += 1
                    self.problem = f"the recipe's preview failed: {error!r}"
                    logger.exception("the preview failed")
                else:
                    self.problem = ""
            await asyncio.sleep(EVERY_SECONDS)

    async def _look(self, manifest: Manifest) -> None:
        if self._place is None:
            self._place = await self._next_place()
        made = await asyncio.to_thread(self._speak, manifest, self._newest)
        if made is not None:
            await self._history.put(preview_key(self._place), encode(made))
            self._place += 1
            self._newest = made.epoch
            self.counts["made"] += 1

    async def _next_place(self) -> int:
        """After the newest that is written; what comes there is the oldest."""
        newest: tuple[int, int] | None = None  # epoch and place
        for entry in await self._history.entries("preview."):
            try:
                said = decode(Preview, entry.value or b"")
                place = int(entry.key.removeprefix("preview."))
            except (ProtocolError, ValueError):
                logger.warning("%s in the run's history is no preview: passed over", entry.key)
                continue
            newest = max(newest or (-1, 0), (said.epoch, place))
        if newest is None:
            return 0
        self._newest = newest[0]
        return newest[1] + 1

    def _speak(self, manifest: Manifest, known: int | None) -> Preview | None:
        backups = Backups(self._backups, run=manifest.run)
        newest = next(iter(backups.infos()), None)
        if newest is None or newest.epoch == known:
            return None
        return self._preview(manifest, backups, newest)

    def _preview(self, manifest: Manifest, backups: Backups, info: BackupInfo) -> Preview:
        recipe = open_recipe(manifest.recipe, manifest.model, self._recipe_file)
        model = recipe.model()
        snapshot = backups.read(info)
        try:
            load(model, snapshot.tensors())
        finally:
            snapshot.release()
        text, figures = preview(recipe, model)
        return Preview(epoch=info.epoch, at=info.saved_at, text=text[:LONGEST_PREVIEW], figures=figures)
