"""From what shall run and what runs to what has to be done (pure).

A machine's agent calls `reconcile` again and again. All that it decides by stands in its two arguments and the time:
an instance knows which job it is of (by digest), how often it was started and how it ended. So an agent that was
killed takes up where it was, and no order can be carried out twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from potluck.fleet.jobs.job import Job
from potluck.messages import Message


class Exit(Message, frozen=True, kw_only=True):
    """How an instance ended."""

    code: int | None = None  # None: by a signal, or nobody knows
    signal: int = 0
    out_of_memory: bool = False
    reason: str = ""  # why it could not even start, in plain language

    @property
    def is_success(self) -> bool:
        """Whether it ended by itself, with all done."""
        return self.code == 0 and not self.reason and not self.out_of_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """What a runner has of a job: something that runs, or the remains of what did."""

    job: str
    digest: str
    state: Literal["running", "ended"]
    restarts: int = 0
    """How often it was started again by itself."""

    failures: int = 0
    """How many failures in a row came before it."""

    started_at: float = 0.0
    ended_at: float = 0.0
    stopped: bool = False
    """It was told to end."""

    exit: Exit = field(default_factory=Exit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a job; whatever was left of it before is removed first."""

    job: Job
    restarts: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Tell an instance to end, with notice."""

    name: str
    grace_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Forget an instance that has ended."""

    name: str


Action = Start | Stop | Remove
DEFAULT_GRACE_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do about one job now, and when to look again at the latest."""

    actions: tuple[Action, ...] = ()
    look_at: float | None = None


def reconcile(desired: Mapping[str, Job], instances: Mapping[str, Instance], now: float) -> Decision:
    """What has to be done so that exactly the desired jobs run."""
    actions: list[Action] = []
    look_at: list[float] = []
    for name in sorted({*desired, *instances}):
        job, instance = desired.get(name), instances.get(name)
        if job is None:
            assert instance is not None
            actions.append(_end(instance, DEFAULT_GRACE_SECONDS))
        elif instance is None:
            if job.state == "running":
                actions.append(Start(job=job))
        elif instance.state == "running":
            if job.state == "stopped" or instance.digest != job.digest:
                actions.append(Stop(name=name, grace_seconds=job.stop_seconds))
        elif job.state == "running":
            start, at = _after_the_end(job, instance, now)
            actions += [start] if start is not None else []
            look_at += [at] if at is not None else []
    return Decision(actions=tuple(actions), look_at=min(look_at, default=None))


def _end(instance: Instance, grace_seconds: float) -> Action:
    if instance.state == "running":
        return Stop(name=instance.job, grace_seconds=grace_seconds)
    return Remove(name=instance.job)


def _after_the_end(job: Job, instance: Instance, now: float) -> tuple[Start | None, float | None]:
    """The next start of a job that has ended, or when it is due; neither where it stays ended."""
    if instance.digest != job.digest or instance.stopped:
        return Start(job=job), None
    if is_over(job, instance):
        return None, None
    failures = failures_after(job, instance)
    ended_at = min(instance.ended_at, now)  # a clock that was put back makes nobody wait for hours
    due_at = ended_at + job.restart.pause_seconds(max(failures, 1))
    if now < due_at:
        return None, due_at
    return Start(job=job, restarts=instance.restarts + 1, failures=failures), None


def is_over(job: Job, instance: Instance) -> bool:
    """Whether an ended job stays ended: it is done, or is given up."""
    if instance.state != "ended" or instance.stopped:
        return False
    restart = job.restart
    if restart.when == "never" or (restart.when == "on-failure" and instance.exit.is_success):
        return True
    return bool(restart.tries) and failures_after(job, instance) >= restart.tries


def failures_after(job: Job, instance: Instance) -> int:
    """Failures in a row, the end of this instance counted."""
    if instance.exit.is_success:
        return 0
    ran_seconds = instance.ended_at - instance.started_at
    return 1 if ran_seconds >= job.restart.healthy_seconds else instance.failures + 1
