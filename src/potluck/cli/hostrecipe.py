"""What a host is to train: run.toml and its recipe, tried on this machine and put up for everybody."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from potluck.run.host import Host
    from potluck.training.manifest.noticeboard import NoticeBoard

logger = logging.getLogger(__name__)


async def try_out(run_file: Path) -> bool:
    """Have the recipe learn from one sample of each stage; ConfigurationError says what is wrong with it.

    False where it cannot be tried, since its data are not here.
    """
    from potluck.cli import console
    from potluck.errors import ConfigurationError
    from potluck.training.manifest.runfile import manifest_of, read_run_file, with_line

    trial = await console.import_slowly("potluck.training.trainer.trial")
    from potluck.recipes.catalogue import open_recipe
    from potluck.recipes.shipped import folder_files

    def work() -> bool:
        found = read_run_file(run_file)
        manifest = manifest_of(found, run_file.parent)
        recipe = open_recipe(
            manifest.recipe, manifest.model, run_file.parent / found.recipe, folder_files(run_file.parent)
        )
        try:
            return bool(trial.try_out(recipe, manifest))
        except ConfigurationError as error:
            raise with_line(error, run_file) from error

    return await asyncio.to_thread(work)


async def try_later(run_file: Path, host: Host) -> bool:
    """Try a recipe whose data were missing at an earlier start. If the run has trained already, only report."""
    from potluck.errors import ConfigurationError
    from potluck.training.manifest.steering import steering

    try:
        return await try_out(run_file)
    except ConfigurationError as error:
        async with steering(host.address, host.keys, host.record.run) as helm:
            if await helm.head() is None:
                raise
        logger.error("%s", error)  # noqa: TRY400 - the recipe's fault, and the message says it all
        return False


async def put_up(run_file: Path, host: Host) -> Path | None:
    """Publish run.toml in the hub; returns the organiser's own recipe, if it is not a built-in one."""
    from potluck.recipes.approval import approve
    from potluck.recipes.shipped import keep_copies
    from potluck.training.manifest.organising import put_up
    from potluck.training.manifest.runfile import manifest_of, read_run_file

    found = read_run_file(run_file)
    manifest = await asyncio.to_thread(manifest_of, found, run_file.parent)
    await asyncio.to_thread(keep_copies, run_file.parent, manifest.files)
    approve(manifest.recipe)
    await put_up(manifest, host.address, host.keys)
    return run_file.parent / found.recipe if manifest.recipe.digest else None


def check_data(board: NoticeBoard, recipe_file: Path | None) -> None:
    """Say so when a command has ordered data that the recipe cannot use."""
    from potluck.recipes.catalogue import open_recipe
    from potluck.training.manifest.curriculum import warn_of_data

    if board.manifest is not None:
        recipe = open_recipe(board.manifest.recipe, board.manifest.model, recipe_file, board.manifest.files)
        board.listen(lambda newest: warn_of_data(recipe, newest))
