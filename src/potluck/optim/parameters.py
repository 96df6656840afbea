"""The parameters of a torch optimizer by name, and the names under which tensors travel.

Peers find out that they train the same model by the names, shapes and dtypes of their tensors; so names must come out
the same for all. They are the optimizer's own (`param_names`, when it was made from named parameters), or those of the
`named` argument, or else the position: group-index. Frozen parameters are left out, and tied ones stand there once.

A run's state says its parameters' order too (`order_of`). So a peer whose parameters have no names takes the run's,
where shapes and order agree; and a peer whose parameters have names takes positions, in a run that began without names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from potluck.errors import ConfigurationError
from potluck.round.codecs import TensorRole

Named = Mapping[str, Tensor]
OptimizerFactory = Callable[[Iterable[dict[str, object]]], Optimizer]

GRADIENT, PARAMETER, STATISTIC, EXTRA = "gradient/", "parameter/", "optimizer/", "buffer/"
MEASURE = "measure/"  # what a scheduler has to know of all peers
_ROLES: dict[str, TensorRole] = {
    GRADIENT: "gradient",
    PARAMETER: "parameter",
    STATISTIC: "optimizer",
    EXTRA: "buffer",
    MEASURE: "buffer",
}


class RolesByPrefix(Mapping[str, TensorRole]):
    """The role of a tensor, read off its name."""

    def __getitem__(self, name: str) -> TensorRole:
        return _ROLES[name.partition("/")[0] + "/"]

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names by which they travel."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those with the prefix, under the names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def named_parameters(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]] | None = None) -> dict[str, Parameter]:
    """The optimizer's parameters that are trained, by name, each once."""
    given = {id(tensor): name for name, tensor in named or ()}
    found: dict[str, Parameter] = {}
    seen: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            name = given.get(id(parameter)) or (names[index] if names is not None else f"{number}-{index}")
            if name in found:
                raise ConfigurationError(f"two parameters are called {name!r}: give each a name of its own")
            if not parameter.is_floating_point():
                raise ConfigurationError(f"parameter {name!r} is {parameter.dtype}: only real numbers can be trained")
            found[name] = parameter
    if not found:
        raise ConfigurationError("the optimizer has no parameter that requires a gradient: there is nothing to train")
    return found


def beside(tensors: Named, parameters: Named) -> dict[str, Tensor]:
    """Each tensor on the device of the parameter that it belongs to, by its name: NAME or KIND/NAME.

    States come on the CPU, whatever a peer computes on.
    """
    somewhere = next(iter(parameters.values())).device
    placed = {}
    for name, tensor in tensors.items():
        owner = parameters.get(name, parameters.get(name.partition("/")[2]))
        placed[name] = tensor.to(owner.device if owner is not None else somewhere)
    return placed


def memory_beside(memory: Mapping[str, Any], parameters: Named) -> dict[str, Any]:
    """The same for a saved memory, which has tensors by name under some of its keys."""
    return {
        key: beside(value, parameters) if isinstance(value, dict) and _has_tensors(value) else value
        for key, value in memory.items()
    }


def _has_tensors(values: Mapping[str, Any]) -> bool:
    return bool(values) and all(isinstance(value, Tensor) for value in values.values())


MAX_ORDERED = 10_000  # parameters: their order is part of each state's metadata
_POSITION = re.compile(r"[0-9]+-[0-9]+")


def is_named(names: Iterable[str]) -> bool:
    """Whether any of these is more than a position."""
    return not all(_POSITION.fullmatch(name) for name in names)


def order_of(names: Iterable[str]) -> list[int] | None:
    """For each name, in the order of the alphabet, its place among these; None where they are too many to say."""
    places = {name: place for place, name in enumerate(names)}
    return [places[name] for name in sorted(places)] if len(places) <= MAX_ORDERED else None


def in_order(names: Iterable[str], order: object) -> list[str] | None:
    """The names in the order that `order_of` told; None where that is not an order of so many."""
    known = sorted(names)
    if not isinstance(order, list) or not all(isinstance(place, int) for place in order):
        return None
    if sorted(order) != list(range(len(known))):
        return None
    placed = dict(zip(order, known, strict=True))
    return [placed[place] for place in range(len(known))]


@torch.no_grad()
def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether there is no NaN and no infinity in any of them."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    # Lengths are ten times cheaper than a look at each value, and finite only if all values are; so is their sum. They
    # may overflow where no value does: then each value is looked at.
    return all(
        math.isfinite(torch.stack(torch._foreach_norm(alike, 2)).sum().item())
        or all(bool(tensor.isfinite().all()) for tensor in alike)
        for alike in by_kind.values()
    )


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """What a model keeps beside its parameters, such as running means: part of the run's state.

    Buffers that `state_dict` leaves out are constants that every peer computes for itself.
    """
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()}
