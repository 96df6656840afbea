"""What could keep this machine from helping, in plain words: each check green, yellow or red, with what to do.

Green: fine. Yellow: it will work, but worse than it could. Red: it cannot work until this is mended.
"""

from __future__ import annotations

import importlib.metadata
import resource
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

import potluck
from potluck.peer.hubtime import WRONG_CLOCK_SECONDS

Level = Literal["green", "yellow", "red"]

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
GIB = 1 << 30
LITTLE_MEMORY_BYTES = 2 * GIB
LEAST_TRAINING_BYTES = GIB // 2
LITTLE_DISK_BYTES = 5 * GIB
NO_DISK_BYTES = GIB // 4
FEW_OPEN_FILES = 512
SLOW_HUB_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing looked at."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def worst(checks: Iterable[Check]) -> Level:
    """The level of the worst check."""
    order: tuple[Level, ...] = ("green", "yellow", "red")
    return max((check.level for check in checks), key=order.index, default="green")


def is_fit_for_training() -> bool:
    """Whether there is memory for a model, its gradients and torch itself."""
    return psutil.virtual_memory().available >= LEAST_TRAINING_BYTES


def check_machine(*folders: Path) -> list[Check]:
    """Versions, processors, device, memory, disk and open files here; `folders` are where Potluck will write."""
    torch = _torch_version()
    return [
        _check_versions(),
        _check_torch(torch),
        _check_processors(),
        _check_device(torch),
        _check_memory(),
        *(_check_disk(folder) for folder in folders),
        _check_open_files(),
    ]


def check_clock(error_seconds: float) -> Check:
    """How far this machine's clock is from the hub's. It works either way: everything shared uses hub time."""
    where = "ahead of" if error_seconds > 0 else "behind"
    found = f"{abs(error_seconds):.1f} s {where} the hub" if abs(error_seconds) >= 0.1 else "0.0 s off the hub's"
    if abs(error_seconds) < WRONG_CLOCK_SECONDS:
        return Check(name="clock", level="green", found=found)
    return Check(
        name="clock", level="yellow", found=found, remedy="Potluck works anyway; turn on time synchronisation (NTP)"
    )


def check_round_trip(seconds: float) -> Check:
    """How long the hub takes to answer."""
    found = f"answers in {seconds * 1e3:.1f} ms"
    if seconds < SLOW_HUB_SECONDS:
        return Check(name="hub", level="green", found=found)
    return Check(name="hub", level="yellow", found=found, remedy="a slow or busy line: stop other downloads if you can")


def _check_versions() -> Check:
    """Whether they fit the run, the hub says; and where Python is too old, Potluck could not be installed."""
    python = ".".join(map(str, sys.version_info[:3]))
    return Check(name="potluck", level="green", found=f"{potluck.__version__}, Python {python}")


def _torch_version() -> str:
    """By what is installed, since its import takes seconds; empty where it is not."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _check_torch(version: str) -> Check:
    if version:
        return Check(name="torch", level="green", found=version)
    return Check(name="torch", level="yellow", found="not installed", remedy="it is needed to train: pip install torch")


def _check_device(torch_version: str) -> Check:
    """Whether a GPU lies idle; which device is used in the end, torch decides."""
    if not NVIDIA_DRIVER.exists():
        return Check(name="device", level="green", found="no NVIDIA GPU")
    if not torch_version.endswith("+cpu"):
        return Check(name="device", level="green", found="an NVIDIA GPU")
    remedy = "install a torch for CUDA (https://pytorch.org): training is many times faster then"
    found = f"an NVIDIA GPU, which torch {torch_version} cannot use"
    return Check(name="device", level="yellow", found=found, remedy=remedy)


def _check_processors() -> Check:
    number = psutil.cpu_count() or 1
    return Check(name="processors", level="green", found=f"{number} core{'s' if number > 1 else ''}")


def _check_memory() -> Check:
    free = psutil.virtual_memory().available
    found = f"{free / GIB:.1f} GiB free"
    if free >= LITTLE_MEMORY_BYTES:
        return Check(name="memory", level="green", found=found)
    return Check(name="memory", level="yellow", found=found, remedy="close other programs, or join as an observer")


def _check_disk(folder: Path) -> Check:
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:.1f} GiB free in {place}"
    if free >= LITTLE_DISK_BYTES:
        return Check(name="disk", level="green", found=found)
    remedy = f"free some space in {place}, or name another folder"
    return Check(name="disk", level="red" if free < NO_DISK_BYTES else "yellow", found=found, remedy=remedy)


def _check_open_files() -> Check:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Check(name="open files", level="green", found="any number")
    if soft >= FEW_OPEN_FILES:
        return Check(name="open files", level="green", found=f"up to {soft}")
    return Check(name="open files", level="yellow", found=f"only {soft}", remedy="run `ulimit -n 4096` first")
