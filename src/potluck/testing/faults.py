"""Faults at named points of a process, with a record that they fired.

A plan is a list of faults. Each names a point that product code reaches (`potluck.faultpoints.reach`), labels that must
be equal there, and an action:

    kill            SIGKILL to this process, as if the machine lost power
    exit[:CODE]     end at once with the exit code (1), without any clean-up
    interrupt       SIGINT to this process, as Ctrl-C
    stop[:SECONDS]  SIGSTOP to this process, and SIGCONT after so long; without a time, until the test thaws it
    delay:SECONDS   block the thread that got there (the event loop, if it was that)
    raise[:NAME]    raise InjectedFaultError, or the built-in or Potluck error of that name
    note            do nothing: only record that the point was reached

A fault fires the first `times` times (0: always) that it matches, after it has let `skip` matches pass; counts are per
process. Before it acts, it appends one line of JSON to a file, so that a test can assert that it fired, and when.

How it reaches a child process: the test puts the plan in the child's environment and starts it through
`python -m potluck.testing.faulty`, which calls `install_from_environment`. That function is the only reader of
POTLUCK_FAULTS (the plan, a JSON list) and POTLUCK_FAULTS_FIRED (the file); a process started otherwise ignores both.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from potluck import errors, faultpoints
from potluck.testing.polling import poll_until, poll_until_sync

PLAN_VARIABLE = "POTLUCK_FAULTS"
FIRED_VARIABLE = "POTLUCK_FAULTS_FIRED"

ACTIONS_WITHOUT_ARGUMENT = frozenset({"exit", "interrupt", "kill", "note", "raise", "stop"})
ACTIONS_WITH_ARGUMENT = frozenset({"delay", "exit", "raise", "stop"})
RESERVED_KEYS = frozenset({"point", "action", "times", "skip"})

Label = str | int | float | bool | None


class InjectedFaultError(Exception):
    """What the action `raise` raises: not a Potluck error, since no code may expect it."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a plan; validated on creation, so that a typing error shows in the test and not in a child."""

    point: str
    action: str
    times: int = 1
    skip: int = 0
    labels: dict[str, Label] = {}

    def __post_init__(self) -> None:
        verb, colon, argument = self.action.partition(":")
        if verb not in (ACTIONS_WITH_ARGUMENT if colon else ACTIONS_WITHOUT_ARGUMENT):
            raise errors.ConfigurationError(
                f"the fault at {self.point!r} has the unknown action {self.action!r}; "
                "use kill, exit[:CODE], interrupt, stop[:SECONDS], delay:SECONDS, raise[:NAME] or note"
            )
        if colon and verb in {"stop", "delay"}:
            _seconds(argument)
        if colon and verb == "exit":
            int(argument)
        if verb == "raise":
            _exception_class(argument)
        if self.times < 0 or self.skip < 0:
            raise errors.ConfigurationError(f"times and skip of the fault at {self.point!r} must not be negative")

    def matches(self, point: str, labels: Mapping[str, object]) -> bool:
        """Whether the point and every label are the ones asked for. Labels compare by how they print."""
        return point == self.point and all(
            name in labels and str(labels[name]) == str(wanted) for name, wanted in self.labels.items()
        )


class FiredFault(msgspec.Struct, frozen=True, kw_only=True):
    """The record that a fault fired."""

    fault: int
    """Its place in the plan, from 0."""
    point: str
    action: str
    labels: dict[str, str]
    """All labels of the point, as they print."""
    pid: int
    monotonic_seconds: float
    """The machine's monotonic clock, comparable with `time.monotonic()` of the test."""


class FaultHook:
    """What `reach` calls: finds the faults that match, records them, and acts."""

    def __init__(self, plan: Sequence[Fault], fired_path: Path) -> None:
        self._plan = list(plan)
        self._fired_path = fired_path
        self._matches = [0] * len(self._plan)
        self._lock = threading.Lock()

    def __call__(self, point: str, labels: Mapping[str, object]) -> None:
        """Fire what matches, in the order of the plan."""
        for index, fault in enumerate(self._plan):
            if fault.matches(point, labels) and self._is_its_turn(index, fault):
                self._record(index, fault, labels)
                act(fault.action)

    def _is_its_turn(self, index: int, fault: Fault) -> bool:
        with self._lock:
            self._matches[index] += 1
            turn = self._matches[index] - fault.skip
        return turn > 0 and (fault.times == 0 or turn <= fault.times)

    def _record(self, index: int, fault: Fault, labels: Mapping[str, object]) -> None:
        fired = FiredFault(
            fault=index,
            point=fault.point,
            action=fault.action,
            labels={name: str(value) for name, value in labels.items()},
            pid=os.getpid(),
            monotonic_seconds=time.monotonic(),
        )
        # One write to a file opened for appending: lines of several processes do not mix.
        descriptor = os.open(self._fired_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, msgspec.json.encode(fired) + b"\n")
        finally:
            os.close(descriptor)


