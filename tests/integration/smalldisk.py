"""A disk that a test can fill: a file system of its own, in memory."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A folder on such a disk; the test is skipped where none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    mounting = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounting.returncode != 0:
        pytest.skip(f"no file system can be mounted: {mounting.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Fill it to the last byte; remove the file that is returned to make room again."""
    ballast = disk / "ballast"
    with ballast.open("wb") as file, contextlib.suppress(OSError):
        while (free := shutil.disk_usage(disk).free) > 0:
            file.write(bytes(min(free, 1 << 20)))
            file.flush()
    return ballast
