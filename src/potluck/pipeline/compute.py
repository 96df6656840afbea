"""A stage's arithmetic: forward, backward, and the sum of gradients with the ids that are in it.

Runs in the server's compute thread; the fence and the averages come from the event loop. A lock makes "is this attempt
still the current one" and "add" one act, so that what the fence hears is all that was added, and nothing is added
behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from potluck.pipeline.blocks import State, Tie, run_blocks, unit_parameters

Recompute = Literal["auto", "always", "never"]
Key = tuple[int, int]
"""(attempt, micro-batch)."""

MAX_SHAPES = 1024  # of inputs, whose graph's size is remembered


@dataclass
class _Kept:
    inputs: State
    outputs: State | None
    """With their graph; None: they are computed again."""
    has_gradient: tuple[bool, ...]
    """Of which outputs the next stage was told so: their gradients come back."""
    graph_bytes: int


@dataclass
class StageCompute:
    """One stage on one server."""

    stage: int
    stages: Sequence[range]
    blocks: Mapping[int, nn.Module]
    ties: Sequence[Tie]
    num_blocks: int
    run_seed: int = 0
    recompute: Recompute = "auto"
    keep_bytes: int = 1 << 30
    """What graphs may take, where recomputation is automatic."""
    step: int = -1
    attempt: int = 0
    valid_from: int = 0
    """The first attempt of which sums count in this step."""
    num_recomputed: int = 0
    _graph_bytes: dict[tuple[torch.Size, ...], int] = field(default_factory=dict)  # by shapes of the inputs
    _kept: dict[Key, _Kept] = field(default_factory=dict)
    _added: dict[int, float] = field(default_factory=dict)  # micro-batch -> its loss
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        named = unit_parameters(self.blocks, self.ties, self.stages[self.stage], self.num_blocks)
        self.units = {unit: list(parameters.values()) for unit, parameters in named.items()}
        self.parameters = [parameter for unit in sorted(self.units) for parameter in self.units[unit]]
        self._sums = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")

    @property
    def is_last(self) -> bool:
        """Whether this stage gives the loss."""
        return self.stage == len(self.stages) - 1

    # The fence

    def fence(self, step: int, attempt: int, valid_from: int = 0) -> dict[int, float]:
        """From now on only this attempt counts; returns what was added in this step, with its loss.

        Where `valid_from` is new, what was added so far is forgotten.
        """
        with self._lock:
            if step != self.step or valid_from > self.valid_from:
                self.valid_from = valid_from
                self._added.clear()
                for total in self._sums:
                    total.zero_()
            self.step, self.attempt = step, attempt
            self._kept = {}
            return dict(sorted(self._added.items()))

    def _is_current(self, step: int, key: Key) -> bool:
        return step == self.step and key[0] == self.attempt

    # The compute thread

    def forward(self, step: int, key: Key, inputs: State) -> State | None:
        """The tensors for the next stage; None where the attempt is over. At the last stage: the loss."""
        keeps = self.recompute == "never" or self.is_last or (self.recompute == "auto" and self._has_room())
        with torch.set_grad_enabled(keeps):
            outputs, graph_bytes = self._run_and_count(step, key[1], inputs)
        if not keeps:  # which of them have a gradient is known without computing it
            needs = any(tensor.requires_grad for tensor in inputs) or bool(self.parameters)
            outputs = tuple(
                output.requires_grad_(needs and output.is_floating_point() and not _is_one_of(output, inputs))
                for output in outputs
            )
        with self._lock:
            if not self._is_current(step, key):
                return None
            self._kept[key] = _Kept(
                inputs, outputs if keeps else None, tuple(output.requires_grad for output in outputs), graph_bytes
            )
        return outputs

    def backward(
        self, step: int, key: Key, gradients: Sequence[Tensor], *, weight: float, adds: bool, loss: float = 0.0
    ) -> tuple[Tensor, ...] | None:
        """Gradients of the inputs that want one, after the gradient is added; None where the attempt is over."""
        with self._lock:
            kept = self._kept.pop(key, None)
            if kept is None or not self._is_current(step, key):
                return None
        outputs = kept.outputs
        if outputs is None:
            self.num_recomputed += 1
            outputs = self._run(step, key[1], kept.inputs)
        wanted = [tensor for tensor in kept.inputs if tensor.requires_grad]
        told = [output for output, has in zip(outputs, kept.has_gradient, strict=True) if has]
        pairs = [(output, given) for output, given in zip(told, gradients, strict=True) if output.requires_grad]
        found: tuple[Tensor | None, ...] = (None,) * (len(wanted) + len(self.parameters))
        if pairs:
            outs, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(outs, [*wanted, *self.parameters], given, allow_unused=True)
        inputs = tuple(
            gradient if gradient is not None else torch.zeros_like(tensor)
            for gradient, tensor in zip(found, wanted, strict=False)
        )
        with self._lock:
            if not self._is_current(step, key):
                return None
            if adds and key[1] not in self._added:
                for total, gradient in zip(self._sums, found[len(wanted) :], strict=True):
                    if gradient is not None:
                        total.add_(gradient, alpha=weight)
                self._added[key[1]] = loss
        return inputs

    @torch.no_grad()
    def look(self, step: int, micro: int, inputs: State) -> State:
        """The tensors for the next stage in evaluation mode: nothing is kept, and no gradient comes."""
        modules = [module for number in self.stages[self.stage] for module in self.blocks[number].modules()]
        modes = [module.training for module in modules]  # of each: some may be frozen
        for module in modules:
            module.training = False
        try:
            return self._run(step, micro, inputs)
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode

    def _run(self, step: int, micro: int, inputs: State) -> State:
        return run_blocks(self.blocks, self.stages[self.stage], inputs, (self.run_seed, step, micro))

    def _run_and_count(self, step: int, micro: int, inputs: State) -> tuple[State, int]:
        """The outputs, and what their graph takes: counted once for each shape of inputs, since a hook for each
        tensor costs more than a small block.
        """
        if not torch.is_grad_enabled():
            return self._run(step, micro, inputs), 0
        shapes = tuple(tensor.shape for tensor in inputs)
        known = self._graph_bytes.get(shapes)
        if known is not None:
            return self._run(step, micro, inputs), known
        graph_bytes = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal graph_bytes
            graph_bytes += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            outputs = self._run(step, micro, inputs)
        if len(self._graph_bytes) >= MAX_SHAPES:
            self._graph_bytes.clear()
        self._graph_bytes[shapes] = graph_bytes
        return outputs, graph_bytes

    def _has_room(self) -> bool:
        kept = list(self._kept.values())
        largest = max((each.graph_bytes for each in kept), default=0)
        return sum(each.graph_bytes for each in kept) + largest <= self.keep_bytes

    @property
    def num_kept(self) -> int:
        """Micro-batches whose backward is still to come."""
        return len(self._kept)

    # Averages

    def contribution(self, unit: int) -> tuple[Tensor, tuple[int, ...]]:
        """The sum of a unit's gradients, as one vector, and the ids in it."""
        with self._lock:
            sums = [self._sums[place] for place in self._places(unit)]
            values = [total.reshape(-1).to("cpu", torch.float32) for total in sums]
            return torch.cat([torch.zeros(0), *values]), tuple(sorted(self._added))

    def _places(self, unit: int) -> list[int]:
        ids = [id(parameter) for parameter in self.parameters]
        return [ids.index(id(parameter)) for parameter in self.units[unit]]


def _is_one_of(output: Tensor, inputs: State) -> bool:
    """A tensor that passes by, as labels do."""
    return any(output is tensor for tensor in inputs)
