"""The parent of a job that is a plain process. Runs alone (`python -I shim.py`), with nothing but the standard library.

It outlives the agent that started it, holds a lock for as long as anything of the job runs (so that nobody can start
the job twice, and a pid that was given away again deceives nobody), passes SIGTERM on with a deadline, watches the
memory of all that the job started, and writes down how it ended. It takes the room for that at the start, since a job
may fill the disk.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphans of the job become children of this process
LOOK_EVERY_SECONDS = 0.1
MEMORY_EVERY_SECONDS = 0.5
RUNS_ALREADY = 3
NOT_STARTED = 4  # what it said on standard output is why
RECORD_BYTES = 1024
LOCK_TRIES = 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def write(path: Path, value: dict[str, Any]) -> None:
    """The whole file or the one before."""
    reserve(path, json.dumps(value))
    _draft(path).replace(path)


def reserve(path: Path, text: str = "") -> None:
    """Write a file's draft. Drafts have one size, so the next one over it fits on a full disk too."""
    descriptor = os.open(_draft(path), os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text.ljust(RECORD_BYTES))
        file.truncate()
        file.flush()
        os.fsync(descriptor)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def take(lock: int) -> bool:
    """Have the lock, unless something of the job runs. An agent that looks has it for an instant: so try on."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(LOOK_EVERY_SECONDS)
        else:
            return True
    return False


def descendants(parent: int) -> list[int]:
    """All processes below this one, by /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            state, ppid = stat.rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.name)] = int(ppid)
    found, fresh = [], [parent]
    while fresh:
        fresh = [pid for pid, above in parents.items() if above in fresh]
        found += fresh
    return found


def memory_bytes(pids: list[int]) -> int:
    """What they hold in memory, shared pages counted once each."""
    total = 0
    for pid in pids:
        try:
            resident, shared = map(int, Path("/proc", str(pid), "statm").read_text().split()[1:3])
        except (OSError, ValueError):
            continue
        total += (resident - shared) * PAGE_BYTES
    return total


class Shim:
    """One run of one job."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.folder = Path(spec["run"])
        self.kill_at: float | None = None
        self.child: subprocess.Popen[bytes] | None = None
        self.out_of_memory = False

    def run(self) -> int:
        """Run the job to its end."""
        lock = os.open(self.spec["lock"], os.O_RDWR | os.O_CREAT, 0o600)
        if not take(lock):
            return RUNS_ALREADY
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGTERM, self.told_to_end)
        for ignored in (signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)
        known = {**self.spec["about"], "shim": os.getpid(), "group": 0, "started_at": time.time()}
        try:
            (self.folder / "exit.json").unlink(missing_ok=True)
            reserve(self.folder / "exit.json")
            write(self.folder / "running.json", known)
            reserve(self.folder / "running.json")
        except OSError as error:
            os.write(1, str(error.strerror).encode())
            return NOT_STARTED
        try:
            self.start(lock)
        except OSError as error:
            self.end({"code": None, "reason": _why_not(self.spec["command"][0], error)})
            return 0
        assert self.child is not None
        write(self.folder / "running.json", {**known, "group": self.child.pid})
        os.write(1, b"started\n")
        os.close(1)
        code = self.wait()
        self.clear_up()
        self.end(
            {
                "code": code if code >= 0 else None,
                "signal": -code if code < 0 else 0,
                "out_of_memory": self.out_of_memory,
            }
        )
        return 0

    def start(self, lock: int) -> None:
        """Start the process itself, in a session of its own. It holds the lock too."""
        if cores := self.spec["cores"]:
            os.sched_setaffinity(0, cores)
        log = os.open(self.spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self.child = subprocess.Popen(
                self.spec["command"],
                cwd=self.spec["work"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(lock,),
            )
        finally:
            os.close(log)
        if self.kill_at is not None:  # told to end before it began
            self.send(signal.SIGTERM)

    def wait(self) -> int:
        """Until the process has ended: its exit code, negative for a signal."""
        assert self.child is not None
        look_at = 0.0
        while (code := self.child.poll()) is None:
            now = time.monotonic()
            if self.kill_at is not None and now >= self.kill_at:
                self.send(signal.SIGKILL)
            if self.spec["memory_bytes"] and now >= look_at:
                look_at = now + MEMORY_EVERY_SECONDS
                if memory_bytes(descendants(os.getpid())) > self.spec["memory_bytes"]:
                    self.out_of_memory = True
                    self.send(signal.SIGKILL)
            time.sleep(LOOK_EVERY_SECONDS)
        return code

    def told_to_end(self, _number: int, _frame: object) -> None:
        """Notice to the job; after its time it is killed."""
        if self.kill_at is None:  # a program that cleans up is not disturbed by a second notice
            self.kill_at = time.monotonic() + self.grace_seconds()
            self.send(signal.SIGTERM)

    def grace_seconds(self) -> float:
        try:
            return float((self.folder / "grace").read_text())
        except (OSError, ValueError):
            return float(self.spec["stop_seconds"])

    def send(self, number: int) -> None:
        """A signal to the whole process group."""
        if self.child is not None and self.child.poll() is None:
            try:
                os.killpg(self.child.pid, number)
            except ProcessLookupError:
                return

    def clear_up(self) -> None:
        """End what the process has left behind."""
        while left := descendants(os.getpid()):
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return

    def end(self, how: dict[str, Any]) -> None:
        write(self.folder / "exit.json", {**how, "ended_at": time.time()})


def _why_not(command: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no program {command} on this machine"
    if isinstance(error, PermissionError):
        return f"{command} may not be executed: is it marked as a program (chmod +x)?"
    return f"{command} cannot be started: {error.strerror}"


if __name__ == "__main__":
    sys.exit(Shim(json.loads(sys.argv[1])).run())
