"""Inside of a job: `potluck.fleet.current()`.

    job = potluck.fleet.current()
    while not job.stopping.is_set():
        job.log({"reward": train_one_episode()})
        job.queue("experience").put(fragment)

All that it needs its agent has put into the environment. Run by hand, without an agent, the same program works too:
what it logs then goes to standard output, and queues need POTLUCK_LINK.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar, overload

from potluck.errors import ConfigurationError
from potluck.fleet.agent.jobfolder import METRICS
from potluck.fleet.sync import Fleet, SyncQueue, SyncTopic, connect
from potluck.peer import environment

T = TypeVar("T")

METRICS_BYTES = 32 * 1024 * 1024
CHECKPOINTS = "checkpoints"


class CurrentJob:
    """The job that this process is. Made by `current`."""

    def __init__(self) -> None:
        self.name = environment.job_name()
        self.folder = environment.job_folder()
        """Potluck's own folder of the job; None outside of one."""

        self.stopping = threading.Event()
        """Set when the job is told to end; it has `stop_seconds` from then on."""

        self.stop_seconds = environment.stop_seconds()
        self._told_at = 0.0
        self._before: Any = None
        self._fleet: Fleet | None = None
        self._lock = threading.Lock()
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._told_to_end)

    @property
    def seconds_left(self) -> float:
        """How long the job may still run; infinity before it is told to end."""
        if not self.stopping.is_set():
            return math.inf
        return max(self._told_at + self.stop_seconds - time.monotonic(), 0.0)

    @overload
    def queue(self, name: str) -> SyncQueue[Any]: ...

    @overload
    def queue(self, name: str, kind: type[T]) -> SyncQueue[T]: ...

    def queue(self, name: str, kind: Any = Any) -> SyncQueue[Any]:
        """A queue that fleet.toml names for this job."""
        return self.fleet.queue(name, kind)

    @overload
    def topic(self, name: str) -> SyncTopic[Any]: ...

    @overload
    def topic(self, name: str, kind: type[T]) -> SyncTopic[T]: ...

    def topic(self, name: str, kind: Any = Any) -> SyncTopic[Any]:
        """A topic that fleet.toml names for this job."""
        return self.fleet.topic(name, kind)

    @property
    def fleet(self) -> Fleet:
        """The connection to the fleet's queues; opened at first use."""
        with self._lock:
            if self._fleet is None:
                if not environment.link():
                    raise ConfigurationError(
                        f"the job {self.name or 'that runs here'} has no queues: name them in fleet.toml, as in "
                        'queues = ["experience=put"] (outside of a fleet, set POTLUCK_LINK)'
                    )
                self._fleet = connect(name=self.name)
            return self._fleet

    def log(self, metrics: Mapping[str, float], *, step: int | None = None) -> None:
        """Write down figures, as in {"reward": 12.3}: `potluck fleet ps` and the dashboard show them."""
        line: dict[str, Any] = {"at": time.time()}
        if step is not None:
            line["step"] = int(step)
        for name, value in metrics.items():
            line[str(name)] = float(value)
        text = json.dumps(line)
        if self.folder is None:
            print(text, flush=True)  # noqa: T201 - by hand, this is where one looks
            return
        path = self.folder / METRICS
        with self._lock:
            if path.exists() and path.stat().st_size > METRICS_BYTES:
                path.replace(path.with_suffix(".1.jsonl"))
            with path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    def checkpoint(self, path: str | Path) -> Path:
        """Keep a copy of a file where `potluck fleet cp JOB:checkpoints` finds it; a reader never sees half of it."""
        source = Path(path)
        folder = Path(CHECKPOINTS)
        folder.mkdir(exist_ok=True)
        draft, target = folder / f".{source.name}", folder / source.name
        if source.resolve() == target.resolve():
            return target
        try:
            shutil.copyfile(source, draft)
            draft.replace(target)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise ConfigurationError(f"the checkpoint {source} cannot be kept: {error.strerror}") from error
        return target

    def close(self) -> None:
        """Leave the queues. Idempotent."""
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            fleet.close()
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _told_to_end(self, _number: int, _frame: FrameType | None) -> None:
        if self.stopping.is_set():  # the second time it is meant
            sys.exit(143)
        self._told_at = time.monotonic()
        self.stopping.set()


_current: CurrentJob | None = None


def current() -> CurrentJob:
    """The job that this process is; the same object each time."""
    global _current
    if _current is None:
        _current = CurrentJob()
    return _current
