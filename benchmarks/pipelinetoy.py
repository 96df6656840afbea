"""The toy model of bench_pipeline.py: residual layers of one width, a block each, and a loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

    def blocks(self) -> Iterator[nn.Module]:
        for number in range(self.num_stages * self.layers_per_stage):
            yield ToyBlock(self.width, is_last=number == self.num_stages * self.layers_per_stage - 1)

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


SIZES = {
    "handover": Toy(width=64, length=16, micro_batch=2, num_micro_batches=32),
    "compute": Toy(width=256, length=64, micro_batch=8, num_micro_batches=32),
}
