"""A disk that a test can fill: a file system of its own, in memory."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


class CannotMountError(OSError):
    """No file system can be mounted here, for instance because the test is not run by root."""


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A folder on such a disk.

    It is a link to where the disk is mounted. So pytest can still clear its folders away after a test run that was
    killed and has left the disk mounted.
    """
    mounted = Path(tempfile.mkdtemp(prefix="potluck-disk-"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(mounted)]
    mounting = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounting.returncode != 0:
        mounted.rmdir()
        raise CannotMountError(f"no file system can be mounted: {mounting.stderr.strip()}")
    try:
        folder.symlink_to(mounted)
        yield folder
    finally:
        subprocess.run(["umount", str(mounted)], check=True)
        mounted.rmdir()


def fill(disk: Path, *, leave_bytes: int = 0) -> Path:
    """Take all of the disk but this; remove the file that is returned to make room again."""
    ballast = disk / "ballast"
    with ballast.open("ab") as file, contextlib.suppress(OSError):
        while (free := shutil.disk_usage(disk).free) > leave_bytes:
            file.write(bytes(min(free - leave_bytes, 1 << 20)))
            file.flush()
    return ballast
