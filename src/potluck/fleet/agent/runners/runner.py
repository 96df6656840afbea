"""The interface between an agent and what runs its jobs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from potluck.fleet.agent.jobfolder import JobFolder
from potluck.fleet.agent.reconciler import Instance
from potluck.fleet.jobs.job import Job, Parcel


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of a job."""

    job: Job
    folder: JobFolder
    environment: dict[str, str] = field(repr=False)
    """All of it, the secrets included."""

    restarts: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an instance uses now."""

    cpu_percent: float = 0.0
    """Of one core."""

    memory_bytes: int = 0


Fetch = Callable[[Parcel, str], Awaitable[Path]]
"""Brings a parcel here; the text says what it is, for reports."""


class Runner(Protocol):
    """Starts and ends instances of jobs. What it started goes on without it; a new one finds it again."""

    @property
    def engine(self) -> str:
        """The container engine that it uses; empty where it needs none."""
        ...

    async def prepare(self, job: Job, fetch: Fetch) -> None:
        """Have all here that the runner itself needs before it can start the job: its image."""
        ...

    async def instances(self) -> dict[str, Instance]:
        """All that there is, by the job's name: what runs, and what has ended and was not removed."""
        ...

    async def start(self, launch: Launch) -> None:
        """Start a job whose instance before was removed. Never starts a second one: that fails, and changes nothing.

        ConfigurationError says in plain language why it cannot start here; RetryableError that it may later.
        """
        ...

    async def stop(self, name: str, grace_seconds: float) -> None:
        """Tell an instance to end, and see to it that it has after the grace; returns at once. Idempotent."""
        ...

    async def remove(self, name: str) -> None:
        """Forget an instance that has ended. Idempotent."""
        ...

    async def read_log(self, name: str, num_lines: int) -> bytes:
        """The last so many lines that the job wrote."""
        ...

    def follow_log(self, name: str, num_lines: int) -> AsyncGenerator[bytes, None]:
        """The last so many lines, then all that it writes, over restarts too; never ends by itself."""
        ...

    async def usage(self, name: str) -> Usage:
        """What it uses now; nothing where it does not run."""
        ...

    async def close(self) -> None:
        """Let go. What runs goes on."""
        ...
