"""A recipe's model: as the manifest's seed makes it, and with the values that a run's state has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from potluck.errors import ConfigurationError
from potluck.optim.parameters import EXTRA, PARAMETER, named_parameters
from potluck.recipes.recipe import Recipe


def untrained(recipe: Recipe[Any], seed: int, device: torch.device | None = None) -> nn.Module:
    """The recipe's model with the values that the manifest's seed gives, on every machine the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return recipe.model().to(device or torch.device("cpu"))


@torch.no_grad()
def load(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put a run's state, as snapshots and backups name its tensors, into the model of the run's recipe."""
    naming = torch.optim.SGD(model.parameters(), lr=1.0)  # names go by the places in an optimizer; none is trained here
    wanted: dict[str, Tensor] = {PARAMETER + name: parameter for name, parameter in named_parameters(naming).items()}
    for name, tensor in wanted.items():
        given = state.get(name)
        if given is None or given.shape != tensor.shape:
            raise ConfigurationError(f"{name!r} is not in this state as this model has it: it is of another recipe")
        tensor.copy_(given)
    for name, buffer in model.named_buffers():
        if (given := state.get(EXTRA + name)) is not None:
            buffer.copy_(given)
