"""One unit's state: its parameters and their optimizer, and the step that they stand at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from potluck.errors import ProtocolError

PARAMETER, STATISTIC, NUMBER = "parameter/", "statistic/", "number/"


@dataclass(frozen=True)
class Optimizing:
    """Which optimizer steps a unit, and with which numbers at which step."""

    make: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
    set_numbers: Callable[[torch.optim.Optimizer, int], None] = lambda optimizer, step: None
    """Learning rate and the like of this step; by the step alone, so that all holders have the same."""


class UnitState:
    """Lives in the compute thread, except while nothing is computed."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizing: Optimizing) -> None:
        self.parameters = dict(parameters)
        self._optimizing = optimizing
        self._optimizer = optimizing.make(self.parameters) if self.parameters else None

    @property
    def num_values(self) -> int:
        """Of the parameters."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    def apply(self, average: Tensor, factor: float, step: int) -> None:
        """Take a step with this gradient, times the factor."""
        if self._optimizer is None:
            return
        offset = 0
        for parameter in self.parameters.values():
            values = average[offset : offset + parameter.numel()].reshape(parameter.shape)
            parameter.grad = (values * factor).to(parameter.device, parameter.dtype)
            offset += parameter.numel()
        self._optimizing.set_numbers(self._optimizer, step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name: not copies."""
        found = {PARAMETER + name: parameter.detach() for name, parameter in self.parameters.items()}
        if self._optimizer is not None:
            for name, parameter in self.parameters.items():
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        found[f"{STATISTIC}{key}/{name}"] = value
                    else:
                        found[f"{NUMBER}{key}/{name}"] = torch.tensor(value, dtype=torch.float64)
        return found

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Become what `tensors` of another peer gave. ProtocolError where that is of another model."""
        for name, parameter in self.parameters.items():
            given = tensors.get(PARAMETER + name)
            if given is None or given.shape != parameter.shape:
                raise ProtocolError(
                    f"the state has no {name} of shape {tuple(parameter.shape)}: it is of another model"
                )
            parameter.copy_(given)
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        for name, value in tensors.items():
            kind, _, rest = name.partition("/")
            key, _, owner = rest.partition("/")
            if kind + "/" not in (STATISTIC, NUMBER) or owner not in self.parameters:
                continue
            parameter = self.parameters[owner]
            state: dict[str, Any] = self._optimizer.state[parameter]
            if kind + "/" == NUMBER:
                number = value.item()
                state[key] = int(number) if number == int(number) else number
            else:  # counters stay where torch has them, on the CPU
                state[key] = value.clone().to(parameter.device if value.dim() or parameter.dim() == 0 else "cpu")
