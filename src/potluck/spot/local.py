"""Machines of one's own, for trying: processes that come and go as spot machines do.

A machine is a process in a folder of its own. What it is stands in a file there with the process's number and start
time, so `machines` and `down` know it after a restart of the runner. The market is a trace (preemption.py): a node of
the trace is room for one machine. When a node goes, the machine that has it is killed without notice; where no node is
free, a start fails for lack of capacity. Without a trace there is room for all.

With `lines` each machine runs at the end of a line of its own, with its slot's speed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from potluck.spot.preemption import Change
from potluck.spot.provider import Machine, NoCapacityError
from potluck.spot.tiers import Slot

KIND = "process"
END_SECONDS = 10.0


class Lines(Protocol):
    """Lines of slots (testing/slotlines.py)."""

    def plug(self, slot: Slot) -> list[str]:
        """Give a slot its line; returns the words that run a command at its end."""
        ...

    def unplug(self, name: str) -> None:
        """Cut a slot's line, and then end what runs behind it."""
        ...

    def remove(self) -> list[str]:
        """Remove all lines; returns their names."""
        ...


class _Process(msgspec.Struct, frozen=True, kw_only=True):
    """What is written down of a process."""

    pid: int
    created_at: float  # by the kernel: another process may get the same number later


class _Entry(_Process, frozen=True, kw_only=True):
    """What is written down of a machine."""

    id: str
    slot: str
    node: str
    started_at: float


class LocalProvider:
    """Processes of this machine as machines of an experiment."""

    def __init__(
        self,
        folder: Path,
        command: Callable[[Slot, Path], Sequence[str]],
        *,
        trace: Sequence[Change] = (),
        lines: Lines | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`command` gives the process of a slot, to be run in the folder it is told; the trace begins now."""
        self._folder, self._command, self._lines, self._now = folder, command, lines, now
        self._trace, self._began_at = sorted(trace, key=lambda change: change.seconds), now()
        self._next, self._nodes = 0, set[str]()
        self.num_started = 0
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self.num_preempted = 0
        folder.mkdir(parents=True, exist_ok=True)

    def machines(self) -> list[Machine]:
        """List processes that are alive, after what the trace took away meanwhile."""
        self._replay()
        return [
            Machine(id=entry.id, slot=entry.slot, kind=KIND, state="running", started_at=entry.started_at)
            for entry in self._entries()
        ]

    def start(self, slot: Slot, kind: str) -> Machine:
        """Start a process for a slot on a free node."""
        self._replay()
        is_spot = (
            bool(self._trace) and slot.role == "worker"
        )  # aux peers are not on the spot market: others rely on them
        free = sorted(self._nodes - {entry.node for entry in self._entries()}) if is_spot else []
        if is_spot and not free:
            raise NoCapacityError("the trace has no machine to spare now")
        self.num_started += 1
        started_at = self._now()
        machine_id = f"{slot.name}-{int(started_at * 1000):x}-{self.num_started}"
        place = self._folder / machine_id
        place.mkdir()
        inside = self._lines.plug(slot) if self._lines is not None else []
        with (place / "output.log").open("wb") as log:
            process = subprocess.Popen(
                [*inside, *map(os.fspath, self._command(slot, place))],
                cwd=place,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the runner, which asks its machines to leave
            )
        self._children[process.pid] = process
        entry = _Entry(
            id=machine_id,
            slot=slot.name,
            node=free[0] if free else "",
            pid=process.pid,
            created_at=psutil.Process(process.pid).create_time(),
            started_at=started_at,
        )
        (place / "machine.json").write_bytes(msgspec.json.encode(entry))
        return Machine(id=machine_id, slot=slot.name, kind=KIND, state="running", started_at=started_at)

    def end(self, ids: Sequence[str]) -> None:
        """Ask machines to leave, and kill those that do not."""
        entries = [entry for entry in self._entries() if entry.id in set(ids)]
        for entry in entries:
            self._signal(entry, signal.SIGTERM)
        processes = [process for entry in entries if (process := _process(entry)) is not None]
        _, stubborn = psutil.wait_procs(processes, timeout=END_SECONDS)
        for process in stubborn:
            process.kill()
        psutil.wait_procs(stubborn, timeout=END_SECONDS)
        if self._lines is not None:
            for entry in entries:
                self._lines.unplug(entry.slot)
        self._reap()

    def prices(self, kinds: Sequence[str]) -> dict[str, float]:
        """Processes cost nothing."""
        return dict.fromkeys(kinds, 0.0)

    def remove_everything(self) -> list[str]:
        """End all processes of the experiment, and remove their lines and folders."""
        removed = [entry.id for entry in self._entries()]
        self.end(removed)
        if self._lines is not None:
            removed += self._lines.remove()
        shutil.rmtree(self._folder, ignore_errors=True)
        return removed

    def _replay(self) -> None:
        """Take the trace to the present: nodes come, and those that go take their machine with them."""
        passed = self._now() - self._began_at
        while self._next < len(self._trace) and self._trace[self._next].seconds <= passed:
            change = self._trace[self._next]
            self._next += 1
            if change.kind == "add":
                self._nodes.add(change.node)
                continue
            self._nodes.discard(change.node)
            for entry in self._entries():
                if entry.node == change.node:
                    self.num_preempted += 1
                    if self._lines is not None:
                        self._lines.unplug(entry.slot)
                    self._signal(entry, signal.SIGKILL)
                    if (process := _process(entry)) is not None:
                        psutil.wait_procs([process], timeout=END_SECONDS)
                    self._reap()

    def _entries(self) -> list[_Entry]:
        self._reap()
        found = []
        for path in sorted(self._folder.glob("*/machine.json")):
            entry = msgspec.json.decode(path.read_bytes(), type=_Entry)
            if _process(entry) is not None:
                found.append(entry)
        return found

    def _signal(self, entry: _Entry, signum: signal.Signals) -> None:
        if _process(entry) is not None:
            os.killpg(entry.pid, signum)

    def _reap(self) -> None:
        for pid in [pid for pid, child in self._children.items() if child.poll() is not None]:
            del self._children[pid]


def note_process(path: Path, pid: int) -> None:
    """Write down which process this is, for `end_noted`."""
    path.write_bytes(msgspec.json.encode(_Process(pid=pid, created_at=psutil.Process(pid).create_time())))


def end_noted(path: Path) -> bool:
    """End the process that was written down there, if it lives; whether it did."""
    if not path.exists():
        return False
    process = _process(msgspec.json.decode(path.read_bytes(), type=_Process))
    path.unlink()
    if process is None:
        return False
    process.terminate()
    _, stubborn = psutil.wait_procs([process], timeout=END_SECONDS)
    for each in stubborn:
        each.kill()
    psutil.wait_procs(stubborn, timeout=END_SECONDS)
    return True


def _process(entry: _Process) -> psutil.Process | None:
    """Return the very process that was started, if it lives."""
    try:
        process = psutil.Process(entry.pid)
        alive = process.create_time() == entry.created_at and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if alive else None
