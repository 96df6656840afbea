"""Training a value network on fragments: the learner does it for everybody, each laptop for its own small critic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from potluck.errors import ConfigurationError
from potluck.fleet.value.fragment import Fragment, Origin
from potluck.fleet.value.network import ValueNetwork, as_observations
from potluck.fleet.value.returns import v_trace_targets

Array = npt.NDArray[Any]
TrunkOptimizer = Callable[[nn.Module], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueConfig:
    """How a value network is made and trained."""

    width: int = 64
    """Of each layer."""

    depth: int = 2
    """Layers before the head, the adapter included."""

    learning_rate: float = 1e-3
    """Adam's."""

    passes: int = 6
    """How often each fragment is gone through; less often where several of one origin have piled up."""

    minibatches: int = 4
    """Updates in each pass."""

    smoothing: float = 0.95
    """λ of the targets."""

    statistics_rate: float = 0.1
    """How fast μ and σ of a head follow its targets, for each fragment."""

    observations_memory: float = 100_000
    """How many observations count for the normalisation of the next."""

    max_gradient_norm: float = 0.5
    """Larger gradients are scaled down to it."""

    def __post_init__(self) -> None:
        for name in ("width", "depth", "learning_rate", "passes", "minibatches", "max_gradient_norm"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} of a value network must be more than 0, not {getattr(self, name)}")
        for name in ("smoothing", "statistics_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"{name} of a value network is {getattr(self, name)}: choose 0 to 1")


def values_of(network: ValueNetwork, origin: Origin, fragment: Fragment) -> tuple[Array, Array]:
    """V of each step's observation, and of the one that followed it before any reset."""
    rows = network.values(origin, fragment.observations).double().numpy()
    values, next_values = rows[:-1], rows[1:].copy()
    truncated = fragment.truncated.astype(bool)
    if truncated.any():
        next_values[truncated] = network.values(origin, fragment.final_observations).double().numpy()
    return values, next_values


class ValueTrainer:
    """A network with its optimizer."""

    def __init__(
        self, network: ValueNetwork, config: ValueConfig, seed: int = 0, trunk_optimizer: TrunkOptimizer | None = None
    ) -> None:
        """`trunk_optimizer` makes an optimizer for the trunk where others train it too; else it is as the rest."""
        self.network = network
        self.config = config
        self.num_updates = 0
        self._generator = torch.Generator().manual_seed(seed)
        self.trunk = trunk_optimizer(network.trunk) if trunk_optimizer is not None else None
        ours = [*network.parameters()] if self.trunk is None else []
        self._optimizer = torch.optim.Adam(
            ours or [nn.Parameter(torch.zeros(1))], config.learning_rate, eps=1e-5, fused=True
        )

    def learn(self, batch: Sequence[tuple[Origin, Fragment]]) -> dict[str, float]:
        """Go through fragments of any origins; returns the mean squared error of each head, normalised, before it."""
        observations: dict[Origin, list[Tensor]] = {}
        targets: dict[Origin, list[Tensor]] = {}
        for origin, fragment in batch:
            seen, wanted = self._targets(origin, fragment)
            observations.setdefault(origin, []).append(seen)
            targets.setdefault(origin, []).append(wanted)
        data = {origin: (torch.cat(observations[origin]), torch.cat(targets[origin])) for origin in observations}
        errors: dict[str, float] = {}
        # Where fragments of one origin have piled up, each gets fewer passes: who trains for others must keep up.
        for number in range(max(1, round(self.config.passes * len(data) / len(batch)))):
            first = self._pass(data)
            if number == 0:
                errors = first
        return errors

    def prepare(self, origin: Origin, fragment: Fragment) -> None:
        """Have an adapter and a head for an origin."""
        new = self.network.add(origin, fragment.num_features)
        if new:
            self._optimizer.add_param_group({"params": new})

    def _targets(self, origin: Origin, fragment: Fragment) -> tuple[Tensor, Tensor]:
        self.prepare(origin, fragment)
        seen = as_observations(fragment.observations[:-1])
        self.network.adapter(origin.task).follow(seen, self.config.observations_memory)
        values, next_values = values_of(self.network, origin, fragment)
        targets = v_trace_targets(
            fragment.rewards,
            values,
            next_values,
            fragment.terminated,
            fragment.truncated,
            *fragment.behaviour_and_present(),
            discount=fragment.discount,
            smoothing=self.config.smoothing,
        )
        wanted = torch.as_tensor(targets, dtype=torch.float32).reshape(-1)
        self.network.head(origin).follow(wanted, self.config.statistics_rate)
        return seen, wanted

    def _pass(self, data: dict[Origin, tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Each sample once. Each head has the same share in each update, however many samples it has."""
        orders = {
            origin: torch.randperm(len(wanted), generator=self._generator).chunk(self.config.minibatches)
            for origin, (_, wanted) in data.items()
        }
        errors = {origin.head: 0.0 for origin in data}
        for number in range(self.config.minibatches):
            losses, num_samples = [], 0
            for origin, (seen, wanted) in data.items():
                if number >= len(orders[origin]):
                    continue  # fewer samples than minibatches
                chosen = orders[origin][number]
                goal = self.network.head(origin).normalise(wanted[chosen])
                loss = (self.network.normalised(origin, seen[chosen]) - goal).square().mean()
                errors[origin.head] += float(loss.detach()) / len(orders[origin])
                losses.append(loss)
                num_samples += len(chosen)
            self._update(torch.stack(losses).mean(), num_samples)
        return errors

    def _update(self, loss: Tensor, num_samples: int) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.network.parameters(), self.config.max_gradient_norm)
        self._optimizer.step()
        if self.trunk is not None:
            self.trunk.step(batch_size=num_samples)
            self.trunk.zero_grad()
        self.num_updates += 1


def error_of(values: Array, targets: Array) -> float:
    """How far values are from what came out, in shares of its variance: 0 is perfect, 1 is a constant."""
    variance = float(np.var(targets))
    return max(float(np.mean((targets - values) ** 2)) / max(variance, 1e-8), 1e-8)
