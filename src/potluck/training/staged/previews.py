"""What a pipeline's model says and is worth on held-out data.

The host puts the whole model together in its memory, out of its own cuts, where it has room for it; a machine that
trains never does. Where it has none, held-out data go through the pipeline (pipeline/evaluating.py), and there are
figures alone. They go into the run's history, as those of other runs do: monitors and dashboards show them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from potluck import tasks
from potluck.errors import PotluckError
from potluck.hub.connection import Store
from potluck.messages import encode
from potluck.pipeline.cuts import CutShelf
from potluck.recipes.recipe import Recipe, data_of, require_downloads
from potluck.training.books.history import LONGEST_PREVIEW, Preview, preview_key
from potluck.training.manifest.manifest import Manifest
from potluck.training.staged.part import Tell
from potluck.training.staged.whole import WholeModel
from potluck.training.trainer.models import preview

logger = logging.getLogger(__name__)

REST_FACTOR = 4.0  # an evaluation is followed by so many times as long a rest
MEMORY_SHARE = 0.25  # of what is free, that the whole model may take


def has_room_for(num_bytes: int) -> bool:
    """Whether this machine puts a whole model of that size together beside its other work."""
    return num_bytes <= psutil.virtual_memory().available * MEMORY_SHARE


class CutPreviews:
    """Looks at each new cut, as far as time allows. Lives on the event loop."""

    def __init__(
        self, recipe: Recipe[Any], newest: Callable[[], Manifest], folder: Path, history: Store, tell: Tell
    ) -> None:
        self._recipe = recipe
        self._newest = newest
        self._folder = folder
        self._history = history
        self._tell = tell
        self._step = -1
        self._place = -1  # in the history, of the next one
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._told = ""
        self._noting: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Look at cuts from now on."""
        self._task = asyncio.create_task(self._keep_looking(), name="pipeline-previews")

    async def close(self) -> None:
        """Idempotent."""
        await tasks.end(self._task, *self._noting)

    def saved(self, step: int) -> None:
        """There is a new cut."""
        self._step = step
        self._wake.set()

    async def _keep_looking(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            began = time.monotonic()
            try:
                await self._note(await asyncio.to_thread(self._look, self._step))
            except PotluckError as error:
                self._complain(str(error))
            except Exception as error:  # a recipe may do anything; the run goes on without its figures
                logger.exception("the model of step %d cannot be looked at", self._step)
                self._complain(f"{type(error).__name__}: {error}")
            await asyncio.sleep(REST_FACTOR * (time.monotonic() - began))

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        """The pipeline has evaluated this step."""
        made = Preview(epoch=step, at=time.time(), text="", figures=dict(figures))
        noting = asyncio.create_task(self._note(made))
        self._noting.add(noting)
        noting.add_done_callback(self._noting.discard)

    async def _note(self, made: Preview) -> None:
        try:
            if self._place < 0:
                self._place = len(await self._history.entries("preview."))
            await self._history.put(preview_key(self._place), encode(made))
        except PotluckError as error:
            self._complain(str(error))
            return
        self._place += 1
        self._tell("evaluated", {"step": made.epoch, **made.figures})

    def _complain(self, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            self._tell("not evaluated", {"step": self._step, "reason": reason})

    def _look(self, step: int) -> Preview:
        manifest = self._newest()
        require_downloads(self._recipe)
        self._recipe.data = data_of(self._recipe, manifest.at(step).data)
        whole = WholeModel(self._recipe, manifest.seed, CutShelf(self._folder), step)
        text, figures = preview(self._recipe, whole.model())
        return Preview(epoch=step, at=time.time(), text=text[:LONGEST_PREVIEW], figures=figures)
