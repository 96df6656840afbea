"""A recipe's own figures on held-out data, by a model that no machine holds: its loss is computed by the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from potluck.errors import ConfigurationError
from potluck.pipeline.evaluating import LossOf
from potluck.recipes.recipe import Batch, Recipe, data_of, require_downloads
from potluck.training.manifest.manifest import Manifest


class _Elsewhere(nn.Module):
    """Stands for the whole model, where a recipe asks for its device or calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(0))

    def forward(self, *given: Any) -> Tensor:
        raise ConfigurationError(
            "the recipe's evaluate() calls the model itself, and a pipeline's servers give no more than the loss: "
            "have it call self.loss(model, batch)"
        )


def through_pipeline(recipe: Recipe[Any], newest: Callable[[], Manifest]) -> Callable[[LossOf], Mapping[str, float]]:
    """The recipe's `evaluate`, for pipeline.evaluating. This recipe is used for nothing else from now on."""

    def figures(loss_of: LossOf) -> Mapping[str, float]:
        require_downloads(recipe)
        recipe.data = data_of(recipe, newest().newest.data)

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            return torch.tensor(loss_of(tuple(batch)))

        recipe.loss = loss  # type: ignore[method-assign]
        return recipe.evaluate(_Elsewhere())

    return figures
