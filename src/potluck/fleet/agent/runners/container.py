"""Jobs in containers, by Docker or Podman.

The engine is the parent of what runs, so an agent may come and go. A container's name is made of the machine and the
job: the engine itself refuses a second one. It does not run as root, has no capabilities, and sees of the machine only
its own two folders and what its job mounts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import time
from collections.abc import AsyncGenerator, Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from potluck import tasks
from potluck.errors import ConfigurationError, RetryableError
from potluck.fleet.agent.jobfolder import JobFolder
from potluck.fleet.agent.reconciler import Exit, Instance
from potluck.fleet.agent.runners import engine
from potluck.fleet.agent.runners.runner import Fetch, Launch, Usage
from potluck.fleet.jobs.job import Job

logger = logging.getLogger(__name__)

T = TypeVar("T")

LABEL = "potluck.fleet"
WORK, OWN = "/work", "/potluck"
ROOTS_STAND_IN = 10001  # the user that containers run as where the agent is root
MAX_PIDS = 4096
MAX_FILES = 65536
LOG_LIMIT = "16m"
FOLLOW_EVERY_SECONDS = 0.5
KILLED = 137
NOT_FOUND, CONFLICT = 404, 409


class ContainerRunner:
    """Runs jobs as containers of one machine."""

    def __init__(self, client: Any, folder: Path, machine: str) -> None:
        """`machine`: the agent's peer id, by which it tells its containers from another agent's."""
        self._client = client
        self._folder = folder
        self._machine = machine
        self._used: dict[str, tuple[int, float]] = {}  # nanoseconds of a core by a container, and when
        self._stopping: dict[str, asyncio.Task[None]] = {}
        self.engine = engine.name_of(client)

    @classmethod
    def open(cls, folder: Path, machine: str, url: str = "") -> ContainerRunner:
        """By the engine at `url`, else by one that answers; ConfigurationError when there is none."""
        return cls(engine.connect(url), folder, machine)

    async def prepare(self, job: Job, fetch: Fetch) -> None:
        """Have the image here: as it was sent along, else by its name, else from its registry."""
        name = image_name(job)
        if await self._ask(lambda: self._has_image(name)):
            return
        if job.image_parcel is None:
            await self._ask(lambda: self._pull(job.image))
            return
        archive = await fetch(job.image_parcel, f"the image {job.image}")
        await self._ask(lambda: self._load(archive, name))

    async def instances(self) -> dict[str, Instance]:
        """All containers of this machine."""
        return await self._ask(self._instances)

    async def start(self, launch: Launch) -> None:
        """Make the container and start it."""
        await self._ask(lambda: self._start(launch))

    async def stop(self, name: str, grace_seconds: float) -> None:
        """Notice, and the end after the grace, in the background."""
        if name in self._stopping:
            return
        JobFolder(self._folder, name).mark_stopped(True)
        task = asyncio.create_task(self._ask(lambda: self._stop(name, grace_seconds)), name=f"stop {name}")
        self._stopping[name] = task

        def ended(done: asyncio.Task[None]) -> None:
            del self._stopping[name]
            tasks.log_failures([done])

        task.add_done_callback(ended)

    async def remove(self, name: str) -> None:
        """Remove a container that has ended."""
        await self._ask(lambda: self._remove(name))
        JobFolder(self._folder, name).mark_stopped(False)

    async def read_log(self, name: str, num_lines: int) -> bytes:
        """From the engine."""
        return await self._ask(lambda: self._tail(name, num_lines))

    async def follow_log(self, name: str, num_lines: int) -> AsyncGenerator[bytes, None]:
        """From the engine; when a container is over, from the next one of this job."""
        seen, tail = "", str(num_lines)
        while True:
            container = await self._ask(lambda: self._find(name))
            if container is None or container.id == seen:
                await asyncio.sleep(FOLLOW_EVERY_SECONDS)
                continue
            stream = await self._ask(lambda: container.logs(stream=True, follow=True, tail=tail))  # noqa: B023
            try:
                while (data := await asyncio.to_thread(next, stream, None)) is not None:
                    yield data
            finally:
                stream.close()
                stream._response.close()  # the SDK shuts its socket down, and leaves it open
            seen, tail = container.id, "all"

    async def usage(self, name: str) -> Usage:
        """As the engine counts it."""
        return await self._ask(lambda: self._usage(name))

    async def close(self) -> None:
        """Let go; what runs goes on."""
        if self._stopping:
            await asyncio.wait(list(self._stopping.values()))
        await asyncio.to_thread(self._client.close)

    # In threads: the SDK waits for the engine

    async def _ask(self, work: Callable[[], T]) -> T:
        """Ask the engine in a thread; what it says against it becomes an error of ours."""
        import requests
        from docker.errors import APIError, DockerException

        try:
            return await asyncio.to_thread(work)
        except APIError as error:
            raise ConfigurationError(plain_words(error.explanation or str(error))) from error
        except (DockerException, requests.RequestException, OSError) as error:
            raise RetryableError(f"the container engine does not answer: {error}") from error

    def _container_name(self, job: str) -> str:
        return f"potluck-{self._machine[1:13].lower()}-{job}"

    def _find(self, job: str) -> Any | None:
        from docker.errors import NotFound

        try:
            return self._client.containers.get(self._container_name(job))
        except NotFound:
            return None

    def _instances(self) -> dict[str, Instance]:
        from docker.errors import NotFound

        found: dict[str, Instance] = {}
        wanted = {"label": f"{LABEL}.machine={self._machine}"}
        for listed in self._client.containers.list(all=True, filters=wanted, sparse=True):
            try:
                container = self._client.containers.get(listed.id)
            except NotFound:
                continue
            instance = self._instance(container.attrs)
            if instance is not None:
                found[instance.job] = instance
        return found

    def _instance(self, attrs: dict[str, Any]) -> Instance | None:
        labels, state = attrs["Config"]["Labels"], attrs["State"]
        if state["Status"] in ("created", "initialized", "configured"):
            return None  # it never began: its start was broken off, and the next one makes it anew
        name = labels[f"{LABEL}.job"]
        is_running = state["Status"] in ("running", "paused", "restarting", "stopping", "removing")
        is_stopped = JobFolder(self._folder, name).is_stopped
        code = int(state.get("ExitCode") or 0)
        started_at = _seconds(state.get("StartedAt", ""))
        return Instance(
            job=name,
            digest=labels[f"{LABEL}.digest"],
            state="running" if is_running else "ended",
            restarts=int(labels[f"{LABEL}.restarts"]),
            failures=int(labels[f"{LABEL}.failures"]),
            started_at=started_at,
            # Engines take both times from different processes: a short job may seem to end before it began.
            ended_at=0.0 if is_running else max(started_at, _seconds(state.get("FinishedAt", ""))),
            stopped=is_stopped,
            exit=Exit() if is_running else Exit(code=code, out_of_memory=_is_out_of_memory(attrs, is_stopped)),
        )

    def _start(self, launch: Launch) -> None:
        from docker.errors import APIError, ImageNotFound

        job, folder = launch.job, launch.folder
        left = self._find(job.name)
        if left is not None and left.status in ("created", "initialized", "configured"):
            left.remove(force=True)
        folder.make()
        uid, gid = _user()
        folder.hand_over(uid, gid)
        folder.mark_stopped(False)
        try:
            container = self._client.containers.create(image_name(job), **self._options(launch, uid, gid))
        except ImageNotFound as error:
            raise ConfigurationError(_no_image(job.image)) from error
        except APIError as error:
            if error.status_code == CONFLICT or "already in use" in str(error.explanation):
                raise RetryableError(f"{job.name} runs already") from error
            raise
        try:
            container.start()
        except APIError:
            with contextlib.suppress(APIError):
                container.remove(force=True)
            raise

    def _options(self, launch: Launch, uid: int, gid: int) -> dict[str, Any]:
        from docker.types import DeviceRequest, LogConfig, Mount, Ulimit

        job, folder = launch.job, launch.folder
        mounts = [
            Mount(WORK, str(folder.work), type="bind"),
            Mount(OWN, str(folder.own), type="bind"),
            *(Mount(each.target, each.source, type="bind", read_only=each.read_only) for each in job.mounts),
        ]
        labels = {
            "machine": self._machine,
            "job": job.name,
            "digest": job.digest,
            "restarts": str(launch.restarts),
            "failures": str(launch.failures),
        }
        options: dict[str, Any] = {
            "name": self._container_name(job.name),
            "command": list(job.command) or None,
            "labels": {f"{LABEL}.{key}": value for key, value in labels.items()},
            "environment": {"HOME": WORK, **launch.environment},
            "user": f"{uid}:{gid}",
            "working_dir": WORK,
            "mounts": mounts,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "pids_limit": MAX_PIDS,
            "ulimits": [
                Ulimit(name=name, soft=most, hard=most)
                for name, most in (
                    ("nofile", _at_most(resource.RLIMIT_NOFILE, MAX_FILES)),
                    ("nproc", _at_most(resource.RLIMIT_NPROC, MAX_PIDS)),
                )
            ],
            "log_config": LogConfig(type=LogConfig.types.JSON, config={"max-size": LOG_LIMIT}),
        }
        if job.network:
            options["network_mode"] = job.network
        if "podman" in self.engine and os.getuid() != 0:
            options["userns_mode"] = "keep-id"  # our user outside is our user inside
        if job.limits.memory_bytes:
            options["mem_limit"] = options["memswap_limit"] = job.limits.memory_bytes
        if job.limits.cpus:
            options["nano_cpus"] = int(job.limits.cpus * 1e9)
        if job.limits.gpus:
            options["device_requests"] = [DeviceRequest(count=job.limits.gpus, capabilities=[["gpu"]])]
        return options

    def _stop(self, name: str, grace_seconds: float) -> None:
        container = self._find(name)
        if container is not None:
            container.stop(timeout=round(grace_seconds))

    def _remove(self, name: str) -> None:
        container = self._find(name)
        if container is not None and container.status not in ("running", "paused"):
            container.remove(force=True)

    def _tail(self, name: str, num_lines: int) -> bytes:
        container = self._find(name)
        return bytes(container.logs(tail=num_lines)) if container is not None and num_lines else b""

    def _usage(self, name: str) -> Usage:
        container = self._find(name)
        if container is None or container.status != "running":
            return Usage()
        stats = container.stats(stream=False)
        used = int((stats.get("cpu_stats") or {}).get("cpu_usage", {}).get("total_usage") or 0)
        now = time.monotonic()
        before, at = self._used.get(container.id, (used, now))  # the engines do not agree on what was before
        self._used = {
            **{key: value for key, value in self._used.items() if now - value[1] < 60},
            container.id: (used, now),
        }
        return Usage(
            cpu_percent=max(100.0 * (used - before) / 1e9 / (now - at), 0.0) if now > at else 0.0,
            memory_bytes=int((stats.get("memory_stats") or {}).get("usage") or 0),
        )

    # Images

    def _has_image(self, name: str) -> bool:
        from docker.errors import ImageNotFound

        try:
            self._client.images.get(name)
        except ImageNotFound:
            return False
        return True

    def _pull(self, name: str) -> None:
        from docker.errors import APIError

        try:
            self._client.images.pull(name)
        except APIError as error:
            raise ConfigurationError(f"{_no_image(name)} ({plain_words(error.explanation or str(error))})") from error

    def _load(self, archive: Path, name: str) -> None:
        with archive.open("rb") as file:
            images = self._client.images.load(file)
        if not images:
            raise ConfigurationError("the image that was sent along holds nothing")
        repository, _, tag = name.rpartition(":")
        images[0].tag(repository, tag)


def image_name(job: Job) -> str:
    """By which the engine knows a job's image: one that was sent along by its content, so that no name misleads."""
    return f"localhost/potluck-sent:{job.image_parcel.digest[:40]}" if job.image_parcel is not None else job.image


