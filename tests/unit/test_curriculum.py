"""Settings that change while a run trains: every peer follows at the same epoch, with its data too."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainlab import FEATURES, TrainLab, loss_of, make_model, together, train_lab

from potluck.recipes.recipe import Batch, Recipe, RecipeConfig, Sample, configured
from potluck.recipes.reference import RecipeRef
from potluck.training.manifest.curriculum import data_at, warn_of_data
from potluck.training.manifest.manifest import (
    DiLoCoSettings,
    Manifest,
    OptimizerSpec,
    ScheduleSpec,
    Settings,
    SyncSettings,
)
from potluck.training.trainer.config import TrainConfig
from potluck.training.trainer.trainer import Trainer

LAST_EPOCH = 7
BATCH_SIZE = 4


class Data(RecipeConfig, frozen=True, kw_only=True):
    level: int = 1


class Levels(Recipe[RecipeConfig]):
    """Each sample says by which data it was made."""

    Data = Data
    num_shards = 8

    def model(self) -> nn.Module:
        return make_model()

    def check_data(self, data: Data) -> None:
        if data.level < 0:
            raise ValueError(f"level={data.level} is below the ground")

    def samples(self, shard: int, generator: torch.Generator) -> Iterator[Sample]:
        for _ in range(10):
            yield torch.randn(FEATURES, generator=generator), torch.full((1,), float(self.data.level))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return loss_of(model, (batch[0], batch[1]))


class Noting(Levels):
    """Notes with what each batch of each epoch was computed."""

    trainer: Trainer

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        epoch = self.trainer.optimizer.epoch
        self.noted.setdefault(epoch, set()).update(batch[1].flatten().tolist())
        return super().loss(model, batch)

    def __init__(self, config: RecipeConfig) -> None:
        super().__init__(config)
        self.noted: dict[int, set[float]] = {}
        self.steps: dict[int, set[tuple[float, ...]]] = {}


def manifest_of(*settings: Settings) -> Manifest:
    return Manifest(run="test", recipe=RecipeRef(name="levels"), settings=settings)


def stages(training: SyncSettings | DiLoCoSettings, target: int) -> tuple[Settings, Settings]:
    end: dict[str, Any] = {"end_epoch": LAST_EPOCH}
    later = (
        SyncSettings(target_batch_size=target, matchmaking_seconds=0.0)
        if isinstance(training, SyncSettings)
        else training
    )
    first = Settings(optimizer=OptimizerSpec(learning_rate=0.01), training=training, data={"level": 2}, **end)
    return first, Settings(
        from_epoch=3,
        optimizer=OptimizerSpec(learning_rate=0.002, weight_decay=0.5, beta1=0.7),
        schedule=ScheduleSpec(kind="linear", total_epochs=10, final_share=0.0),
        training=later,
        data={"level": 5},
        **end,
    )


def trainer_of(lab: TrainLab, number: int, manifest: Manifest) -> Trainer:
    recipe = Noting(RecipeConfig())
    config = TrainConfig(batch_size=BATCH_SIZE, num_threads=1, device="cpu")
    trainer = recipe.trainer = Trainer(lab.join(f"trainer {number}"), lambda: manifest, recipe, config)
    step, optimizer = trainer.optimizer.step, trainer.optimizer

    def noting(**options: Any) -> Any:
        group = optimizer.param_groups[0]
        target = getattr(optimizer, "target_batch_size", None)
        recipe.steps.setdefault(optimizer.epoch, set()).add(
            (group["lr"], group["weight_decay"], *group["betas"], target)
        )
        return step(**options)

    optimizer.step = noting  # type: ignore[method-assign]
    return trainer


@pytest.mark.parametrize(
    "training",
    [SyncSettings(target_batch_size=16, matchmaking_seconds=0.0), DiLoCoSettings(inner_steps=3, min_peers=2)],
    ids=["sync", "diloco"],
)
def test_every_peer_follows_at_the_same_epoch(training: SyncSettings | DiLoCoSettings) -> None:
    manifest = manifest_of(*stages(training, target=24))
    with train_lab() as lab:
        trainers = [trainer_of(lab, number, manifest) for number in range(2)]
        together(*(lambda t=t: t.train(threading.Event()) for t in trainers))
        recipes = [trainer._recipe for trainer in trainers]
        for trainer, recipe in zip(trainers, recipes, strict=True):
            assert isinstance(recipe, Noting)
            assert trainer.optimizer.epoch == LAST_EPOCH
            assert recipe.noted == {epoch: {2.0 if epoch < 3 else 5.0} for epoch in recipe.noted}
            targets = (16, 24) if isinstance(training, SyncSettings) else (None, None)
            for epoch, steps in recipe.steps.items():
                early = (0.01, 0.01, 0.9, 0.99, targets[0])
                late = (pytest.approx(0.002 * (10 - epoch) / 10), 0.5, 0.7, 0.99, targets[1])
                assert list(steps) == [early if epoch < 3 else late]
        assert {epoch for recipe in recipes for epoch in recipe.steps} == set(range(LAST_EPOCH))


def test_data_that_the_recipe_cannot_use_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    recipe = configured(Levels, {})
    found = manifest_of(
        Settings(data={"level": 2}),
        Settings(from_epoch=3, data={"level": -1}),
        Settings(from_epoch=5, data={"height": 4}),
        Settings(from_epoch=9, data={"level": 9}),
    )
    assert [data_at(recipe, found, epoch) for epoch in (0, 3, 5, 8, 9)] == [Data(level=2)] * 4 + [Data(level=9)]
    assert data_at(recipe, manifest_of(Settings(data={"level": -1})), 3) == Data()
    with caplog.at_level(logging.WARNING):
        warn_of_data(recipe, found)
    assert [record.args[0] for record in caplog.records if record.args] == [3, 5]  # type: ignore[index]
