"""How much room is left on the disk of a folder, and when that is too little (pure, but for `measure`).

A hub whose disk is full can write no commit, no lease and nobody's arrival, so its people are warned long before. What
counts as little depends on the disk: a tenth of a small one, and never more than a gigabyte.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Level = Literal["enough", "low", "full"]

MIB = 1024 * 1024
LOW_SHARE, LOW_BYTES = 0.1, 1024 * MIB
FULL_SHARE, FULL_BYTES = 0.02, 64 * MIB  # below this nothing large is written, and a hub is not started again


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The file system that a folder is on."""

    total_bytes: int
    free_bytes: int

    @property
    def level(self) -> Level:
        """Whether there is room."""
        if self.free_bytes < self.reserve_bytes:
            return "full"
        return "low" if self.free_bytes < min(LOW_SHARE * self.total_bytes, LOW_BYTES) else "enough"

    @property
    def reserve_bytes(self) -> int:
        """What large files must leave free: the hub's own small writes need it."""
        return int(min(FULL_SHARE * self.total_bytes, FULL_BYTES))

    def __str__(self) -> str:
        return f"{_megabytes(self.free_bytes)} of {_megabytes(self.total_bytes)} free"


def measure(folder: Path) -> DiskSpace:
    """Look; OSError where the folder is gone."""
    usage = shutil.disk_usage(folder)
    return DiskSpace(total_bytes=usage.total, free_bytes=usage.free)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
