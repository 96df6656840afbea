"""What the host of a pipeline does: conducts, saves cuts, and holds what only one server has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil

from potluck.errors import ConfigurationError
from potluck.pipeline.member import Part
from potluck.recipes.catalogue import open_recipe
from potluck.recipes.recipe import Recipe, require_downloads
from potluck.run.peer import Peer
from potluck.training.manifest.manifest import Manifest
from potluck.training.manifest.noticeboard import NoticeBoard
from potluck.training.staged.part import PipelinePart, Role, Tell

CUTS_FOLDER = "cuts"
LISTENING_SHARE = 0.5  # of the free memory that a host gives to stages which have one server


class StagedWork:
    """The whole part of a host's own peer in a pipeline."""

    def __init__(self, board: NoticeBoard, part: PipelinePart) -> None:
        self.board = board
        self.part = part

    @classmethod
    async def start(
        cls, peer: Peer, folder: Path, *, every_steps: int, keep_last: int, recipe_file: Path | None, tell: Tell
    ) -> Self:
        """Conduct, save and listen from now on."""
        board = NoticeBoard.of(peer.session)
        try:
            await board.start()
            manifest = await board.first()
            recipe = open_recipe(manifest.recipe, manifest.model, recipe_file, manifest.files)
            role = Role(
                part=Part(
                    listens=True,
                    room_bytes=int(psutil.virtual_memory().available * LISTENING_SHARE),
                    saves_every=every_steps,
                ),
                has_data=False,
                cuts=folder / CUTS_FOLDER,
                keep_last=keep_last,
            )
            part = PipelinePart(peer, newest_of(board, manifest), recipe, role, tell)
            await part.start()
        except BaseException:
            await board.close()
            raise
        return cls(board, part)

    async def close(self) -> None:
        """Idempotent."""
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
