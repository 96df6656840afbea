"""How many samples a step stands for: those of all batches since the one before, said once or read off each batch."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import extract_batch_size

from potluck.errors import ConfigurationError

_REMEDY = "say it: PotluckStrategy(batch_size=…)"


class BatchCounter:
    """Counts samples from one step to the next."""

    def __init__(self, batch_size: int | None) -> None:
        """`batch_size` is that of every batch; None: each is looked at."""
        if batch_size is not None and batch_size < 1:
            raise ConfigurationError(f"batch_size={batch_size}: it must be 1 or more")
        self._batch_size = batch_size
        self._samples = 0
        self._last = 0

    def saw(self, batch: Any) -> None:
        """A batch comes."""
        self._samples += self._batch_size if self._batch_size is not None else _size_of(batch)

    def take(self) -> int:
        """The samples since the last step; a second step on the same batches is of as many."""
        self._last, self._samples = self._samples or self._last, 0
        if not self._last:
            raise ConfigurationError(f"nobody has told how many samples this step is of; {_REMEDY}")
        return self._last

    def reset(self) -> None:
        """Forget what came in vain."""
        self._samples = 0


def _size_of(batch: Any) -> int:
    try:
        return extract_batch_size(batch)
    except (MisconfigurationException, RecursionError) as error:
        raise ConfigurationError(
            f"the size of a batch cannot be inferred from a {type(batch).__name__} without tensors; {_REMEDY}"
        ) from error
