"""Four policies: a small MLP, a wide one, one with ReLU, and a GRU. Each laptop has its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Policy(nn.Module):
    """Logits of actions from observations, and from a memory where there is one (else it has the size 0)."""

    memory_size = 0

    def forward(self, observations: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One step of many environments: logits, and the memory after it."""
        raise NotImplementedError

    def sequence(self, observations: Tensor, memory: Tensor, begins: Tensor) -> Tensor:
        """Logits of steps in a row [T, N]; where an episode `begins`, its memory is empty."""
        logits = []
        for step in range(len(observations)):
            memory = memory * ~begins[step, :, None]
            logit, memory = self(observations[step], memory)
            logits.append(logit)
        return torch.stack(logits)


class Feedforward(Policy):
    """Layers of units between observation and action."""

    def __init__(self, num_features: int, num_actions: int, widths: tuple[int, ...], unit: type[nn.Module]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in zip((num_features, *widths), widths, strict=False):
            layers += [layer(inputs, outputs), unit()]
        self.layers = nn.Sequential(*layers, layer(widths[-1], num_actions, 0.01))

    def forward(self, observations: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(observations), memory

    def sequence(self, observations: Tensor, memory: Tensor, begins: Tensor) -> Tensor:
        return self.layers(observations)


class Recurrent(Policy):
    """A GRU: it remembers what it saw in this episode."""

    def __init__(self, num_features: int, num_actions: int, width: int) -> None:
        super().__init__()
        self.memory_size = width
        self.encoder = nn.Sequential(layer(num_features, width), nn.Tanh())
        self.cell = nn.GRUCell(width, width)
        self.head = layer(2 * width, num_actions, 0.01)

    def forward(self, observations: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.encoder(observations)
        memory = self.cell(seen, memory)
        return self.head(torch.cat([seen, memory], -1)), memory


def layer(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    """Orthogonal weights, no bias at the start."""
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


NAMES = ("mlp", "wide", "relu", "gru")


def make(name: str, num_features: int, num_actions: int) -> Policy:
    """A policy by name."""
    if name == "gru":
        return Recurrent(num_features, num_actions, 64)
    widths, unit = {
        "mlp": ((64, 64), nn.Tanh),
        "wide": ((256,), nn.Tanh),
        "relu": ((64, 64), nn.ReLU),
    }[name]
    return Feedforward(num_features, num_actions, widths, unit)
