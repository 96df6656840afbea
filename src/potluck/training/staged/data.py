"""A run's data in one order: passes over shards without end, of which each step takes the next samples.

The order depends on the seed alone. A place in it is (pass, samples of that pass that are done), and each step's place
stands in the run's record. So feeders come and go, and shapes change, and no sample is lost or trained on twice. Every
feeder reads all samples of a step, and sends its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from potluck.errors import ConfigurationError
from potluck.pipeline.blocks import State, seed_of
from potluck.pipeline.messages import Place
from potluck.recipes.recipe import Recipe, Sample, data_of
from potluck.training.manifest.manifest import Manifest
from potluck.training.trainer.reading import MAX_EMPTY_SHARDS


class RecipeSource:
    """The samples of one step, read as they are needed. Used by several threads."""

    def __init__(self, recipe: Recipe[Any], newest: Callable[[], Manifest]) -> None:
        self._recipe = recipe
        self._newest = newest
        self._seed = newest().seed
        self._lock = threading.Lock()
        self._start: tuple[int, Place] | None = None  # the step, and where it begins
        self._samples: list[Sample] = []
        self._place = Place()  # behind the samples that are read
        self._stream: Iterator[Sample] | None = None
        self._data: Any = None

    def batch(self, step: int, place: Place, first: int, samples: int) -> State:
        """As in feeding.Source."""
        with self._lock:
            self._read(step, place, first + samples)
            return self._recipe.collate(self._samples[first : first + samples])

    def after(self, step: int, place: Place, samples: int) -> Place:
        """As in feeding.Source."""
        with self._lock:
            self._read(step, place, samples)
            if len(self._samples) != samples:
                raise ConfigurationError(f"step {step} has {samples} samples, and {len(self._samples)} were read")
            return self._place

    def _read(self, step: int, place: Place, count: int) -> None:
        if self._start != (step, place):
            data = self._newest().at(step).data
            if place != self._place or data != self._data:  # another feeder was further, or the data are others now
                self._recipe.data = data_of(self._recipe, data)
                self._data, self._stream, self._place = data, None, place
            self._start, self._samples = (step, place), []
        num_empty = 0
        while len(self._samples) < count:
            if self._stream is None:
                self._stream = self._open(self._place)
            sample = next(self._stream, None)
            if sample is not None:
                self._samples.append(sample)
                self._place = Place(number=self._place.number, skip=self._place.skip + 1)
                num_empty = 0
                continue
            self._place, self._stream = Place(number=self._place.number + 1, skip=0), None
            num_empty += 1
            if num_empty > MAX_EMPTY_SHARDS:
                raise ConfigurationError("the recipe has no data: all of its shards are empty")

    def _open(self, place: Place) -> Iterator[Sample]:
        num_shards = self._recipe.num_shards
        turn, number = divmod(place.number, num_shards)
        order = torch.randperm(num_shards, generator=torch.Generator().manual_seed(seed_of(self._seed, turn)))
        generator = torch.Generator().manual_seed(seed_of(self._seed, turn, number))
        stream = iter(self._recipe.samples(int(order[number]), generator))
        for _ in range(place.skip):
            next(stream, None)
        return stream
