"""A model as a list of blocks: cut, checked, and run so that a replay anywhere gives the same values.

A block is a module that takes the tensors of the block before it and returns those for the next. The first takes the
batch, the last returns the mean loss: labels travel with the activation. A recipe offers `blocks()`, or has a model
that is an `nn.Sequential`, which is cut here.

Randomness (dropout) is seeded by (run seed, step, micro-batch, block). So it does not depend on the machine that
computes a micro-batch, nor on what that machine computed before, nor on whether it is a recomputation.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from potluck.errors import ConfigurationError

_DRAWING = threading.RLock()  # torch's generator is one for all threads of a process

State = tuple[Tensor, ...]
Loss = Callable[[nn.Module, State], Tensor]
"""A recipe's `loss`: calls the model on a part of the batch, and compares."""


class _CapturedInput(Exception):  # noqa: N818 - not an error: it carries what the loss called the model with
    def __init__(self, value: Tensor) -> None:
        super().__init__("captured")
        self.value = value


class _Capture(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        raise _CapturedInput(value)


class _Given(nn.Module):
    """Stands for the model where its output is known already."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, value: Tensor) -> Tensor:
        return self.output


class Layer(nn.Module):
    """A layer of one tensor as a block: what travels with the activation passes by. The first asks the loss for it."""

    def __init__(self, layer: nn.Module, loss: Loss | None) -> None:
        super().__init__()
        self.layer = layer
        self._loss = loss

    def forward(self, *state: Tensor) -> State:
        """(activation, *batch), or the batch alone at the first block."""
        if self._loss is None:
            return (self.layer(state[0]), *state[1:])
        try:
            self._loss(_Capture(), state)
        except _CapturedInput as captured:
            return (self.layer(captured.value), *state)
        raise ConfigurationError("the recipe's loss does not call the model: such a model cannot be cut into blocks")


class LossBlock(nn.Module):
    """The end of a model that was cut here: (output, *batch) to the loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self._loss = loss

    def forward(self, *state: Tensor) -> Tensor:
        """The mean loss."""
        return self._loss(_Given(state[0]), state[1:])


def cut(model: nn.Module, loss: Loss) -> list[nn.Module]:
    """A plain `nn.Sequential` as blocks, one per layer; those inside it are opened too."""
    layers = list(_layers(model))
    if not layers:
        raise ConfigurationError(
            f"a {type(model).__name__} cannot be cut into blocks by itself: give the recipe a blocks() that returns "
            "them, or make the model an nn.Sequential"
        )
    blocks: list[nn.Module] = [Layer(layer, loss if place == 0 else None) for place, layer in enumerate(layers)]
    return [*blocks, LossBlock(loss)]


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        for layer in model:
            yield from _layers(layer) if isinstance(layer, nn.Sequential) else (layer,)


def check_blocks(blocks: Sequence[nn.Module]) -> None:
    """ConfigurationError where a pipeline cannot train these blocks as one process would."""
    if not blocks:
        raise ConfigurationError("a model without blocks: blocks() must return one at least")
    for number, block in enumerate(blocks):
        for name, module in block.named_modules():
            if isinstance(module, _BatchNorm) and module.training:
                raise ConfigurationError(
                    f"block {number} has {type(module).__name__} at {name or 'its top'}: its statistics would be "
                    "those of a micro-batch on one server. Use nn.GroupNorm, or freeze it with .eval()"
                )


@dataclass(frozen=True)
class Tie:
    """A parameter that several blocks share, as an embedding and a head do."""

    names: tuple[tuple[int, str], ...]
    """Where it stands: (block, name in that block), the first first."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks that have it."""
        return tuple(sorted({block for block, _ in self.names}))


def ties_of(blocks: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """The parameters that more than one block has, in the order of their first place."""
    places: dict[int, list[tuple[int, str]]] = {}
    for number, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            places.setdefault(id(parameter), []).append((number, name))
    return tuple(Tie(tuple(found)) for found in places.values() if len({number for number, _ in found}) > 1)


def units_of(stages: Sequence[range], ties: Iterable[Tie]) -> tuple[tuple[int, ...], ...]:
    """The stages of each unit. A unit is what is averaged, saved and moved together: each block, then each tie.

    Units do not depend on the layout; which stages they belong to does.
    """
    units: list[tuple[int, ...]] = [(stage,) for stage, blocks in enumerate(stages) for _ in blocks]
    units += [tuple(s for s, blocks in enumerate(stages) if any(b in blocks for b in tie.blocks)) for tie in ties]
    return tuple(units)


def unit_parameters(
    blocks: Mapping[int, nn.Module], ties: Sequence[Tie], numbers: Iterable[int], num_blocks: int
) -> dict[int, dict[str, nn.Parameter]]:
    """The trainable parameters of these blocks by unit, and by name; each parameter is in one unit.

    A parameter that several blocks share is in a unit of its own, under the name of its first place.
    """
    shared = {place: (num_blocks + index, tie.names[0]) for index, tie in enumerate(ties) for place in tie.names}
    units: dict[int, dict[str, nn.Parameter]] = {number: {} for number in numbers}
    seen: set[int] = set()
    for number in list(units):
        for name, parameter in blocks[number].named_parameters():
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            unit, (block, own) = shared.get((number, name), (number, (number, name)))
            units.setdefault(unit, {})[f"{block}.{own}"] = parameter
    return units


def seed_of(*parts: int) -> int:
    """A seed for torch that depends on all parts."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Draw from this seed here, and as before afterwards.

    On the processor its own generator is seeded alone: `torch.manual_seed` visits each kind of accelerator that torch
    knows, which takes longer than a small block.
    """
    with _DRAWING:
        if device is not None and device.type != "cpu":
            with torch.random.fork_rng(devices=[device], device_type=device.type):
                torch.manual_seed(seed)
                yield
            return
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


def run_blocks(blocks: Mapping[int, nn.Module], numbers: Iterable[int], state: State, seed: tuple[int, ...]) -> State:
    """The state after these blocks; `seed` is (run seed, step, micro-batch)."""
    device = state[0].device
    for number in numbers:
        with seeded(seed_of(*seed, number), device):
            output = blocks[number](*state)
        state = output if isinstance(output, tuple) else (output,)
    return state
