"""Batches without end: shard after shard, a little ahead of the training thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from potluck.errors import ConfigurationError
from potluck.recipes.recipe import Batch, Recipe, Sample

AHEAD_BATCHES = 4
MAX_EMPTY_SHARDS = 1000  # in a row; then the recipe has no data


class Shards(Protocol):
    """Which shard is next for this peer."""

    def take(self) -> int:
        """A shard to train on; the one before is done."""
        ...


class RandomShards:
    """Any shard, at random: peers that choose on their own may choose the same."""

    def __init__(self, num_shards: int, seed: int) -> None:
        self._num_shards = num_shards
        self._generator = torch.Generator().manual_seed(seed)

    def take(self) -> int:
        """A shard to train on."""
        return int(torch.randint(self._num_shards, (1,), generator=self._generator))


class Feed:
    """Reads shards in threads of its own, so that training never waits for a disk."""

    def __init__(self, recipe: Recipe[Any], readers: Sequence[Shards], batch_size: int, seed: int) -> None:
        """Each of the readers is a thread, with shards of its own."""
        self._recipe = recipe
        self._batch_size = batch_size
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(max(AHEAD_BATCHES, len(readers)))
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(shards, seed + number), name=f"potluck-feed-{number}", daemon=True)
            for number, shards in enumerate(readers)
        ]
        for thread in self._threads:
            thread.start()

    def next(self) -> Batch:
        """The next batch; what went wrong in reading is raised here."""
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """End the threads. Calling it twice does no harm."""
        self._closed.set()
        while not self._ready.empty():
            self._ready.get_nowait()
        for thread in self._threads:
            thread.join()

    def _run(self, shards: Shards, seed: int) -> None:
        try:
            for batch in self._batches(shards, torch.Generator().manual_seed(seed)):
                if not self._offer(batch):
                    return
        except Exception as error:  # noqa: BLE001 - handed to the training thread, which raises it
            self._offer(error)

    def _offer(self, item: Batch | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def _batches(self, shards: Shards, generator: torch.Generator) -> Iterator[Batch]:
        samples: list[Sample] = []
        empty = 0
        while not self._closed.is_set():
            before = empty
            empty += 1
            for sample in self._recipe.samples(shards.take(), generator):
                empty = 0
                samples.append(sample)
                if len(samples) == self._batch_size:
                    yield self._recipe.collate(samples)
                    samples = []
                if self._closed.is_set():
                    return
            if before >= MAX_EMPTY_SHARDS:
                raise ConfigurationError(f"the recipe has no data: {before} shards in a row were empty")
