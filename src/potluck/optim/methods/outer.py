"""Outer optimizers: the parameters that all peers share take a step against their averaged change.

DiLoCo's outer gradient is Δ = θ − θ_k, what a peer's inner steps have *subtracted*, so the step is a descent:

    SGD        θ ← θ − η·Δ̄                                  η = 1: the average of the peers' parameters (FedAvg)
    Nesterov   v ← Δ̄ + β·v;  θ ← θ − η·(Δ̄ + β·v)            η = 0.7, β = 0.9 in DiLoCo

Each parameter has its own momentum, so fragments of a model can step at different times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from potluck.errors import ConfigurationError


class OuterOptimizer(ABC):
    """Changes the shared parameters in place."""

    @abstractmethod
    def step(self, parameters: Mapping[str, Tensor], change: Mapping[str, Tensor]) -> None:
        """One step of those parameters that have a change."""

    def tensors(self) -> dict[str, Tensor]:
        """The memory that all peers hold alike, live."""
        return {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027 - SGD has no memory
        """Take over somebody's memory."""

    def numbers(self) -> dict[str, Any]:
        """What the memory has beside tensors."""
        return {}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:  # noqa: B027
        """Take over somebody's."""


class OuterSGD(OuterOptimizer):
    """No memory."""

    def __init__(self, lr: float = 1.0) -> None:
        self.lr = _check_lr(lr)

    @torch.no_grad()
    def step(self, parameters: Mapping[str, Tensor], change: Mapping[str, Tensor]) -> None:
        """θ ← θ − η·Δ̄."""
        for name, delta in change.items():
            parameters[name].sub_(delta.to(parameters[name].dtype), alpha=self.lr)


class Nesterov(OuterOptimizer):
    """Momentum that looks ahead."""

    def __init__(self, lr: float = 0.7, momentum: float = 0.9) -> None:
        self.lr = _check_lr(lr)
        self.momentum = _check_momentum(momentum)
        self._velocity: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, parameters: Mapping[str, Tensor], change: Mapping[str, Tensor]) -> None:
        """V ← Δ̄ + β·v;  θ ← θ − η·(Δ̄ + β·v)."""
        for name, given in change.items():
            parameter = parameters[name]
            delta = given.to(parameter.dtype)
            velocity = self._velocity.get(name)
            if velocity is None:
                velocity = self._velocity[name] = delta.clone()
            else:
                velocity.mul_(self.momentum).add_(delta)
            parameter.sub_(delta.add(velocity, alpha=self.momentum), alpha=self.lr)

    def tensors(self) -> dict[str, Tensor]:
        """The velocities."""
        return dict(self._velocity)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over velocities."""
        self._velocity = {name: tensor.clone() for name, tensor in tensors.items()}


def _check_lr(lr: float) -> float:
    if not lr > 0:
        raise ConfigurationError(f"an outer learning rate of {lr}: it must be above 0")
    return lr


def _check_momentum(momentum: float) -> float:
    if not 0.0 <= momentum < 1.0:
        raise ConfigurationError(f"an outer momentum of {momentum}: it must be 0 or more, and below 1")
    return momentum
