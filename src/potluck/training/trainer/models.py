"""A recipe's model: as the manifest's seed makes it, with the values that a run's state has, and what it does then."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from potluck.errors import ConfigurationError
from potluck.optim.parameters import EXTRA, PARAMETER
from potluck.recipes.recipe import Recipe

_generator = threading.Lock()


def untrained(recipe: Recipe[Any], seed: int, device: torch.device | None = None) -> nn.Module:
    """The recipe's model with the values that the manifest's seed gives, on every machine the same."""
    # All threads share one generator: two of them would take each other's values, and may wait for each other for ever,
    # one for the generator's lock and the other for the interpreter's.
    with _generator, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return recipe.model().to(device or torch.device("cpu"))


@torch.no_grad()
def load(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put a run's state, as snapshots and backups name its tensors, into the model of the run's recipe."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        given = state.get(PARAMETER + name)
        if given is None or given.shape != parameter.shape:
            raise ConfigurationError(f"parameter {name!r} is not like that in the run's state: it is of another recipe")
        parameter.copy_(given)
    for name, buffer in model.named_buffers():
        if (given := state.get(EXTRA + name)) is not None:
            buffer.copy_(given)


def weights_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a run's state, what a model is made of, by the model's own names: no optimizer, no bookkeeping."""
    found = {name.removeprefix(PARAMETER): tensor for name, tensor in state.items() if name.startswith(PARAMETER)}
    for name, tensor in state.items():
        if name.startswith(EXTRA) and "/" not in (short := name.removeprefix(EXTRA)):
            found[short] = tensor
    return found


def preview(
    recipe: Recipe[Any], model: nn.Module, known: Mapping[str, float] | None = None
) -> tuple[str, dict[str, float]]:
    """What the model does now, and how well; `known` are figures that need not be found again."""
    model.eval()
    with torch.no_grad():
        return recipe.preview(model), dict(recipe.evaluate(model) if known is None else known)
