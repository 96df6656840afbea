"""A model's blocks before they have values: how many, what they share, how large; and any of them with values.

    blueprint = Blueprint.of(recipe.blocks, seed)      # no memory is taken
    blueprint.make([3, 4])                             # blocks 3 and 4, with the values that the seed gives

Where `blocks()` yields its blocks one by one, only those that are wanted are ever made: each has a seed of its own.
Where it returns a list, the whole model is made for a moment, and the rest of it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from potluck.pipeline.blocks import Tie, check_blocks, seed_of, seeded, ties_of, unit_parameters

_FILLING = {torch.Tensor.normal_, torch.Tensor.uniform_}

Build = Callable[[], Iterable[nn.Module]]


class _Unfilled(TorchFunctionMode):
    """Tensors without memory get no values: torch would load its compiler to do nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init" or func in _FILLING:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Blueprint:
    """What everybody knows of a model."""

    build: Build
    seed: int
    ties: tuple[Tie, ...]
    unit_shapes: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]
    """Of each unit's parameters, by name."""
    num_blocks: int
    order: tuple[tuple[int, str], ...] = ()
    """All parameters as the blocks have them: their unit, and their name there."""

    @classmethod
    def of(cls, build: Build, seed: int) -> Blueprint:
        """Look at a model without making it. ConfigurationError where a pipeline cannot train it."""
        with torch.device("meta"), _Unfilled():
            blocks = list(build())
        check_blocks(blocks)
        ties = ties_of(blocks)
        numbered = dict(enumerate(blocks))
        units = unit_parameters(numbered, ties, numbered, len(blocks))
        shapes = tuple(
            tuple((name, tuple(parameter.shape)) for name, parameter in units.get(unit, {}).items())
            for unit in range(len(blocks) + len(ties))
        )
        places = {id(p): (unit, name) for unit, named in units.items() for name, p in named.items()}
        found = dict.fromkeys(places[id(p)] for block in blocks for p in block.parameters() if p.requires_grad)
        return cls(build, seed, ties, shapes, len(blocks), tuple(found))

    @cached_property
    def num_values(self) -> tuple[int, ...]:
        """Of each unit."""
        return tuple(sum(torch.Size(shape).numel() for _, shape in shapes) for shapes in self.unit_shapes)

    @property
    def num_units(self) -> int:
        """Blocks, and parameters that several of them share."""
        return len(self.unit_shapes)

    def units_in(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """The units that these blocks consist of."""
        wanted = set(blocks)
        tied = (self.num_blocks + index for index, tie in enumerate(self.ties) if wanted & set(tie.blocks))
        return (*sorted(wanted), *tied)

    def values_in(self, blocks: Iterable[int]) -> int:
        """How many parameters these blocks have."""
        return sum(self.num_values[unit] for unit in self.units_in(blocks))

    def make(self, wanted: Iterable[int], device: torch.device | None = None) -> dict[int, nn.Module]:
        """These blocks with the values that the seed gives, on every machine the same."""
        numbers = frozenset(wanted)
        needed = numbers.union(*(tie.blocks for tie in self.ties if numbers & set(tie.blocks)))
        with seeded(seed_of(self.seed)):
            torch.manual_seed(self.seed)
            built = self.build()
            found = dict(self._one_by_one(built, needed) if isinstance(built, Iterator) else enumerate(built))
        return {number: found[number].to(device or torch.device("cpu")) for number in sorted(numbers)}

    def _one_by_one(self, blocks: Iterator[nn.Module], needed: frozenset[int]) -> Iterator[tuple[int, nn.Module]]:
        number = 0
        while True:
            torch.manual_seed(seed_of(self.seed, number))
            if number in needed:
                block = next(blocks, None)
            else:
                with torch.device("meta"), _Unfilled():
                    block = next(blocks, None)
            if block is None:
                return
            if number in needed:
                yield number, block
            number += 1


def place_parameter(block: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Have a block use this parameter under that name: one that it shares with another block here."""
    path, _, last = name.rpartition(".")
    setattr(block.get_submodule(path), last, parameter)


def tied_names(ties: Sequence[Tie], block: int, index: int) -> tuple[str, ...]:
    """By which names a block has a parameter that is shared."""
    return tuple(name for number, name in ties[index].names if number == block)
