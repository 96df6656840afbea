"""What of this machine a trainer takes: a device, cores, where several peers share them, memory, within a limit."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from potluck.errors import ConfigurationError
from potluck.peer import environment

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


def share_cores(num_threads: int | None = None) -> int:
    """Have torch compute with so many threads; unless told, with this peer's share of the cores.

    With one thread for each core in every process, peers on one machine wait for each other inside of each operation.
    Who starts later takes its share of what is there then; those before keep theirs.
    """
    if num_threads is None and environment.names_threads():
        return torch.get_num_threads()
    if num_threads is None:
        num_threads = max(1, _cores() // max(1, num_peers_here()))
    torch.set_num_threads(num_threads)
    return num_threads


def num_peers_here() -> int:
    """How many processes on this machine train with Potluck, this one included."""
    return 1 + sum(_is_peer(process) for process in psutil.process_iter() if process.pid != os.getpid())


def _is_peer(process: psutil.Process) -> bool:
    """By its command, which is all that can be seen from outside; programs of users' own are not recognised."""
    try:
        command = process.cmdline()
    except (psutil.Error, OSError):
        return False
    names = [Path(part).name for part in command[:4]]
    is_potluck = "potluck" in names or "potluck.cli" in names
    return is_potluck and any(verb in command for verb in ("join", "train"))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1


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
