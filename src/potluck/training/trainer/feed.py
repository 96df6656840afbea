"""Batches without end: shard after shard, a little ahead of the training thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

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


class _Read(NamedTuple):
    """What became of asking for a batch."""

    size: int
    outcome: Batch | BaseException


class Feed:
    """Reads shards in threads of its own, so that training never waits for a disk.

    A reader gathers what is asked for, and goes on from there in its shard: batches may change their size, and neither
    samples nor shards are lost by it. How far ahead batches are asked for is what keeps training from waiting.
    """

    def __init__(
        self,
        recipe: Recipe[Any],
        readers: Sequence[Shards],
        batch_size: int,
        seed: int,
        ahead_batches: int = AHEAD_BATCHES,
    ) -> None:
        """Each of the readers is a thread, with shards of its own."""
        self._recipe = recipe
        self._batch_size = batch_size
        self._ahead_batches = 0
        self._num_asked = 0  # and not taken yet
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # sizes; None: end
        self._ready: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(shards, seed + number), name=f"potluck-feed-{number}", daemon=True)
            for number, shards in enumerate(readers)
        ]
        for thread in self._threads:
            thread.start()
        self.resize(batch_size, ahead_batches)

    def next(self) -> Batch:
        """The next batch; what went wrong in reading is raised here."""
        while True:
            self._ask_for(max(1, self._ahead_batches))
            read = self._ready.get()
            self._num_asked -= 1
            if isinstance(read.outcome, BaseException):
                raise read.outcome
            if read.size == self._batch_size:  # else it was asked for before that changed
                self._ask_for(self._ahead_batches)
                return read.outcome

    def resize(self, batch_size: int, ahead_batches: int = AHEAD_BATCHES) -> None:
        """Batches are of this size from now on, and so many are read ahead; 0, as long as sizes change, loses none."""
        if batch_size != self._batch_size:
            self._take_back()
        self._batch_size = batch_size
        self._ahead_batches = max(ahead_batches, len(self._threads)) if ahead_batches else 0
        self._ask_for(self._ahead_batches)

    def close(self) -> None:
        """End the threads. Calling it twice does no harm."""
        self._closed.set()
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join()

    def _ask_for(self, num_batches: int) -> None:
        while self._num_asked < num_batches:
            self._num_asked += 1
            self._asked.put(self._batch_size)

    def _take_back(self) -> None:
        """What nobody has begun to read need not be."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._asked.get_nowait()
                self._num_asked -= 1

    def _run(self, shards: Shards, seed: int) -> None:
        samples = self._samples(shards, torch.Generator().manual_seed(seed))
        while (size := self._asked.get()) is not None and not self._closed.is_set():
            try:
                found = list(islice(samples, size))
                if len(found) < size:  # closed meanwhile
                    return
                self._ready.put(_Read(size, self._recipe.collate(found)))
            except Exception as error:  # noqa: BLE001 - handed to the training thread, which raises it
                self._ready.put(_Read(size, error))
                return

    def _samples(self, shards: Shards, generator: torch.Generator) -> Iterator[Sample]:
        empty = 0
        while not self._closed.is_set():
            before = empty
            empty += 1
            for sample in self._recipe.samples(shards.take(), generator):
                empty = 0
                yield sample
                if self._closed.is_set():
                    return
            if before >= MAX_EMPTY_SHARDS:
                raise ConfigurationError(f"the recipe has no data: {before} shards in a row were empty")
