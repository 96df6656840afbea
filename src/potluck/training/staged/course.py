"""What a manifest says about the steps of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from potluck.pipeline.layout import Layout, check_num_stages
from potluck.pipeline.unitstate import Optimizing
from potluck.training.manifest.manifest import Manifest, SyncSettings
from potluck.training.manifest.method import PipelineSpec
from potluck.training.trainer.inneroptimizer import optimizer_of
from potluck.training.trainer.optimizers import following

MICRO_BATCHES_PER_STAGE = 4
LEAST_MICRO_BATCHES = 8


class ManifestCourse:
    """The steps as the newest manifest has them."""

    def __init__(self, newest: Callable[[], Manifest], spec: PipelineSpec) -> None:
        self._newest = newest
        self._spec = spec

    def batch_size(self, step: int) -> int:
        """Samples of a step."""
        training = self._newest().at(step).training
        assert isinstance(training, SyncSettings), "checked when the run was opened"
        return training.target_batch_size

    def sizes(self, step: int, num_stages: int) -> tuple[int, ...]:
        """As in Course: micro-batches of one size, the last of what is left."""
        total = self.batch_size(step)
        wanted = self._spec.micro_batch
        count = max(LEAST_MICRO_BATCHES, MICRO_BATCHES_PER_STAGE * num_stages)
        size = max(1, math.ceil(total / count)) if wanted == "auto" else wanted
        whole, rest = divmod(total, size)
        return (size,) * whole + ((rest,) if rest else ())

    def max_norm(self, step: int) -> float:
        """As in Course."""
        return self._newest().at(step).optimizer.max_grad_norm

    def stands_still(self, step: int) -> str:
        """As in Course."""
        settings = self._newest().at(step)
        if settings.end_epoch and step >= settings.end_epoch:
            return f"the run is over: it has taken its {settings.end_epoch} steps"
        return "the organiser has paused the run" if settings.paused else ""


def optimizing(newest: Callable[[], Manifest]) -> Optimizing:
    """The manifest's optimizer for one unit, with the numbers of each step."""

    def make(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return optimizer_of(newest().settings[0].optimizer, named)

    return Optimizing(make, lambda optimizer, step: following(optimizer, newest)(step))


def fixed_layout(costs: list[float], num_stages: int) -> Layout:
    """The layout where run.toml says how many stages there are."""
    check_num_stages(len(costs), num_stages)
    return Layout.balanced(costs, num_stages)
