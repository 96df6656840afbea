"""The recipe of bench_unequal.py: the small language model of toylm.py, on a device of one's own speed.

A step takes STEP_SECONDS of the environment, whatever the machine does beside it: the gradients are computed, and the
peer sleeps for what should be left. UNEQUAL_TEXT names the file with the text, and UNEQUAL_CODE the folder of toylm.py.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from potluck.recipes import Recipe, RecipeConfig

sys.path.insert(0, os.environ["UNEQUAL_CODE"])
from toylm import Corpus, loss_of, make_model

SAMPLES_OF_A_SHARD = 200
BACKWARD = 3.0  # forward and backward passes take so many times as long as the forward pass


class Config(RecipeConfig, frozen=True, kw_only=True):
    """What run.toml may set."""

    width: int = 128
    layers: int = 2
    length: int = 32


class ToyText(Recipe[Config]):
    """Bytes of the standard library's source."""

    Config = Config
    num_shards = 256

    def model(self) -> nn.Module:
        return make_model(self.config.width, self.config.layers, self.config.length)

    def samples(self, shard: int, generator: torch.Generator) -> Iterable[tuple[Tensor]]:
        texts = Corpus(Path(os.environ["UNEQUAL_TEXT"]).read_bytes(), self.config.length)
        for _ in range(SAMPLES_OF_A_SHARD):
            number = int(torch.randint(1 << 31, (1,), generator=generator))
            yield (texts.batch(number, 1)[0],)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        began = time.perf_counter()
        loss = loss_of(model, batch[0])
        computed = BACKWARD * (time.perf_counter() - began)
        time.sleep(max(0.0, float(os.environ.get("STEP_SECONDS", "0")) - computed))
        return loss
