"""Which parameters of a model belong to which level.

A path's model is an ordinary model; its levels are runs of its layers. They are found, in this order: by what the
recipe says (`modules(level)`), by marks (`block.path_level = 1` on a submodule), or by cutting the longest list of
layers that are alike (`nn.ModuleList`, `nn.Sequential`) into equal runs. What stands before them is the embedding, what
comes after them is the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from potluck.errors import ConfigurationError
from potluck.paths.grid import Grid

Modules = Callable[[int], Sequence[str]]
"""Names of the model's submodules that make a level; none: find them."""


def cut(model: nn.Module, num_levels: int, modules: Modules = lambda _level: ()) -> dict[str, tuple[str, ...]]:
    """Names of the parameters that train, by part: `embedding`, `level-0`, …, `head`."""
    prefixes = _prefixes(model, num_levels, modules)
    parts: dict[str, list[str]] = {"embedding": [], **{f"level-{n}": [] for n in range(num_levels)}, "head": []}
    has_begun = False
    for name, parameter in model.named_parameters():
        level = next((n for n, found in enumerate(prefixes) if any(_is_in(name, prefix) for prefix in found)), None)
        has_begun = has_begun or level is not None
        if parameter.requires_grad:
            parts["head" if level is None and has_begun else "embedding" if level is None else f"level-{level}"].append(
                name
            )
    for level in range(num_levels):
        if not parts[f"level-{level}"]:
            raise ConfigurationError(
                f"level {level} has no parameters that train: its submodules are {prefixes[level]}"
            )
    return {part: tuple(names) for part, names in parts.items()}


def cut_for(grid: Grid, model: nn.Module, modules: Modules) -> dict[str, tuple[str, ...]]:
    """As `cut`, for these paths; ConfigurationError where one of their modules would have no parameters."""
    parts = cut(model, len(grid.levels), modules)
    for name in grid.modules:
        wanted = grid.parts_of(name)
        if not any(parts[part] for part in wanted):
            raise ConfigurationError(
                f"module {name} would have no parameters: the model has no {' and no '.join(wanted)} beside its "
                f"levels. Have the recipe's modules(level) leave its first or last layers out, or change shared"
            )
    return parts


def _is_in(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def _prefixes(model: nn.Module, num_levels: int, modules: Modules) -> list[list[str]]:
    said = [list(modules(level)) for level in range(num_levels)]
    if any(said):
        known = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
        for level, names in enumerate(said):
            if unknown := [name for name in names if name not in known]:
                raise ConfigurationError(
                    f"the recipe's modules({level}) names {unknown}, which its model does not have"
                )
            if not names:
                raise ConfigurationError(
                    f"levels has {num_levels} levels, and the recipe's modules({level}) names none"
                )
        return said
    marked: list[list[str]] = [[] for _ in range(num_levels)]
    for name, module in model.named_modules():
        mark: int | None = getattr(module, "path_level", None)
        if mark is not None:
            if not 0 <= mark < num_levels:
                raise ConfigurationError(
                    f"{name} is marked for level {mark}, and levels has {num_levels}: make it fit the recipe"
                )
            marked[mark].append(name)
    if any(marked):
        if missing := [level for level, names in enumerate(marked) if not names]:
            raise ConfigurationError(
                f"levels has {num_levels} levels, and no block of the model is marked for {missing}"
            )
        return marked
    return _equal_runs(model, num_levels)


def _equal_runs(model: nn.Module, num_levels: int) -> list[list[str]]:
    name, length = max(_lists(model), key=lambda found: found[1], default=("", 0))
    if length < num_levels:
        raise ConfigurationError(
            f"levels has {num_levels} levels, and the model's longest list of layers has {length}: take fewer levels, "
            "a deeper model, or have the recipe say modules(level)"
        )
    bounds = [round(level * length / num_levels) for level in range(num_levels + 1)]
    prefix = f"{name}." if name else ""
    return [[f"{prefix}{n}" for n in range(bounds[level], bounds[level + 1])] for level in range(num_levels)]


def _lists(model: nn.Module) -> list[tuple[str, int]]:
    """Lists of layers, with their lengths: of layers that are alike, and not inside of such a layer.

    A block has lists too, as that of its feed-forward part, and a shallow model's are longer than its list of blocks.
    Where no list has layers that are alike, any will do.
    """
    found = {name: each for name, each in model.named_modules() if isinstance(each, nn.ModuleList | nn.Sequential)}
    alike = [name for name, each in found.items() if len({type(layer) for layer in each}) == 1]
    outer = [name for name in alike if not any(_is_in(name, other) for other in alike if other != name)]
    return [(name, len(found[name])) for name in outer or found]
