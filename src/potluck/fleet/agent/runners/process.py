"""Jobs that are plain processes: each has a small parent (shim.py), a session, a working folder and a log."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import psutil

from potluck.errors import ConfigurationError, RetryableError
from potluck.fleet.agent.jobfolder import JobFolder
from potluck.fleet.agent.reconciler import Exit, Instance
from potluck.fleet.agent.runners import shim
from potluck.fleet.agent.runners.runner import Fetch, Launch, Usage
from potluck.fleet.jobs.job import Job

logger = logging.getLogger(__name__)

START_SECONDS = 30.0
STARTED = "started"  # says the shim
MAX_READ_BYTES = 1024 * 1024
FOLLOW_EVERY_SECONDS = 0.3


class ProcessRunner:
    """Runs jobs as processes of this user."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shims: dict[str, subprocess.Popen[bytes]] = {}
        self._looked_at: dict[int, psutil.Process] = {}

    engine = ""

    async def prepare(self, job: Job, fetch: Fetch) -> None:
        """A process needs nothing but its files."""

    async def instances(self) -> dict[str, Instance]:
        """All that there is."""
        return await asyncio.to_thread(self._instances)

    def _instances(self) -> dict[str, Instance]:
        for name in [name for name, process in self._shims.items() if process.poll() is not None]:
            del self._shims[name]  # and so it is reaped
        found: dict[str, Instance] = {}
        for path in sorted(self._folder.glob("*/run/running.json")):
            folder = JobFolder(self._folder, path.parent.parent.name)
            folder.trim_log()
            if (instance := _instance(folder)) is not None:
                found[folder.name] = instance
        return found

    async def start(self, launch: Launch) -> None:
        """Start a job, and wait until its process is there."""
        await asyncio.to_thread(self._start, launch)

    def _start(self, launch: Launch) -> None:
        folder, job = launch.folder, launch.job
        if _is_locked(folder):
            raise RetryableError(f"{job.name} runs already")
        folder.make()
        folder.mark_stopped(False)
        spec = {
            "lock": str(folder.lock),
            "run": str(folder.run),
            "work": str(folder.work),
            "log": str(folder.log),
            "command": list(job.command),
            "cores": _cores(job.limits.cpus),
            "memory_bytes": job.limits.memory_bytes,
            "stop_seconds": job.stop_seconds,
            "about": {"digest": job.digest, "restarts": launch.restarts, "failures": launch.failures},
        }
        environment = {**launch.environment}
        if job.limits.cpus:
            environment.setdefault("OMP_NUM_THREADS", str(math.ceil(job.limits.cpus)))
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", shim.__file__, json.dumps(spec)],
            env=environment,
            cwd=folder.path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._shims[job.name] = process
        assert process.stdout is not None
        with process.stdout as said:
            line = said.readline().decode().strip()
        if line == STARTED:
            return
        code = process.wait(START_SECONDS)
        if code == shim.RUNS_ALREADY:
            raise RetryableError(f"{job.name} runs already")
        if code:  # else the job's own command is the matter, and that is written down
            raise RetryableError(f"nothing can be started on this machine: {line or f'exit code {code}'}")

    async def stop(self, name: str, grace_seconds: float) -> None:
        """Notice to the job; its parent kills it after the grace."""
        folder = JobFolder(self._folder, name)
        known = _read(folder.run / "running.json")
        if known is None or not _is_locked(folder):
            return
        if not folder.is_stopped:
            try:
                (folder.run / "grace").write_text(str(grace_seconds))
                folder.mark_stopped(True)
            except OSError as error:  # a full disk: it is told to end all the same
                logger.warning("it is not written down that %s was stopped: %s", name, error)
        holders = await asyncio.to_thread(_holders, folder)
        has_parent = known["shim"] in holders
        # Without its parent nobody counts the grace: then all that is left of it ends at once.
        for pid in [known["shim"]] if has_parent else holders:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM if has_parent else signal.SIGKILL)

    async def remove(self, name: str) -> None:
        """Forget an instance that has ended."""
        folder = JobFolder(self._folder, name)
        if not _is_locked(folder):
            folder.forget_run()
            folder.mark_stopped(False)

    async def read_log(self, name: str, num_lines: int) -> bytes:
        """From the file that the process writes to."""
        data, _ = await asyncio.to_thread(_tail, JobFolder(self._folder, name), num_lines)
        return data

    async def follow_log(self, name: str, num_lines: int) -> AsyncGenerator[bytes, None]:
        """The same, and what is added to it."""
        folder = JobFolder(self._folder, name)
        data, at = await asyncio.to_thread(_tail, folder, num_lines)
        while True:
            if data:
                yield data
            else:
                await asyncio.sleep(FOLLOW_EVERY_SECONDS)
            data, at = await asyncio.to_thread(_read_on, folder, at)

    async def usage(self, name: str) -> Usage:
        """Of the process and all that it started."""
        return await asyncio.to_thread(self._usage, JobFolder(self._folder, name))

    def _usage(self, folder: JobFolder) -> Usage:
        known = _read(folder.run / "running.json")
        if known is None or not known["group"] or not _is_locked(folder):
            return Usage()
        cpu, memory = 0.0, 0
        try:
            top = self._looked_at.setdefault(known["group"], psutil.Process(known["group"]))
            for process in (top, *top.children(recursive=True)):
                same = self._looked_at.setdefault(process.pid, process)
                cpu += same.cpu_percent()
                memory += same.memory_info().rss
        except psutil.Error:
            self._looked_at = {pid: process for pid, process in self._looked_at.items() if process.is_running()}
        return Usage(cpu_percent=cpu, memory_bytes=memory)

    async def close(self) -> None:
        """Let go; what runs goes on."""
        for process in self._shims.values():
            process.returncode = process.poll() or 0  # it lives on, and needs no warning for that


