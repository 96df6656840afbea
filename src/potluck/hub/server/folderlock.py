"""One hub per folder, also after a crash.

Two locks tell three cases apart. `owner.lock` is held by the process that started the hub, `server.lock` also by its
nats-server, which inherits it:

    owner held                 another hub runs here: an error
    owner free, server held    that process was killed, and its server is still ending or was left behind: stop it, wait
    both free                  ours

The kernel drops a dead process's locks, so nothing has to be cleaned up, and no process id has to be trusted: before
a server is stopped, its command line must name this folder's configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from pathlib import Path

import psutil

from potluck.errors import ConfigurationError
from potluck.hub.privatefiles import read_private, unusable, write_private

logger = logging.getLogger(__name__)

OWNER_FILE = "owner.lock"
SERVER_FILE = "server.lock"
PID_FILE = "server.pid"

_TERMINATE_SECONDS = 10.0  # for a server that was left behind to end by itself, then once more after SIGKILL
_POLL_SECONDS = 0.05


class FolderLock:
    """The right to run a hub on a folder."""

    def __init__(self, folder: Path, configuration_file: Path) -> None:
        self._folder = folder
        self._configuration_file = configuration_file
        self._owner: int | None = None
        self._server: int | None = None

    @property
    def server_descriptor(self) -> int:
        """What the server has to inherit."""
        assert self._server is not None, "the lock is not held"
        return self._server

    async def acquire(self) -> None:
        """Take both locks; ConfigurationError when another hub has the folder."""
        try:
            self._owner = self._open(OWNER_FILE)
            if not _try_lock(self._owner):
                raise ConfigurationError(
                    f"another hub is running on {self._folder}: stop it first, or choose another folder"
                )
            self._server = self._open(SERVER_FILE)
            if not _try_lock(self._server):
                await self._end_orphan(self._server)
        except BaseException:
            self.release()
            raise

    def record_server(self, pid: int) -> None:
        """Note which process the server is, for the next host, which has to end it after our death."""
        write_private(self._folder / PID_FILE, f"{pid}\n")

    def release(self) -> None:
        """Let go. Idempotent."""
        for descriptor in (self._server, self._owner):
            if descriptor is not None:
                os.close(descriptor)
        self._server = self._owner = None

    def _open(self, name: str) -> int:
        path = self._folder / name
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise unusable(path, error) from error

    async def _end_orphan(self, descriptor: int) -> None:
        """Stop the server of a hub that was killed, and wait for its lock."""
        logger.warning("an earlier hub on %s was killed and its server still runs: stopping it", self._folder)
        for stop in (psutil.Process.terminate, psutil.Process.kill):
            orphan = self._find_orphan()
            if orphan is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    stop(orphan)
            if await _wait_for_lock(descriptor, _TERMINATE_SECONDS):
                return
        raise ConfigurationError(
            f"the server of an earlier hub still uses {self._folder} and could not be stopped: end the process that "
            f"has {self._folder / SERVER_FILE} open (fuser tells which), or choose another folder"
        )

    def _find_orphan(self) -> psutil.Process | None:
        """The process in the pid file, if it is a server of this folder."""
        text = read_private(self._folder / PID_FILE)
        if text is None or not text.strip().isdigit():
            return None
        try:
            process = psutil.Process(int(text))
            return process if str(self._configuration_file) in process.cmdline() else None
        except psutil.Error:
            return None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _wait_for_lock(descriptor: int, timeout_seconds: float) -> bool:
    """Whether the lock became ours in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_seconds
    while not _try_lock(descriptor):
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return True
