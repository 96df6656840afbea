"""The toy models of bench_pipeline.py: layers of a transformer, or layers that sleep; a block each, and a loss.

Layers that sleep cost no processor, so that many servers of any speed fit on one machine: what is measured then is who
waits for whom.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SEED = 0


@dataclass(frozen=True)
class Toy:
    """How large it is."""

    width: int
    length: int
    micro_batch: int
    num_micro_batches: int
    layers_per_stage: int = 1
    num_stages: int = 4
    sleep_seconds: tuple[float, float] | None = None
    """Of a layer, for a micro-batch: forward, and backward; None: it computes."""

    @property
    def num_blocks(self) -> int:
        return self.num_stages * self.layers_per_stage

    def blocks(self, slowness: float = 1.0) -> Iterator[nn.Module]:
        """`slowness`: of this machine, where layers sleep."""
        for number in range(self.num_blocks):
            is_last = number == self.num_blocks - 1
            if self.sleep_seconds is None:
                yield ToyBlock(self.width, is_last=is_last)
            else:
                forward, backward = (slowness * seconds / self.micro_batch for seconds in self.sleep_seconds)
                yield SleepingBlock(forward, backward, is_last=is_last)

    def batch(self, samples: int) -> tuple[Tensor]:
        return (torch.randn(samples, self.length, self.width, generator=torch.Generator().manual_seed(1)),)


class ToyBlock(nn.Module):
    """Attention and a layer of neurons; the last one returns the loss too."""

    def __init__(self, width: int, *, is_last: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.is_last = is_last

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.layer(hidden)
        return hidden.square().mean() if self.is_last else hidden


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scale: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        time.sleep(forward_seconds * len(hidden))
        ctx.seconds = backward_seconds * len(hidden)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(ctx.seconds)
        return gradients[0], torch.zeros(1), None, None


class SleepingBlock(nn.Module):
    """Passes on what it gets after a while; seconds per sample."""

    def __init__(self, forward_seconds: float, backward_seconds: float, *, is_last: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        self.seconds = forward_seconds, backward_seconds
        self.is_last = is_last

    def forward(self, hidden: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(hidden, self.scale, *self.seconds)  # type: ignore[no-untyped-call]
        return slept.square().mean() if self.is_last else slept


SIZES = {
    "handover": Toy(width=64, length=16, micro_batch=2, num_micro_batches=32),
    "compute": Toy(width=256, length=64, micro_batch=8, num_micro_batches=32),
}
SLEEPING = {
    "planned": Toy(
        width=16, length=4, micro_batch=4, num_micro_batches=32, layers_per_stage=2, sleep_seconds=(0.025, 0.05)
    ),
    "unequal": Toy(width=16, length=4, micro_batch=4, num_micro_batches=1024, sleep_seconds=(0.03, 0.06)),
    "morphing": Toy(width=256, length=4, micro_batch=4, num_micro_batches=32, sleep_seconds=(0.01, 0.02)),
    # A hand-over of 262 kB takes 21 ms on 100 Mbit/s, there and back 42 ms: less than a third of the layer's 150 ms.
    "far": Toy(width=256, length=64, micro_batch=4, num_micro_batches=64, sleep_seconds=(0.05, 0.1)),
}
TOYS = {**SIZES, **SLEEPING}
