"""How large a batch this machine can take: found by trial, on any device.

Where gradients are added up, a trial is a step like any other: what it computes counts (trainer.py), so the search
costs nothing, and the first sample is handed in as soon as there is a state. Where each step changes the model, as in
DiLoCo, it is not: a step of one sample would count as much as one of many, and be taken with the same learning rate.
There sizes are tried before training, on samples that nobody gets anything of.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from potluck.errors import ConfigurationError
from potluck.recipes.recipe import Batch, Recipe, Sample
from potluck.training.trainer.machine import is_out_of_memory, wait_for
from potluck.training.trainer.precision import MixedPrecision

LARGEST = 1024
TRIAL_SECONDS = 2.0  # for the whole search
BARGAIN = 1.5  # as long as each doubling makes samples so much cheaper, stopping would cost more than it saves,
BARGAIN_SECONDS = 10.0  # up to here: on a busy machine few sizes are tried in two seconds, and none of them is good
WORTHWHILE = 1.1  # a larger batch must be so much faster per sample
TRIES = 3  # of each size, while they are quick: the quickest counts, since other programs only ever slow us down
TRIES_SECONDS = 0.25  # of one size; a step that takes longer is not thrown off by a moment's disturbance
DISAPPOINTMENTS = 2  # sizes in a row that were not worthwhile, after which none will be


class BatchSearch:
    """The smallest batch, of 1, 2, 4 …, beyond which samples do not get cheaper; less where memory ends (pure)."""

    def __init__(self, largest: int = LARGEST) -> None:
        self.size = 1
        """Of the next batch: the one that is tried, and in the end the one that was found."""
        self.is_over = False
        self.found = 0
        """The best so far; 0: none."""
        self._largest = largest
        self._seconds_per_sample = math.inf  # of the best
        self._disappointments = 0
        self._spent_seconds = 0.0  # by all trials
        self._tries: list[float] = []  # seconds, of this size

    def observe(self, seconds: float) -> None:
        """A step of this size took so long."""
        self._spent_seconds += seconds
        self._tries.append(seconds)
        if len(self._tries) < TRIES and sum(self._tries) <= TRIES_SECONDS:
            return
        seconds_per_sample = min(self._tries) / self.size
        gain = self._seconds_per_sample / seconds_per_sample if seconds_per_sample else math.inf
        if gain >= WORTHWHILE:
            self.found, self._seconds_per_sample, self._disappointments = self.size, seconds_per_sample, 0
        else:
            self._disappointments += 1
        self._tries = []
        self.size *= 2
        patience = BARGAIN_SECONDS if gain >= BARGAIN else TRIAL_SECONDS
        if self.size > self._largest or self._disappointments == DISAPPOINTMENTS or self._spent_seconds >= patience:
            self._end()

    def refuse(self) -> None:
        """A step of this size does not fit: the best of the smaller ones stays."""
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self.size = max(1, self.found)


def find_batch_size(
    recipe: Recipe[Any],
    model: nn.Module,
    device: torch.device,
    largest: int = LARGEST,
    fits: Callable[[], bool] = lambda: True,
    precision: MixedPrecision | None = None,
) -> int:
    """What a search comes to before anything is trained.

    `fits` tells after each trial whether this process still uses as little memory as it should.
    """
    samples = some_samples(recipe, largest)
    search = BatchSearch(len(samples))
    while not search.is_over:
        seconds = step_seconds(recipe, model, device, samples[: search.size], precision)
        if seconds is None or not fits():
            search.refuse()
        else:
            search.observe(seconds)
    if not search.found:
        raise ConfigurationError("not even one sample fits into memory: take a smaller model, or another --device")
    return search.found


def some_samples(recipe: Recipe[Any], wanted: int) -> list[Sample]:
    """So many samples, or all there are; ConfigurationError where there are none."""
    generator = torch.Generator().manual_seed(0)
    found: list[Sample] = []
    for shard in range(recipe.num_shards):
        for sample in recipe.samples(shard, generator):
            found.append(sample)
            if len(found) == wanted:
                return found
    if not found:
        raise ConfigurationError("the recipe has no data: all of its shards are empty")
    return found


def step_seconds(
    recipe: Recipe[Any],
    model: nn.Module,
    device: torch.device,
    samples: list[Sample],
    precision: MixedPrecision | None = None,
) -> float | None:
    """Of one step; None where memory ends."""
    precision = precision or MixedPrecision("float32", device)
    try:
        batch = to_device(recipe.collate(samples), device)
        started = time.perf_counter()
        with precision.lowered():
            loss = recipe.loss(model, batch)
        precision.backward(loss)
        wait_for(device)
        return time.perf_counter() - started
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        for parameter in model.parameters():
            parameter.grad = None


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device."""
    return tuple(part.to(device, non_blocking=True) for part in batch)
