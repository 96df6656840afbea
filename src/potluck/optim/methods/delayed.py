"""Asynchronous outer steps: changes arrive one by one, and momentum is delayed (Delayed Nesterov).

If every arriving change g took a Nesterov step, N peers would shake the momentum N times as often as it was tuned for.
So it changes only with every N-th arrival, by the mean of the changes since, and in between changes act as plain SGD:

    each arrival      θ ← θ − η·(c·β·m + g/N)
    each N-th         m ← β·m + (Σ g)/N;  θ ← θ − η·((1 − c·N + c)·β·m + g/N)

An arrival is an epoch. Two peers that are ready at the same moment make one together, whose g is the mean of their
changes: θ then goes half as far as by two arrivals, and the N-th comes one later. Where speeds differ that is rare;
where all are equally fast, take plain DiLoCo.

c in [0, 1/N] spreads the momentum over the arrivals; c = 0 applies it all at once. With N = 1 and c = 0 this is
Nesterov.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from potluck.errors import ConfigurationError
from potluck.optim.methods.outer import OuterOptimizer, _check_lr, _check_momentum


class DelayedNesterov(OuterOptimizer):
    """Nesterov for changes that arrive one by one."""

    def __init__(self, lr: float = 0.7, momentum: float = 0.9, *, delay: int, spread: float = 0.0) -> None:
        """`delay` is N, the number of peers; `spread` is c."""
        if delay < 1 or not 0.0 <= spread <= 1.0 / delay:
            raise ConfigurationError(
                f"delay={delay}, spread={spread}: take a delay of 1 or more, and 0 ≤ spread ≤ 1/delay"
            )
        self.lr = _check_lr(lr)
        self.momentum = _check_momentum(momentum)
        self.delay = delay
        self.spread = spread
        self._velocity: dict[str, Tensor] = {}
        self._buffer: dict[str, Tensor] = {}
        self._arrivals: dict[str, int] = {}

    @torch.no_grad()
    def step(self, parameters: Mapping[str, Tensor], change: Mapping[str, Tensor]) -> None:
        """One arrival."""
        for name, given in change.items():
            parameter = parameters[name]
            delta = given.to(parameter.dtype)
            velocity = self._velocity.setdefault(name, torch.zeros_like(parameter))
            buffer = self._buffer.setdefault(name, torch.zeros_like(parameter)).add_(delta)
            self._arrivals[name] = (self._arrivals.get(name, 0) + 1) % self.delay
            share = self.spread
            if self._arrivals[name] == 0:
                velocity.mul_(self.momentum).add_(buffer, alpha=1.0 / self.delay)
                buffer.zero_()
                share = 1.0 - self.spread * self.delay + self.spread
            parameter.sub_(delta.div(self.delay).add_(velocity, alpha=share * self.momentum), alpha=self.lr)

    def tensors(self) -> dict[str, Tensor]:
        """Velocities, and the changes since they last moved."""
        return {
            **{f"velocity/{name}": tensor for name, tensor in self._velocity.items()},
            **{f"buffer/{name}": tensor for name, tensor in self._buffer.items()},
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over somebody's memory."""
        self._velocity = {
            n.removeprefix("velocity/"): t.clone() for n, t in tensors.items() if n.startswith("velocity/")
        }
        self._buffer = {n.removeprefix("buffer/"): t.clone() for n, t in tensors.items() if n.startswith("buffer/")}

    def numbers(self) -> dict[str, Any]:
        """How many changes have arrived since the momentum last moved."""
        return {"arrivals": dict(self._arrivals)}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Take over somebody's count."""
        self._arrivals = {name: int(count) for name, count in numbers.get("arrivals", {}).items()}
