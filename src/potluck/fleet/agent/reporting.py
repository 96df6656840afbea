"""What an agent tells of its machine: what it has, how busy it is, how each job is and why."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import potluck
from potluck.errors import PotluckError
from potluck.fleet.agent.jobfolder import METRICS, JobFolder
from potluck.fleet.agent.reconciler import Instance, failures_after, is_over
from potluck.fleet.agent.runners.explaining import last_words
from potluck.fleet.agent.runners.runner import Runner, Usage
from potluck.fleet.jobs.job import Allowance, Job
from potluck.fleet.jobs.machine import JobReport, JobState, MachineReport, Observer

TAIL_LINES = 20
METRICS_TAIL_BYTES = 64 * 1024
MAX_METRICS = 32
MAX_WORDS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How an agent's jobs stand at one moment."""

    revision: int
    allowed: Mapping[str, Job]
    refused: Mapping[str, str]
    """Why the owner does not let these run."""

    instances: Mapping[str, Instance]
    preparing: Mapping[str, str]
    """What these wait for before they can start."""

    clock_behind_seconds: float = 0.0
    """How far this machine's clock is behind the hub's."""


class Reporter:
    """Makes reports of one machine."""

    def __init__(self, name: str, allow: Allowance, folder: Path, runners: Mapping[str, Runner]) -> None:
        """`folder` has the jobs' folders."""
        self._name = name
        self._allow = allow
        self._folder = folder
        self._runners = runners
        self._observer = Observer(folder, tuple(each.engine for each in runners.values() if each.engine))

    async def report(self, standing: Standing) -> MachineReport:
        """This machine now."""
        jobs = [await self._job_report(job, standing) for job in standing.allowed.values()]
        jobs += [
            JobReport(name=name, state="refused", last_words=why[:MAX_WORDS]) for name, why in standing.refused.items()
        ]
        return MachineReport(
            name=self._name,
            allow=self._allow.words()[:MAX_WORDS],
            facts=await asyncio.to_thread(self._observer.look),
            revision=standing.revision,
            jobs=tuple(sorted(jobs, key=lambda each: each.name)),
            version=potluck.__version__,
        )

    async def _job_report(self, job: Job, standing: Standing) -> JobReport:
        instance = standing.instances.get(job.name)
        try:
            state, words, usage = await self._state_of(job, instance, standing.preparing.get(job.name, ""))
        except (PotluckError, OSError) as error:  # the engine is away; the report has other jobs too
            state, words, usage = "unknown", str(error), Usage()
        since = 0.0
        if instance is not None:
            since = instance.started_at if instance.state == "running" else instance.ended_at
            since += standing.clock_behind_seconds
        return JobReport(
            name=job.name,
            state=state,
            restarts=instance.restarts if instance is not None else 0,
            since=since,
            last_words=words[:MAX_WORDS],
            cpu_percent=usage.cpu_percent,
            memory_bytes=usage.memory_bytes,
            metrics=await asyncio.to_thread(newest_metrics, JobFolder(self._folder, job.name).own / METRICS),
        )

    async def _state_of(self, job: Job, instance: Instance | None, preparing: str) -> tuple[JobState, str, Usage]:
        if preparing:
            return "preparing", preparing, Usage()
        if instance is None:
            return ("stopped" if job.state == "stopped" else "preparing"), "", Usage()
        runner = self._runners[job.kind]
        if instance.state == "running":
            return "running", "", await runner.usage(job.name)
        tail = await runner.read_log(job.name, TAIL_LINES)
        words = last_words(job, instance, tail.decode(errors="replace"))
        if job.state == "stopped":
            return "stopped", words, Usage()
        if not is_over(job, instance):
            failures = failures_after(job, instance)
            pause = job.restart.pause_seconds(max(failures, 1))
            return "waiting", f"{words}; it starts again {pause:g} s after that", Usage()
        return ("finished" if instance.exit.is_success else "failed"), words, Usage()


def newest_metrics(path: Path) -> dict[str, float]:
    """The newest value of each figure that a job has logged. What cannot be read is left out: the job writes it."""
    try:
        # The job may have put anything in its place: a link, or a pipe that nobody writes to.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return {}
            file.seek(max(file.seek(0, os.SEEK_END) - METRICS_TAIL_BYTES, 0))
            lines = file.read(METRICS_TAIL_BYTES).splitlines()
    except OSError:
        return {}
    found: dict[str, float] = {}
    for line in lines:
        try:
            values = json.loads(line)
            found |= {str(k)[:80]: float(v) for k, v in values.items() if k != "at"}
        except (ValueError, TypeError, AttributeError):
            continue
    return dict(sorted(found.items())[:MAX_METRICS])
