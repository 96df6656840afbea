"""Gradients of several batches, added up until the run has enough.

What counts is the mean over samples. The first batch's gradients are taken as they are, without a copy, and later ones
are added with their size relative to the first. So batches of equal size are simply summed, as autograd itself would
do it, and the division comes last: one batch alone, or a power of two of equal ones, gives the bits of plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from potluck.errors import ConfigurationError
from potluck.optim.parameters import are_finite


@dataclass(slots=True)
class MeanGradients:
    """What was taken out of an accumulator: the mean over so many samples."""

    tensors: dict[str, Tensor]
    samples: int
    missing: frozenset[str]
    """Parameters that had no gradient in any batch; their tensors are zeros, for the others' sake."""

    num_batches: int = 1


class GradientAccumulator:
    """Takes gradients out of the parameters, batch by batch."""

    def __init__(self, parameters: Mapping[str, Parameter], *, reuse_grad_buffers: bool = False) -> None:
        """With `reuse_grad_buffers`, sums stay in the parameters' own `.grad`, and all batches count the same."""
        self.samples = 0
        self.num_batches = 0
        self._parameters = parameters
        self._reuse = reuse_grad_buffers
        self._sums: dict[str, Tensor] = {}
        self._unit = 1  # samples that count as 1 in the sums
        self._units = 0.0  # how many of them there are

    @torch.no_grad()
    def add(self, batch_size: int, *, is_checked: bool = False) -> bool:
        """Take in the gradients of one batch; False when they are not finite, and then nothing of them counts.

        Whether they are is looked at here, unless a gradient scaler has done so: on a GPU everything waits for it.
        With reused buffers, nothing counts then of the batches before it either: they cannot be told apart any more.
        """
        if batch_size < 1:
            raise ConfigurationError(f"batch_size={batch_size}: a step needs at least 1 sample")
        gradients = self._gradients()
        if not is_checked and not are_finite(gradients.values()):
            self._drop(gradients)
            return False
        if not self._reuse:
            self._add(gradients, batch_size)
        self.samples += batch_size
        self.num_batches += 1
        return True

    def take(self) -> MeanGradients:
        """The mean so far; the accumulator is empty afterwards."""
        if self._reuse:
            self._sums, self._units = self._gradients(), float(self.num_batches)
        tensors, missing = {}, set()
        for name, parameter in self._parameters.items():
            total = self._sums.get(name)
            if total is None:
                missing.add(name)
                total = _zeros(parameter)
            elif self._units != 1.0:
                total.div_(self._units)
            tensors[name] = total
        taken = MeanGradients(tensors, self.samples, frozenset(missing), self.num_batches)
        self.reset()
        return taken

    def nothing(self) -> MeanGradients:
        """The mean over no samples; what is here stays here."""
        zeros = {name: _zeros(parameter) for name, parameter in self._parameters.items()}
        return MeanGradients(zeros, 0, frozenset(zeros), 0)

    def put_back(self, taken: MeanGradients) -> None:
        """What was taken was not used: count it again, beside what came since."""
        if not taken.samples:
            return
        if self._reuse:
            for name, tensor in taken.tensors.items():
                if name not in taken.missing:
                    self._parameters[name].grad = tensor.mul_(float(taken.num_batches))
        else:
            newer, samples = self._sums, self.samples
            ratio = self._unit / taken.samples
            self._sums = {name: tensor for name, tensor in taken.tensors.items() if name not in taken.missing}
            for name, tensor in newer.items():
                self._sums[name] = self._sums[name].add_(tensor, alpha=ratio) if name in self._sums else tensor * ratio
            self._unit, self._units = taken.samples, 1.0 + samples / taken.samples
        self.samples += taken.samples
        self.num_batches += taken.num_batches

    def reset(self) -> None:
        """Forget everything. With reused buffers, what was taken is no longer in the parameters either."""
        if self._reuse:
            for parameter in self._parameters.values():
                parameter.grad = None
        self._sums = {}
        self.samples, self.num_batches = 0, 0
        self._unit, self._units = 1, 0.0

    def state_dict(self) -> dict[str, object]:
        """All that is needed to go on with the same bits."""
        sums = self._gradients() if self._reuse else self._sums
        return {
            "samples": self.samples,
            "num_batches": self.num_batches,
            "unit": self._unit,
            "units": self._units,
            "sums": {name: tensor.clone() for name, tensor in sums.items()} if self.samples else {},
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from a saved state."""
        self.reset()
        sums: dict[str, Tensor] = state["sums"]  # type: ignore[assignment]
        for name, tensor in sums.items():
            parameter = self._parameters[name]
            if self._reuse:
                parameter.grad = tensor.to(parameter.device, parameter.dtype, copy=True)
            else:
                self._sums[name] = tensor.to(parameter.device, _sum_dtype(parameter), copy=True)
        self.samples, self.num_batches = int(state["samples"]), int(state["num_batches"])  # type: ignore[call-overload]
        self._unit, self._units = int(state["unit"]), float(state["units"])  # type: ignore[call-overload, arg-type]

    def _gradients(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                raise ConfigurationError(
                    f"parameter {name!r} has a sparse gradient, which cannot be averaged: use a dense embedding"
                )
            found[name] = gradient.detach() if gradient.requires_grad else gradient
        return found

    def _add(self, gradients: Mapping[str, Tensor], batch_size: int) -> None:
        if not self.samples:
            self._unit = batch_size
        ratio = batch_size / self._unit
        # Between rounds this is all that a step does: whole lists at a time, and little for each parameter.
        known = [name for name in gradients if name in self._sums]
        if known:
            torch._foreach_add_([self._sums[name] for name in known], [gradients[name] for name in known], alpha=ratio)
        if len(known) < len(gradients):
            for name, gradient in gradients.items():
                if name not in self._sums:
                    first = gradient.to(_sum_dtype(gradient))  # the tensor itself, where it is float32
                    self._sums[name] = first if ratio == 1.0 else first * ratio
        for name in gradients:
            self._parameters[name].grad = None
        self._units += ratio

    def _drop(self, gradients: Mapping[str, Tensor]) -> None:
        for name in gradients:
            self._parameters[name].grad = None
        if self._reuse:  # the sums were in the same buffers
            self.samples = self.num_batches = 0


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def _zeros(parameter: Parameter) -> Tensor:
    return torch.zeros_like(parameter, dtype=_sum_dtype(parameter), requires_grad=False)
