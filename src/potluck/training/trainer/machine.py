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
    try:
        # By way of a tensor it has an index, which some functions of torch want.
        return torch.zeros(1, device=name or _fastest()).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"--device {name or _fastest()} cannot be used here: {error}") from error


def find_devices(names: str) -> tuple[torch.device, ...]:
    """All that a peer computes on: those that are named, with commas between them; all of the fastest kind without."""
    if names:
        return tuple(find_device(name.strip()) for name in names.split(","))
    first = find_device("")
    if first.type in ("cpu", "mps"):
        return (first,)
    others = (index for index in range(torch.accelerator.device_count()) if index != first.index)
    return (first, *(torch.device(first.type, index) for index in others))


def _fastest() -> str:
    """The kind of accelerator that torch finds here, be it cuda, xpu or mps; else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else "cpu"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no room. Not all of them have an error of its own for it."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def wait_for(device: torch.device) -> None:
    """Until what was begun there is done."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def free_cache(device: torch.device) -> None:
    """Let the device have back what torch keeps for later."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


class MemoryLimit:
    """How much memory this process may use, on the device that it computes on."""

    def __init__(self, max_bytes: int | None, device: torch.device) -> None:
        self._max_bytes = max_bytes
        self._device = device
        self._peak_before_bytes = 0
        if max_bytes is None:
            return
        if device.type != "cpu":
            _limit(device, max_bytes)
        elif (used := self._used_bytes()) > max_bytes:
            raise ConfigurationError(
                f"--max-memory {max_bytes / MB:.0f}MB is less than the {used / MB:.0f} MB that this process uses "
                "before it trains anything: allow more"
            )

    def fits(self) -> bool:
        """Whether all that was tried so far left room for rounds beside it."""
        if self._max_bytes is None or self._device.type != "cpu":  # there, what does not fit fails
            return True
        return _peak_bytes() <= max(MARGIN * self._max_bytes, self._peak_before_bytes)

    def begin_trials(self) -> None:
        """What was used at most so far, as when a state was loaded, is not held against batches that stay below."""
        self._peak_before_bytes = _peak_bytes()

    @contextmanager
    def reserved(self, model: nn.Module, num_tensors: int) -> Iterator[None]:
        """Hold so many tensors beside each of the model's, as training will, while batches are tried."""
        beside: list[Tensor] = []
        if self._max_bytes is not None or self._device.type != "cpu":  # else there is no limit to stay below
            try:
                # Written to: memory that nobody has touched does not count.
                beside = [torch.ones_like(p) for p in model.parameters() for _ in range(num_tensors)]
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
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
        if self._device.type == "mps":
            return int(torch.mps.driver_allocated_memory())
        if self._device.type != "cpu":
            return int(torch.get_device_module(self._device).memory_reserved(self._device))
        return int(psutil.Process().memory_info().rss)


def _limit(device: torch.device, max_bytes: int) -> None:
    """Have torch refuse what is beyond; where it cannot, `is_exceeded` tells."""
    module = torch.get_device_module(device)
    if device.type == "mps":
        module.set_per_process_memory_fraction(min(1.0, max_bytes / torch.mps.recommended_max_memory()))
    elif hasattr(module, "set_per_process_memory_fraction"):
        total = module.get_device_properties(device).total_memory
        module.set_per_process_memory_fraction(min(1.0, max_bytes / total), device)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
