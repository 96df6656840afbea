"""What of this machine a trainer takes: a device, and memory, within a limit (cores: optim/cores.py)."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor, nn

from potluck.errors import ConfigurationError

logger = logging.getLogger(__name__)

MARGIN = 0.9  # of a limit: batches are chosen so that there is room for what comes in rounds
MB = 10**6


def find_device(name: str) -> torch.device:
    """Where to compute: the device of that name, ConfigurationError if it cannot be used; the fastest without one."""
    if not name:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"--device {name} cannot be used here: {error}") from error
    return device


class MemoryLimit:
    """How much memory this process may use, on the device that it computes on."""

    def __init__(self, max_bytes: int | None, device: torch.device) -> None:
        self._max_bytes = max_bytes
        self._device = device
        self._peak_before_bytes = 0
        if max_bytes is None:
            return
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, max_bytes / total), device)
        elif (used := self._used_bytes()) > max_bytes:
            raise ConfigurationError(
                f"--max-memory {max_bytes / MB:.0f}MB is less than the {used / MB:.0f} MB that this process uses "
                "before it trains anything: allow more"
            )

    def fits(self) -> bool:
        """Whether all that was tried so far left room for rounds beside it."""
        if self._max_bytes is None or self._device.type == "cuda":  # there, what does not fit fails
            return True
        return _peak_bytes() <= max(MARGIN * self._max_bytes, self._peak_before_bytes)

    def begin_trials(self) -> None:
        """What was used at most so far, as when a state was loaded, is not held against batches that stay below."""
        self._peak_before_bytes = _peak_bytes()

    @contextmanager
    def reserved(self, model: nn.Module, num_tensors: int) -> Iterator[None]:
        """Hold so many tensors beside each of the model's, as training will, while batches are tried."""
        beside: list[Tensor] = []
        if self._max_bytes is not None or self._device.type == "cuda":  # else there is no limit to stay below
            try:
                # Written to: memory that nobody has touched does not count.
                beside = [torch.ones_like(p) for p in model.parameters() for _ in range(num_tensors)]
            except torch.OutOfMemoryError as error:
                raise ConfigurationError(
                    f"the model and its optimizer need more than {self.describe()}: take another --device, or take "
                    "part as an aux peer (potluck aux)"
                ) from error
        yield
        beside.clear()

    def is_exceeded(self) -> bool:
        """Whether more is used than allowed."""
        return self._max_bytes is not None and self._used_bytes() > self._max_bytes

    def describe(self) -> str:
        """The limit, for a person."""
        if self._max_bytes is None:
            return f"the memory of {self._device}"
        return f"the {self._max_bytes / MB:.0f} MB of --max-memory"

    def _used_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.memory_reserved(self._device))
        return int(psutil.Process().memory_info().rss)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