def _tail(folder: JobFolder, num_lines: int) -> tuple[bytes, int]:
    """The last lines of a log, and where it ends."""
    try:
        with folder.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - MAX_READ_BYTES, 0))
            lines = file.read(MAX_READ_BYTES).splitlines(keepends=True)
            return b"".join(lines[-num_lines:] if num_lines else ()), size
    except FileNotFoundError:
        return b"", 0


def _read_on(folder: JobFolder, at: int) -> tuple[bytes, int]:
    """What a log has from there on, and where that ends. One that was made shorter is read from its beginning."""
    try:
        with folder.log.open("rb") as file:
            file.seek(at if at <= file.seek(0, os.SEEK_END) else 0)
            return file.read(MAX_READ_BYTES), file.tell()
    except FileNotFoundError:
        return b"", 0


def _instance(folder: JobFolder) -> Instance | None:
    is_running = _is_locked(folder)  # first: one that ends meanwhile has written down how by the time we look
    known = _read(folder.run / "running.json")
    if known is None:
        return None
    ended = _read(folder.run / "exit.json") if not is_running else None
    try:
        how = {key: value for key, value in (ended or {}).items() if key != "ended_at"}
        return Instance(
            job=folder.name,
            digest=known["digest"],
            state="running" if is_running else "ended",
            restarts=known["restarts"],
            failures=known["failures"],
            started_at=known["started_at"],
            ended_at=(ended or {}).get("ended_at", known["started_at"]) if not is_running else 0.0,
            stopped=folder.is_stopped,
            exit=Exit(**how),
        )
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"{folder.run} cannot be understood ({error}): remove that folder") from error


def _is_locked(folder: JobFolder) -> bool:
    """Whether anything of the job runs."""
    try:
        descriptor = os.open(folder.lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _holders(folder: JobFolder) -> list[int]:
    """The processes that have a job's lock open: its parent, and all of the job that did not close it.

    A pid that was written down may be another process by now; one that has the lock open is the job's.
    """
    lock = folder.lock.stat()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if any(_is_same(each, lock) for each in (entry / "fd").iterdir()):
                found.append(int(entry.name))
    return found


def _is_same(path: Path, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), file)
    except OSError:
        return False


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _cores(cpus: float) -> list[int]:
    """Some of the cores that we may use; all of them for a job without a limit."""
    ours = sorted(os.sched_getaffinity(0))
    wanted = math.ceil(cpus)
    return random.sample(ours, wanted) if 0 < wanted < len(ours) else []
