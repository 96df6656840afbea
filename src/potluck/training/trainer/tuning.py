"""What suits this machine: batch size, threads, and processes that read; by trial, on a model that is thrown away."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch

from potluck.optim.cores import available_cores
from potluck.recipes.recipe import Recipe
from potluck.training.manifest.curriculum import data_at
from potluck.training.manifest.manifest import Manifest, SyncSettings
from potluck.training.trainer.batchsize import find_batch_size, some_samples, step_seconds
from potluck.training.trainer.inneroptimizer import STATE_TENSORS
from potluck.training.trainer.machine import MemoryLimit, find_device
from potluck.training.trainer.models import untrained
from potluck.training.trainer.precision import MixedPrecision, find_precision

STEPS = 3  # of each number of threads: the quickest counts, since other programs only ever slow us down
READ_SAMPLES = 64
MOST_READERS = 8
WORTHWHILE = 1.05  # more threads must be so much faster


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What was found."""

    batch_size: int
    threads: int
    n_workers: int
    samples_per_second: float
    read_per_second: float  # samples, by one process

    def as_dict(self) -> dict[str, Any]:
        """For a table."""
        return {name: round(value, 1) for name, value in asdict(self).items()}

    @property
    def options(self) -> str:
        """As `potluck join` takes them."""
        return f"--batch-size {self.batch_size} --threads {self.threads} --n-workers {self.n_workers}"


def tune(
    recipe: Recipe[Any],
    manifest: Manifest,
    *,
    device: str = "",
    max_memory_bytes: int | None = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> Tuned:
    """Try sizes, then threads, then how fast samples are read."""
    before = torch.get_num_threads()
    where = find_device(device)
    precision = MixedPrecision(find_precision("", where), where)
    recipe.data = data_at(recipe, manifest, manifest.newest.from_epoch)  # what the run trains on in the end
    model = untrained(recipe, manifest.seed, where)
    memory = MemoryLimit(max_memory_bytes, where)
    memory.begin_trials()
    tell("Trying batch sizes.")
    with memory.reserved(model, STATE_TENSORS[manifest.newest.optimizer.name]):
        size = find_batch_size(recipe, model, where, fits=memory.fits, precision=precision)
    if isinstance(manifest.newest.training, SyncSettings):
        size = min(size, manifest.newest.training.target_batch_size)
    tell("Trying threads.")
    samples = some_samples(recipe, size)

    def quickest(threads: int) -> float:
        torch.set_num_threads(threads)
        times = [step_seconds(recipe, model, where, samples, precision) for _ in range(STEPS)]
        return min(seconds for seconds in times if seconds is not None)

    cores = available_cores()
    try:
        best, seconds = 1, quickest(1)
        for threads in sorted({2**power for power in range(1, cores.bit_length())} | {cores} - {1}):
            if (tried := quickest(threads)) * WORTHWHILE < seconds:
                best, seconds = threads, tried
    finally:
        torch.set_num_threads(before)
    tell("Reading samples.")
    speed, reading = len(samples) / seconds, _read_per_second(recipe)
    readers = 1 if recipe.is_light else min(MOST_READERS, max(1, -(-int(speed) // max(1, int(reading)))))
    return Tuned(batch_size=size, threads=best, n_workers=readers, samples_per_second=speed, read_per_second=reading)


def _read_per_second(recipe: Recipe[Any]) -> float:
    generator = torch.Generator().manual_seed(0)
    stream = (sample for shard in range(recipe.num_shards) for sample in recipe.samples(shard, generator))
    next(stream, None)  # opens what has to be opened
    started = time.perf_counter()
    read = sum(1 for _ in islice(stream, READ_SAMPLES))
    return read / max(time.perf_counter() - started, 1e-9)
