"""What a GPU would copy and wait for, counted on the pretend accelerator: between rounds, and with rounds of two peers.

python benchmarks/bench_transfers.py        # JSON: copies and synchronisations per step, and per peer and round
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from potluck.recipes.recipe import Batch, Recipe, RecipeConfig
from potluck.recipes.reference import RecipeRef
from potluck.testing import accelerator
from potluck.training.manifest import manifest as manifests
from potluck.training.manifest.manifest import Manifest, Settings, SyncSettings
from potluck.training.trainer.config import TrainConfig
from potluck.training.trainer.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "unit"))
from trainlab import together, train_lab

NUM_STEPS = 200
NUM_EPOCHS = 10
FIGURES = ("to_device", "to_host", "synchronisations")


class Wide(Recipe[RecipeConfig]):
    """6 tensors, 0.6 M parameters."""

    num_shards = 4

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 1))

    def samples(self, shard: int, generator: torch.Generator) -> Iterable[tuple[Tensor, ...]]:
        for _ in range(256):
            inputs = torch.randn(64, generator=generator)
            yield inputs, inputs.sum().view(1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])


def trainer(lab: Any, name: str, training: Any, max_steps: int) -> Trainer:
    config = TrainConfig(num_threads=1, batch_size=4, max_steps=max_steps, device=accelerator.NAME)
    manifest = Manifest(run="test", recipe=RecipeRef(name="wide"), settings=(Settings(training=training),))
    return Trainer(lab.join(name), lambda: manifest, Wide(RecipeConfig()), config)


def counted(device: accelerator.Accelerator, by: int) -> dict[str, float]:
    return {name: round(getattr(device.counts, name) / by, 2) for name in FIGURES}


def per_step(device: accelerator.Accelerator, training: Any) -> dict[str, float]:
    with train_lab() as lab:
        alone = trainer(lab, "Ada", training, NUM_STEPS)
        device.counts.clear()
        alone.train(threading.Event())
        return counted(device, NUM_STEPS)


def per_round(device: accelerator.Accelerator, training: Any) -> dict[str, float]:
    """Of one peer; the steps between them are taken off by the caller."""
    with train_lab() as lab:
        both = [trainer(lab, name, training, 1 << 30) for name in ("Ada", "Bob")]
        device.counts.clear()

        def train(one: Trainer) -> None:
            stop = threading.Event()
            one._on_progress = lambda progress: stop.set() if progress.epoch >= NUM_EPOCHS else None
            one.train(stop)

        together(*(lambda one=one: train(one) for one in both), seconds=600)
        steps = sum(one.steps for one in both)
        return {**counted(device, 2 * NUM_EPOCHS), "steps": steps / (2 * NUM_EPOCHS)}


def main() -> None:
    device = accelerator.install()
    never = {"sync": SyncSettings(target_batch_size=1 << 30), "diloco": manifests.DiLoCoSettings(inner_steps=1 << 20)}
    often = {
        "sync": SyncSettings(target_batch_size=64, matchmaking_seconds=5.0),
        "diloco": manifests.DiLoCoSettings(inner_steps=8, grace_seconds=5.0),
    }
    steps = {name: per_step(device, training) for name, training in never.items()}
    rounds = {name: per_round(device, training) for name, training in often.items()}
    print(json.dumps({"per_step": steps, "per_round_with_its_steps": rounds}, indent=2))


if __name__ == "__main__":
    main()
