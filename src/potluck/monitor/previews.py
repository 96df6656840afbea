"""What the model says now, over epochs: out of the backups that a host keeps, by the recipe's own preview.

Computed by the host's dashboard, or by the host itself where it has none; in a thread of its own, at most every so
often, and with rests between forward passes (rests.py), since the machine has other work. It is written into the run's
history, so that every dashboard of the run shows it, wherever it is, and one that is started again still knows what the
model said before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from potluck import tasks
from potluck.errors import PotluckError, ProtocolError
from potluck.hub.connection import Store
from potluck.messages import decode, encode
from potluck.monitor.rests import Rests
from potluck.recipes.catalogue import open_recipe
from potluck.recipes.recipe import Recipe
from potluck.state.backupfile import BackupInfo
from potluck.state.backups import Backups
from potluck.training.books.history import LONGEST_PREVIEW, Preview, preview_key
from potluck.training.manifest.curriculum import data_at
from potluck.training.manifest.manifest import Manifest
from potluck.training.trainer.models import load, preview

logger = logging.getLogger(__name__)

EVERY_SECONDS = 15.0
REST_FACTOR = 4.0  # a preview that takes long rests for so many times as long, meanwhile and afterwards …
EVALUATION_REST_FACTOR = 0.5  # … and an evaluation that the organiser asked for by this


class Previewer:
    """Looks for new backups, and has the model speak. Lives on the event loop."""

    def __init__(
        self,
        folder: Path,
        manifest: Callable[[], Manifest | None],
        history: Store,
        recipe_file: Path | None = None,
        on_made: Callable[[Preview, BackupInfo], Awaitable[None]] | None = None,
        shared: Callable[[int], Mapping[str, float] | None] = lambda _epoch: None,
    ) -> None:
        """`folder` is that of the run; `manifest` returns the newest one; `history` can be written.

        `on_made` is called with each preview, and the backup that it is of. `shared` tells what trusted trainers found
        at an epoch, so that it need not be evaluated here.
        """
        self._shared = shared
        self._on_made = on_made
        self.problem = ""  # why there are no new ones
        self.every_seconds = EVERY_SECONDS
        self.counts: Counter[str] = Counter()
        self._backups = folder / "states" / "backups"
        self._manifest = manifest
        self._history = history
        self._recipe_file = recipe_file
        self._newest = -1  # epoch that the model has spoken of, here or elsewhere
        self._tried = -1
        self._failed = -1  # epoch at which the recipe failed: it would fail again
        self._task: asyncio.Task[None] | None = None
        self._opened: tuple[object, Recipe[Any]] | None = None
        self._rests = Rests(REST_FACTOR)

    def start(self) -> None:
        """Begin, after what was said before."""
        self._task = asyncio.create_task(self._keep_looking(), name="previews")

    async def close(self) -> None:
        """Look no more, and end what is being computed. Idempotent."""
        self._rests.stop()
        await tasks.end(self._task)

    async def _keep_looking(self) -> None:
        while True:
            began = time.monotonic()
            manifest = self._manifest()
            is_asked_for = manifest is not None and manifest.evaluation.every_epochs > 0
            factor = EVALUATION_REST_FACTOR if is_asked_for else REST_FACTOR
            self._rests = Rests(factor)
            if manifest is not None:
                try:
                    await self._look(manifest)
                except PotluckError as error:
                    self._say(str(error))
                except Exception as error:  # a recipe may do anything: it is no reason for a host to end
                    self.counts["errors"] += 1
                    self._failed = self._tried
                    self._say(f"the recipe's preview failed: {error!r}")
                    logger.exception("the preview failed")
            rested_seconds = self._rests.rested_seconds
            computed_seconds = time.monotonic() - began - rested_seconds
            await asyncio.sleep(max(self.every_seconds, factor * computed_seconds - rested_seconds))

    def _say(self, problem: str) -> None:
        if problem != self.problem:
            logger.info("the model does not speak: %s", problem)
        self.problem = problem

    async def _look(self, manifest: Manifest) -> None:
        backups = Backups(self._backups, run=manifest.run)
        info = next(iter(await asyncio.to_thread(backups.infos)), None)
        if info is None or info.epoch <= max(self._newest, self._failed):
            return
        if info.epoch < self._newest + manifest.evaluation.every_epochs:
            return
        place = await self._next_place()  # each time: the host may have more than one dashboard
        if info.epoch > self._newest:
            self._tried = info.epoch
            made = await asyncio.to_thread(self._preview, manifest, backups, info)
            await self._history.put(preview_key(place), encode(made))
            self._newest = made.epoch
            self.counts["made"] += 1
            self.counts["shared"] += self._shared(made.epoch) is not None
            if self._on_made is not None:
                await self._on_made(made, info)
        self.problem = ""

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

    def _preview(self, manifest: Manifest, backups: Backups, info: BackupInfo) -> Preview:
        recipe = self._open(manifest)
        recipe.data = data_at(recipe, manifest, info.epoch)
        model = recipe.model()
        snapshot = backups.read(info)
        try:
            load(model, snapshot.tensors())
        finally:
            snapshot.release()
        with self._rests.of(model):
            text, figures = preview(recipe, model, self._shared(info.epoch))
        return Preview(epoch=info.epoch, at=info.saved_at, text=text[:LONGEST_PREVIEW], figures=figures)

    def _open(self, manifest: Manifest) -> Recipe[Any]:
        """The run's recipe, kept from one time to the next: it has read and cut its held-out data then."""
        chosen = (manifest.recipe, manifest.model, manifest.files, manifest.newest.data)
        if self._opened is None or self._opened[0] != chosen:
            recipe = open_recipe(manifest.recipe, manifest.model, self._recipe_file, manifest.files)
            self._opened = (chosen, recipe)
        return self._opened[1]
