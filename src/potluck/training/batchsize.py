"""How large a batch this machine can take: found by trial, on any device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from potluck.errors import ConfigurationError
from potluck.recipes.recipe import Batch, Recipe, Sample

LARGEST = 1024
TRIAL_SECONDS = 2.0  # for the whole search
BARGAIN = 1.5  # as long as each doubling makes samples so much cheaper, stopping would cost more than it saves,
BARGAIN_SECONDS = 10.0  # up to here: on a busy machine few sizes are tried in two seconds, and none of them is good
WORTHWHILE = 1.1  # a larger batch must be so much faster per sample
TRIES = 3  # of each size, while they are quick: the quickest counts, since other programs only ever slow us down
TRIES_SECONDS = 0.25  # of one size; a step that takes longer is not thrown off by a moment's disturbance
DISAPPOINTMENTS = 2  # sizes in a row that were not worthwhile, after which none will be


def find_batch_size(
    recipe: Recipe[Any],
    model: nn.Module,
    device: torch.device,
    largest: int = LARGEST,
    fits: Callable[[], bool] = lambda: True,
) -> int:
    """The smallest batch, of 1, 2, 4 …, beyond which samples do not get cheaper; less where memory ends before that.

    `fits` tells after each trial whether this process still uses as little memory as it should.
    """
    samples = _some_samples(recipe, largest)

    def seconds_of(size: int) -> float | None:
        seconds = _seconds(recipe, model, device, samples[:size])
        return seconds if fits() else None

    return _search(seconds_of, len(samples))


def _search(seconds_of: Callable[[int], float | None], largest: int, now: Callable[[], float] = time.monotonic) -> int:
    """`seconds_of` tries a size; None: it does not fit."""
    started = now()
    best, best_seconds_per_sample, disappointments = 0, math.inf, 0
    size, gain = 1, math.inf
    while size <= largest and disappointments < DISAPPOINTMENTS:
        if now() - started >= (BARGAIN_SECONDS if gain >= BARGAIN else TRIAL_SECONDS):
            break
        seconds = seconds_of(size)
        if seconds is None:
            break
        gain = best_seconds_per_sample / (seconds / size)
        if gain >= WORTHWHILE:
            best, best_seconds_per_sample, disappointments = size, seconds / size, 0
        else:
            disappointments += 1
        size *= 2
    if not best:
        raise ConfigurationError("not even one sample fits into memory: take a smaller model, or another --device")
    return best


def _some_samples(recipe: Recipe[Any], wanted: int) -> list[Sample]:
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


def _seconds(recipe: Recipe[Any], model: nn.Module, device: torch.device, samples: list[Sample]) -> float | None:
    """Of the quickest step; None where memory ends."""
    quickest = math.inf
    try:
        batch = to_device(recipe.collate(samples), device)
        began = time.perf_counter()
        for _ in range(TRIES):
            started = time.perf_counter()
            if started - began > TRIES_SECONDS:
                break
            recipe.loss(model, batch).backward()  # type: ignore[no-untyped-call]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            quickest = min(quickest, time.perf_counter() - started)
    except torch.OutOfMemoryError:
        return None
    finally:
        for parameter in model.parameters():
            parameter.grad = None
    return quickest


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device."""
    return tuple(part.to(device, non_blocking=True) for part in batch)
