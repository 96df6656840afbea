"""The value network: an adapter for each task, one trunk for all, a PopArt head for each laptop and policy.

A head keeps the mean μ and the scale σ of its own targets and computes V = σ n + μ with n = w·h + b. When μ and σ
move, w and b are changed so that V stays what it was (van Hasselt and others, 2016):

    w′ = w σ/σ′     b′ = (σ b + μ − μ′)/σ′

So all heads learn targets of about the same size, however different the rewards are, and none pulls harder at the
trunk than another.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from potluck.fleet.value.fragment import Origin

LEAST_SCALE = 1e-4
MOST_SCALE = 1e6
LEAST_DEVIATION = 1e-3  # of an observation's feature; below it the feature says nothing
FARTHEST = 10.0  # deviations from the mean at which a feature is cut


class PopArtHead(nn.Module):
    """One value, normalised."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)
        nn.init.orthogonal_(self.linear.weight, 0.1)
        nn.init.zeros_(self.linear.bias)
        self.mean: Tensor
        self.square: Tensor
        self.weight: Tensor
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("square", torch.ones((), dtype=torch.float64))
        self.register_buffer(
            "weight", torch.zeros((), dtype=torch.float64)
        )  # of all targets so far; 0: there were none

    @property
    def scale(self) -> float:
        """σ."""
        return min(max(math.sqrt(max(float(self.square - self.mean**2), 0.0)), LEAST_SCALE), MOST_SCALE)

    def forward(self, hidden: Tensor) -> Tensor:
        """The normalised value, n."""
        return cast(Tensor, self.linear(hidden)).squeeze(-1)

    def value(self, hidden: Tensor) -> Tensor:
        """V."""
        return cast(Tensor, self(hidden)) * self.scale + float(self.mean)

    def normalise(self, targets: Tensor) -> Tensor:
        """Targets of V as targets of n."""
        return (targets - float(self.mean)) / self.scale

    @torch.no_grad()
    def follow(self, targets: Tensor, rate: float) -> None:
        """Move μ and σ towards those of these targets; V stays what it is."""
        mean, scale = float(self.mean), self.scale
        new_weight = (1 - rate) * float(self.weight) + rate
        share = rate / new_weight  # so that the first targets count fully, and the start not at all
        targets = targets.double()
        self.mean += share * (targets.mean() - self.mean)
        self.square += share * (targets.square().mean() - self.square)
        self.weight.fill_(new_weight)
        new_mean, new_scale = float(self.mean), self.scale
        self.linear.weight *= scale / new_scale
        self.linear.bias.copy_((scale * self.linear.bias + mean - new_mean) / new_scale)


class Adapter(nn.Module):
    """One task's observations, normalised by their running mean and deviation, as features for the trunk."""

    def __init__(self, num_features: int, width: int) -> None:
        super().__init__()
        self.linear = _linear(num_features, width)
        self.mean: Tensor
        self.square: Tensor
        self.seen: Tensor
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("square", torch.ones(num_features))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, observations: Tensor) -> Tensor:
        """What the trunk sees."""
        deviation = (self.square - self.mean.square()).clamp(min=LEAST_DEVIATION**2).sqrt()
        normal = ((observations - self.mean) / deviation).clamp(-FARTHEST, FARTHEST)
        return torch.tanh(self.linear(normal))

    @torch.no_grad()
    def follow(self, observations: Tensor, memory: float) -> None:
        """Learn mean and deviation from these observations; `memory` is how many the past counts for, at most."""
        seen = min(float(self.seen), memory)
        share = len(observations) / (seen + len(observations))
        self.mean += share * (observations.mean(0) - self.mean)
        self.square += share * (observations.square().mean(0) - self.square)
        self.seen.fill_(seen + len(observations))


class ValueNetwork(nn.Module):
    """Values of all origins. Adapters and heads are added as origins turn up."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width = width
        layers: list[nn.Module] = []
        for _ in range(depth - 1):
            layers += [_linear(width, width), nn.Tanh()]
        self.trunk = nn.Sequential(*layers)
        self.adapters = nn.ModuleDict()
        self.heads = nn.ModuleDict()

    def knows(self, origin: Origin) -> bool:
        """Whether it has a value for this origin."""
        return origin.head in self.heads and origin.task in self.adapters

    def add(self, origin: Origin, num_features: int) -> list[nn.Parameter]:
        """Make what is missing for an origin; returns the new parameters."""
        new: list[nn.Parameter] = []
        if origin.task not in self.adapters:
            self.adapters[origin.task] = Adapter(num_features, self.width)
            new += self.adapters[origin.task].parameters()
        if origin.head not in self.heads:
            self.heads[origin.head] = PopArtHead(self.width)
            new += self.heads[origin.head].parameters()
        return new

    def adapter(self, task: str) -> Adapter:
        """The adapter of a task."""
        return cast(Adapter, self.adapters[task])

    def head(self, origin: Origin) -> PopArtHead:
        """The head of an origin."""
        return cast(PopArtHead, self.heads[origin.head])

    def num_features(self, task: str) -> int:
        """The size of a task's observations."""
        return self.adapter(task).linear.in_features

    def hidden(self, origin: Origin, observations: Tensor) -> Tensor:
        """What a head sees."""
        return cast(Tensor, self.trunk(self.adapters[origin.task](observations)))

    def normalised(self, origin: Origin, observations: Tensor) -> Tensor:
        """The normalised value of each observation."""
        return cast(Tensor, self.heads[origin.head](self.hidden(origin, observations)))

    @torch.no_grad()
    def values(self, origin: Origin, observations: Any) -> Tensor:
        """V of each observation."""
        return (
            self.head(origin).value(self.hidden(origin, as_observations(observations))).reshape(observations.shape[:-1])
        )


def as_observations(observations: Any) -> Tensor:
    """Observations of any leading shape as rows. A copy: what came through a queue is read-only."""
    return torch.from_numpy(np.array(observations, np.float32)).reshape(-1, observations.shape[-1])


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, math.sqrt(2))
    nn.init.zeros_(layer.bias)
    return layer
