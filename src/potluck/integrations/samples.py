"""How many samples a step stands for: those of all batches since the one before, said once or read off each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from potluck.errors import ConfigurationError


class SampleCounter:
    """Counts samples from one step to the next."""

    def __init__(self, batch_size: int | None, size_of: Callable[[Any], int]) -> None:
        """`batch_size` is that of every batch; None: each is looked at, by `size_of`."""
        if batch_size is not None and batch_size < 1:
            raise ConfigurationError(f"batch_size={batch_size}: it must be 1 or more")
        self.total = 0
        self._batch_size = batch_size
        self._size_of = size_of
        self._samples = 0
        self._last = 0

    def saw(self, batch: Any) -> None:
        """A batch comes."""
        self._samples += self._batch_size if self._batch_size is not None else self._size_of(batch)

    def take(self) -> int:
        """The samples since the last step; a second step on the same batches is of as many."""
        self._last, self._samples = self._samples or self._last, 0
        if not self._last:
            raise unknown_size("the number of samples of this step is unknown")
        self.total += self._last
        return self._last

    def reset(self) -> None:
        """Forget what came in vain."""
        self._samples = 0


def unknown_size(why: str) -> ConfigurationError:
    """What to say where the size of a batch is nobody's to know."""
    return ConfigurationError(f"{why}. Say it: batch_size=…")
