"""Batches without end: shard after shard, a little ahead of the training thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from potluck.errors import StoppedError
from potluck.optim.staging import pinned
from potluck.recipes.recipe import Batch, Recipe
from potluck.training.trainer.reading import Gathered, Place, Reached, Reader, open_reader

AHEAD_BATCHES = 4


class Shards(Protocol):
    """Which shard is next for this peer."""

    def take(self) -> Place:
        """A shard to train on; the one before is done."""
        ...

    def reach(self, reached: Reached) -> None:
        """Training is so far in the shard."""
        ...


class RandomShards:
    """Any shard, at random: peers that choose on their own may choose the same."""

    def __init__(self, num_shards: int, seed: int) -> None:
        self._num_shards = num_shards
        self._generator = torch.Generator().manual_seed(seed)

    def take(self) -> Place:
        """A shard to train on."""
        return Place(int(torch.randint(self._num_shards, (1,), generator=self._generator)))

    def reach(self, reached: Reached) -> None:
        """Nobody keeps a book."""


class _Read(NamedTuple):
    """What became of asking for a batch."""

    size: int
    outcome: Gathered | BaseException
    shards: Shards


class Feed:
    """Has shards read ahead of training, by processes where reading costs something (reading.py), each with a thread.

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
        *,
        pins: bool = False,
    ) -> None:
        """Each of the readers has shards of its own.

        With `pins`, batches are in pinned memory, so that a GPU fetches them while it computes.
        """
        self._pins = pins
        self._batch_size = batch_size
        self._ahead_batches = 0
        self._num_asked = 0  # and not taken yet
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # sizes; None: end
        self._ready: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self._last: _Read | None = None  # that was handed out
        self._closed = threading.Event()
        self._readers = [open_reader(recipe, shards.take, seed + number) for number, shards in enumerate(readers)]
        self._threads = [
            threading.Thread(target=self._run, args=(reader, shards), name=f"potluck-feed-{number}", daemon=True)
            for number, (reader, shards) in enumerate(zip(self._readers, readers, strict=True))
        ]
        for thread in self._threads:
            thread.start()
        self.resize(batch_size, ahead_batches)

    def next(self) -> Batch:
        """The next batch, the one before being done; what went wrong in reading is raised here."""
        self._tell_reached()
        while True:
            self._ask_for(max(1, self._ahead_batches))
            read = self._ready.get()
            self._num_asked -= 1
            if isinstance(read.outcome, BaseException):
                raise read.outcome
            if read.size == self._batch_size:  # else it was asked for before that changed
                self._ask_for(self._ahead_batches)
                self._last = read
                return read.outcome.batch

    def _tell_reached(self) -> None:
        if self._last is not None and isinstance(self._last.outcome, Gathered):
            self._last.shards.reach(self._last.outcome.reached)
            self._last = None

    def resize(self, batch_size: int, ahead_batches: int = AHEAD_BATCHES) -> None:
        """Batches are of this size from now on, and so many are read ahead; 0, as long as sizes change, loses none."""
        if batch_size != self._batch_size:
            self._take_back()
        self._batch_size = batch_size
        self._ahead_batches = max(ahead_batches, len(self._threads)) if ahead_batches else 0
        self._ask_for(self._ahead_batches)

    def close(self) -> None:
        """End the threads and processes. Idempotent."""
        self._tell_reached()
        self._closed.set()
        for reader in self._readers:
            reader.close()
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join()
        for reader in self._readers:
            reader.release()

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

    def _run(self, reader: Reader, shards: Shards) -> None:
        while (size := self._asked.get()) is not None and not self._closed.is_set():
            try:
                found = reader.gather(size)
                if self._pins:
                    found = found._replace(batch=tuple(pinned(part) for part in found.batch))
                self._ready.put(_Read(size, found, shards))
            except StoppedError:  # closed meanwhile
                return
            except Exception as error:  # noqa: BLE001 - handed to the training thread, which raises it
                self._ready.put(_Read(size, error, shards))
                return