def act(action: str) -> None:
    """Do to this process or thread what the action says."""
    verb, colon, argument = action.partition(":")
    if verb == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "exit":
        os._exit(int(argument) if colon else 1)
    elif verb == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    elif verb == "stop":
        _stop(_seconds(argument) if colon else None)
    elif verb == "delay":
        time.sleep(_seconds(argument))
    elif verb == "raise":
        raise _exception_class(argument)(f"fault injected by the test: {action}")


def _stop(seconds: float | None) -> None:
    """Stop this process; somebody else has to wake it, so a small shell is started first."""
    if seconds is None:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    waker = subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < 3600:
        raise errors.ConfigurationError(f"a fault's time must be from 0 to 3600 s, not {text!r}")
    return seconds


def _exception_class(name: str) -> type[Exception]:
    if not name:
        return InjectedFaultError
    found = getattr(builtins, name, None) or getattr(errors, name, None)
    if not (isinstance(found, type) and issubclass(found, Exception)):
        raise errors.ConfigurationError(f"{name!r} is neither a built-in exception nor one of potluck.errors")
    return found


class Faults:
    """A test's plan, and what has fired of it.

    faults = Faults(tmp_path / "fired.jsonl")
    faults.add("exchange.sent", action="kill", peer=name, epoch=3)
    child = children.spawn(faults.argv("-m", "potluck.cli.main", "join", link), env=faults.environment())
    …
    faults.assert_all_fired()
    """

    def __init__(self, fired_path: Path) -> None:
        self._fired_path = fired_path
        self.plan: list[Fault] = []

    def add(self, point: str, *, action: str, times: int = 1, skip: int = 0, **labels: Label) -> int:
        """Add a fault and return its place in the plan, by which `fired` and `wait_until_fired` name it."""
        self.plan.append(Fault(point=point, action=action, times=times, skip=skip, labels=labels))
        return len(self.plan) - 1

    def environment(self) -> dict[str, str]:
        """Return what a child's environment needs."""
        return {
            PLAN_VARIABLE: msgspec.json.encode([_flat(fault) for fault in self.plan]).decode(),
            FIRED_VARIABLE: str(self._fired_path),
        }

    def argv(self, *python_arguments: str) -> list[str]:
        """Return the command that runs a Python program (`-m module …` or `script …`) with the plan installed."""
        return [sys.executable, "-m", "potluck.testing.faulty", *python_arguments]

    def fired(self, fault: int | None = None) -> list[FiredFault]:
        """Return the records so far, all or those of one fault, in the order in which they fired."""
        if not self._fired_path.exists():
            return []
        complete, _, _ = self._fired_path.read_bytes().rpartition(b"\n")  # the last line may be on its way
        records = [msgspec.json.decode(line, type=FiredFault) for line in complete.splitlines()]
        return [record for record in records if fault is None or record.fault == fault]

    def wait_until_fired(self, fault: int = 0, deadline_seconds: float = 30.0) -> FiredFault:
        """Wait until the fault has fired, and return its first record."""
        return poll_until_sync(lambda: self.fired(fault), deadline_seconds, self._describe(fault))[0]

    async def until_fired(self, fault: int = 0, deadline_seconds: float = 30.0) -> FiredFault:
        """Wait as `wait_until_fired` does, without blocking the event loop."""
        return (await poll_until(lambda: self.fired(fault), deadline_seconds, self._describe(fault)))[0]

    def assert_all_fired(self) -> None:
        """Fail, naming them, if faults of the plan have not fired: the test would have tested nothing."""
        seen = {record.fault for record in self.fired()}
        missing = [fault for index, fault in enumerate(self.plan) if index not in seen]
        assert not missing, f"faults that never fired: {missing}; fired: {self.fired()}"

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have the plan in this process, for tests of one component."""
        before = faultpoints.install(FaultHook(self.plan, self._fired_path))
        try:
            yield
        finally:
            faultpoints.install(before)

    def _describe(self, fault: int) -> str:
        return f"the fault {self.plan[fault]} to fire"


def install_from_environment(environment: Mapping[str, str] | None = None) -> bool:
    """Install the plan that the environment carries; false, and nothing done, if it carries none."""
    variables = os.environ if environment is None else environment
    if PLAN_VARIABLE not in variables:
        return False
    if FIRED_VARIABLE not in variables:
        raise errors.ConfigurationError(f"{PLAN_VARIABLE} is set without {FIRED_VARIABLE}, the file for the records")
    plan = [_from_flat(entry) for entry in msgspec.json.decode(variables[PLAN_VARIABLE], type=list[dict[str, Any]])]
    faultpoints.install(FaultHook(plan, Path(variables[FIRED_VARIABLE])))
    return True


def _flat(fault: Fault) -> dict[str, object]:
    """Write a fault as one object, labels beside the rest, which is how a person would write it by hand."""
    return {"point": fault.point, "action": fault.action, "times": fault.times, "skip": fault.skip, **fault.labels}


def _from_flat(entry: dict[str, Any]) -> Fault:
    known = {name: value for name, value in entry.items() if name in RESERVED_KEYS}
    labels = {name: value for name, value in entry.items() if name not in RESERVED_KEYS}
    return msgspec.convert({**known, "labels": labels}, type=Fault)
