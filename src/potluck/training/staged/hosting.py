"""What the host of a pipeline does: conducts, saves cuts, and holds what only one server has."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil

from potluck.errors import ConfigurationError
from potluck.pipeline.blueprint import Blueprint
from potluck.pipeline.evaluating import DEFAULT_EVERY, Evaluation
from potluck.pipeline.member import Part
from potluck.recipes.catalogue import open_recipe
from potluck.recipes.recipe import Recipe, require_downloads
from potluck.run.peer import Peer
from potluck.training.manifest.manifest import Manifest
from potluck.training.manifest.noticeboard import NoticeBoard
from potluck.training.staged.heldout import through_pipeline
from potluck.training.staged.part import PipelinePart, Role, Tell
from potluck.training.staged.previews import CutPreviews, has_room_for

logger = logging.getLogger(__name__)

CUTS_FOLDER = "cuts"
SAVE_SECONDS = 10.0  # that a host which leaves takes for a last cut
LISTENING_SHARE = 0.5  # of the free memory that a host gives to stages which have one server


class StagedWork:
    """The whole part of a host's own peer in a pipeline."""

    def __init__(self, board: NoticeBoard, part: PipelinePart, previews: CutPreviews) -> None:
        self.board = board
        self.part = part
        self.previews = previews

    @classmethod
    async def start(
        cls, peer: Peer, folder: Path, *, every_steps: int, keep_last: int, recipe_file: Path | None, tell: Tell
    ) -> Self:
        """Conduct, save and listen from now on."""
        board = NoticeBoard.of(peer.session)
        try:
            await board.start()
            manifest = await board.first()
            recipe, own = (open_recipe(manifest.recipe, manifest.model, recipe_file, manifest.files) for _ in range(2))
            newest = newest_of(board, manifest)
            cuts = folder / CUTS_FOLDER
            previews = CutPreviews(own, newest, cuts, peer.session.hub.store("history"), tell)
            is_whole_here = has_room_for(4 * sum(Blueprint.of(own.blocks, manifest.seed).num_values))
            role = Role(
                part=Part(
                    listens=True,
                    room_bytes=int(psutil.virtual_memory().available * LISTENING_SHARE),
                    saves_every=every_steps,
                ),
                has_data=False,
                cuts=cuts,
                keep_last=keep_last,
                evaluation=None
                if is_whole_here
                else Evaluation(
                    figures=through_pipeline(own, newest),
                    every_steps=every_steps or DEFAULT_EVERY,
                    on_figures=previews.evaluated,
                ),
            )
            part = PipelinePart(peer, newest, recipe, role, tell)
            if is_whole_here:
                part.member.on_saved = previews.saved
            await part.start()
            if is_whole_here:
                previews.start()
        except BaseException:
            await board.close()
            raise
        return cls(board, part, previews)

    async def close(self) -> None:
        """Save what is there, if that does not take long, and leave. Idempotent."""
        if (conductor := self.part.conductor) is not None and not await conductor.save_now(SAVE_SECONDS):
            logger.info("the newest step is not saved: the newest cut is of step %d", conductor.record.cut_step)
        await self.previews.close()
        await self.part.close()
        await self.board.close()


def newest_of(board: NoticeBoard, first: Manifest) -> Callable[[], Manifest]:
    """The newest manifest, as the board has it."""
    return lambda: board.manifest or first


def has_data(recipe: Recipe[Any]) -> bool:
    """Whether what the recipe reads is on this machine."""
    try:
        require_downloads(recipe)
    except ConfigurationError:
        return False
    return True
