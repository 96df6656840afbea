"""The whole model out of a cut, though nobody trains all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from potluck.errors import BackupError, ConfigurationError
from potluck.pipeline.blueprint import Blueprint
from potluck.pipeline.cuts import CutShelf
from potluck.pipeline.tensorfile import write_tensors
from potluck.pipeline.unitstate import PARAMETER
from potluck.recipes.recipe import Recipe


class WholeModel:
    """What a cut has, under the names of the recipe's own model."""

    def __init__(self, recipe: Recipe[Any], seed: int, shelf: CutShelf, step: int | None = None) -> None:
        """The newest cut unless a step is named; BackupError without any."""
        steps = [cut.step for cut in shelf.cuts]
        if not steps or (step is not None and step not in steps):
            raise BackupError(
                f"there is no cut {'' if step is None else f'of step {step} '}here: the host saves one every "
                f"--backup-every steps. Steps that are there: {', '.join(map(str, steps)) or 'none'}"
            )
        self.step = steps[-1] if step is None else step
        self.recipe = recipe
        self._shelf = shelf
        self._blueprint = Blueprint.of(recipe.blocks, seed)
        self.names = self._match()

    @property
    def num_bytes(self) -> int:
        """Of its parameters."""
        return 4 * sum(self._blueprint.num_values)

    def _match(self) -> dict[str, tuple[int, str]]:
        """The model's names, in its order, with the unit and the name of each there."""
        with torch.device("meta"):
            parameters = [(n, tuple(p.shape)) for n, p in self.recipe.model().named_parameters() if p.requires_grad]
        shapes = [dict(self._blueprint.unit_shapes[unit])[name] for unit, name in self._blueprint.order]
        if [shape for _, shape in parameters] != shapes:
            raise ConfigurationError(
                "the parameters of the recipe's model() are not those of its blocks(): make both of the same modules, "
                "in the same order. The cut's own files are complete anyway"
            )
        return {own: place for (own, _), place in zip(parameters, self._blueprint.order, strict=True)}

    def _tensors(self) -> Iterator[Tensor]:
        at, tensors = -1, {}
        for unit, name in self.names.values():
            if unit != at:
                at, tensors = unit, self._shelf.load(unit, self.step)
            yield tensors[PARAMETER + name]

    def export(self, path: Path) -> int:
        """Write a safetensors file with the model's own names; one unit is in memory at a time."""
        shapes = dict(name_and_shape for unit in self._blueprint.unit_shapes for name_and_shape in unit)
        described = {own: (torch.float32, shapes[name]) for own, (_, name) in self.names.items()}
        try:
            return write_tensors(path, described, self._tensors())
        except OSError as error:
            raise BackupError(f"{path} cannot be written ({error.strerror}): give another file") from error

    def model(self) -> nn.Module:
        """The recipe's model with these values: this machine must hold all of it."""
        model = self.recipe.model()
        with torch.no_grad():
            for parameter, values in zip(
                (p for p in model.parameters() if p.requires_grad), self._tensors(), strict=True
            ):
                parameter.copy_(values)
        return model.eval()