def plain_words(text: str) -> str:
    """What an engine says against a job, for people."""
    lowered = text.lower()
    if "no space left on device" in lowered:
        return "the machine's disk is full: make room"
    if "address already in use" in lowered or "port is already allocated" in lowered:
        return "a port that it wants is in use on this machine"
    if "executable file" in lowered and ("not found" in lowered or "no such file" in lowered):
        program = re.search(r'exec: \\?"([^"\\]+)', text) or re.search(r"executable file [`']?([^`'\s]+)", text)
        return f"there is no program {program[1] if program else ''} in the image".replace("  ", " ")
    if "permission denied" in lowered and "exec" in lowered:
        return f"its command may not be executed: {text[:300]}"
    return f"the container engine refuses it: {text[:400]}"


def _no_image(name: str) -> str:
    return (
        f"the image {name} is missing on this machine and cannot be had: have it on the machine of `potluck fleet up`, "
        "which sends it along"
    )


def _is_out_of_memory(attrs: dict[str, Any], is_stopped: bool) -> bool:
    """As the engine says. Podman on older kernels does not: there, who is killed at a limit was killed by it."""
    has_limit = bool((attrs.get("HostConfig") or {}).get("Memory"))
    was_killed = attrs["State"].get("ExitCode") == KILLED and not is_stopped
    return bool(attrs["State"].get("OOMKilled")) or (has_limit and was_killed)


def _at_most(kind: int, wanted: int) -> int:
    """A limit that an engine on this machine can set: not above the machine's own."""
    _, hard = resource.getrlimit(kind)
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def _user() -> tuple[int, int]:
    """The user that containers run as: never root."""
    return (os.getuid(), os.getgid()) if os.getuid() else (ROOTS_STAND_IN, ROOTS_STAND_IN)


def _seconds(stamp: str) -> float:
    """An engine's time; 0 where it has not come yet."""
    try:
        return max(datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", stamp)).timestamp(), 0.0)
    except (ValueError, OverflowError):
        return 0.0
