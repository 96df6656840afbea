"""A job's folder on its machine.

work/           where it runs; what it sends along is unpacked here, what it leaves here stays
own/            what Potluck needs in the job: its key, what it has logged
log, log.1      what a plain process wrote
run/            what the runner knows of it
lock            held while anything of a plain process runs; never removed, so that all mean the same file
stopped         it was told to end, and did not end by itself
"""

from __future__ import annotations

import logging
import os
import shutil
import tarfile
from pathlib import Path

from potluck.errors import ConfigurationError

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
LOG_BYTES = 16 * 1024 * 1024


class JobFolder:
    """One job's folder; made on first use."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.path = root / name
        self.work, self.own, self.run = self.path / "work", self.path / "own", self.path / "run"
        self.log, self.lock = self.path / "log", self.path / "lock"
        self._stopped = self.path / "stopped"

    def make(self) -> None:
        """Make what is missing. Nobody else may look in."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (self.work, self.own, self.run):
            folder.mkdir(exist_ok=True, mode=0o700)

    def hand_over(self, uid: int, gid: int) -> None:
        """Let another user work here, where we are root."""
        if os.getuid() != 0 or uid == 0:
            return
        self.path.chmod(0o711)
        for top in (self.work, self.own):
            os.chown(top, uid, gid)
            for folder, names, files in os.walk(top):
                for name in (*names, *files):
                    os.chown(Path(folder, name), uid, gid, follow_symlinks=False)

    def unpack(self, archive: Path) -> None:
        """Put the files of an archive into the working folder; those of the same name are replaced."""
        try:
            with tarfile.open(archive) as files:
                files.extractall(self.work, filter="data")
        except (tarfile.TarError, OSError) as error:
            raise ConfigurationError(f"the files of {self.name} cannot be unpacked: {error}") from error

    @property
    def is_stopped(self) -> bool:
        """Whether the instance was told to end."""
        return self._stopped.exists()

    def mark_stopped(self, stopped: bool) -> None:
        """Write down that it was told to end, or that it was started anew."""
        if stopped:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._stopped.touch()
        else:
            self._stopped.unlink(missing_ok=True)

    def forget_run(self) -> None:
        """Forget what the runner knew; the working folder and the log stay."""
        shutil.rmtree(self.run, ignore_errors=True)

    def trim_log(self) -> None:
        """Keep the log below its limit. Its writer appends, so it goes on at the new end."""
        older = self.log.with_name("log.1")
        try:
            if self.log.stat().st_size <= LOG_BYTES:
                return
        except FileNotFoundError:
            return
        try:
            shutil.copyfile(self.log, older)
        except OSError as error:  # a full disk: what was written goes, and makes room
            logger.warning("the log of %s is thrown away, since it cannot be kept: %s", self.name, error)
            older.unlink(missing_ok=True)
        os.truncate(self.log, 0)
