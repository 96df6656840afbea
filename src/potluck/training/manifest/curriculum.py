"""Which data count at which epoch: what [data] and [[curriculum]] in run.toml say, and commands later.

    manifest ── settings of the epoch ──▶ data ──▶ recipe.data ──▶ samples

It depends on the manifest and the epoch alone, so that all peers change at the same one and a newcomer has the same.
Only the recipe knows which values can be, and the person who gives a command may not have it at hand: where it cannot
use them, what counted before goes on to count, for everybody alike. A slip of the organiser's hand ends nobody's
training.
"""

from __future__ import annotations

import logging
from typing import Any

from potluck.errors import ConfigurationError
from potluck.recipes.recipe import Recipe, RecipeConfig, data_of
from potluck.training.manifest.manifest import Manifest

logger = logging.getLogger(__name__)


def data_at(recipe: Recipe[Any], manifest: Manifest, epoch: int) -> RecipeConfig:
    """What counts for the step that makes the epoch after `epoch`, as far as the recipe can use it."""
    for entry in (*(entry for entry in reversed(manifest.settings) if entry.from_epoch <= epoch), manifest.settings[0]):
        try:
            return data_of(recipe, entry.data)
        except ConfigurationError as error:
            logger.debug("the data from epoch %d on are passed over: %s", entry.from_epoch, error)
    return recipe.Data()


def warn_of_data(recipe: Recipe[Any], manifest: Manifest) -> None:
    """Tell the organiser what the trainers will pass over."""
    for entry in manifest.settings:
        try:
            data_of(recipe, entry.data)
        except ConfigurationError as error:
            logger.warning(
                "the data from epoch %d on cannot be used, so those before stay: %s", entry.from_epoch, error
            )
