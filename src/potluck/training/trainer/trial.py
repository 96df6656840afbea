"""A recipe, tried by its organiser's host before the run opens: else the first volunteer would find what is wrong."""

from __future__ import annotations

import inspect
import logging
import traceback
from typing import Any

import torch

from potluck.errors import ConfigurationError, PotluckError
from potluck.optim.methods.streaming import split
from potluck.recipes.recipe import Recipe, data_of, require_downloads
from potluck.training.manifest.manifest import DiLoCoSettings, Manifest
from potluck.training.trainer.models import untrained

logger = logging.getLogger(__name__)


def try_out(recipe: Recipe[Any], manifest: Manifest) -> bool:
    """Have the recipe's model learn from one sample of each stage's data; ConfigurationError says what is wrong.

    False where that cannot be tried, since its data are not on this machine.
    """
    try:
        require_downloads(recipe)
    except ConfigurationError as error:  # a host need not have them: it trains nothing
        logger.warning("the recipe is not tried here: %s", error)
        return False
    try:
        model = untrained(recipe, manifest.seed)
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        for entry in manifest.settings:
            if isinstance(entry.training, DiLoCoSettings):
                split(names, entry.training.num_fragments)
            recipe.data = data_of(recipe, entry.data)
            _learn_one(recipe, model)
    except PotluckError:
        raise
    except Exception as error:  # a recipe may do anything
        raise ConfigurationError(
            f"the recipe fails: {type(error).__name__}: {error} ({_place(error, recipe)}). Correct it before "
            "others join"
        ) from error
    return True


def _learn_one(recipe: Recipe[Any], model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = (sample for shard in range(recipe.num_shards) for sample in recipe.samples(shard, generator))
    sample = next(iter(samples), None)
    if sample is None:
        raise ConfigurationError("the recipe has no data: all of its shards are empty")
    loss = recipe.loss(model, recipe.collate([sample]))
    if loss.dim() or not loss.requires_grad:
        raise ConfigurationError(
            f"the recipe's loss has the shape {tuple(loss.shape)}{'' if loss.requires_grad else ' and no gradient'}: "
            "it must be one number, computed by the model"
        )
    loss.backward()  # type: ignore[no-untyped-call]


def _place(error: Exception, recipe: Recipe[Any]) -> str:
    file = inspect.getfile(type(recipe))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}, line {lines[-1]}" if lines else file
