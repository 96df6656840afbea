"""The processes of a fleet's demo: a host, four agents, and ways to kill a laptop, a job or the hub."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from potluck.cli.demo.processes import Actor, Processes
from potluck.fleet.agent.jobfolder import METRICS, JobFolder

RUN = "fleet-demo"


class FleetProcesses(Processes):
    """All processes of one demo. Each laptop is an agent with a folder of its own."""

    @property
    def hub_folder(self) -> Path:
        """Where the host lives."""
        return self.folder / "hub"

    async def host(self) -> Actor:
        """The host; started again, it goes on where it was."""
        place = ("--run", RUN, "--folder", str(self.hub_folder), "--listen", "127.0.0.1")
        return await self._start("host", "fleet", "host", *place, "--no-wheel", "--no-dashboard")

    async def agent(self, laptop: str, link: str, *options: str) -> Actor:
        """A laptop's agent; started again, it takes up what the laptop ran."""
        place = ("--name", laptop, "--folder", str(self._machine(laptop)))
        return await self._start(laptop, "fleet", "agent", link, *place, "--allow", "process", *options)

    def metrics_of(self, laptop: str, job: str) -> Path:
        """The file that a job's figures are in."""
        return JobFolder(self._machine(laptop) / "jobs", job).own / METRICS

    async def kill_laptop(self, laptop: str) -> None:
        """As if its battery fell out: the agent and all jobs, at once."""
        self._kill_jobs(laptop)
        await self.kill(laptop)
        self._kill_jobs(laptop)  # what the agent may have started meanwhile

    def kill_job(self, laptop: str, job: str) -> None:
        """One job alone; its agent stays."""
        for _, group in self._running(laptop, job):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    async def kill_hub(self) -> None:
        """The host with its server, at once."""
        host = psutil.Process(self.actors["host"].process.pid)
        for process in host.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await self.kill("host")

    def left_behind(self) -> list[int]:
        """Jobs that still run, by the pids of their parents."""
        return [shim for shim, _ in self._running("*", "*") if psutil.pid_exists(shim)]

    def end_what_is_left(self) -> None:
        """For a play that was broken off: no job outlives it."""
        self._kill_jobs("*")

    def _machine(self, laptop: str) -> Path:
        return self.folder / "laptops" / laptop

    def _kill_jobs(self, laptop: str) -> None:
        for shim, group in self._running(laptop, "*"):
            for send, pid in ((os.kill, shim), (os.killpg, group)):
                with suppress(ProcessLookupError):
                    send(pid, signal.SIGKILL)

    def _running(self, laptop: str, job: str) -> Iterator[tuple[int, int]]:
        """The parent and the process group of each job that was started and has not ended."""
        for path in self.folder.glob(f"laptops/{laptop}/jobs/{job}/run/running.json"):
            with suppress(OSError, ValueError):  # it ends at this moment
                known = json.loads(path.read_text())
                if known["shim"] and known["group"] and psutil.pid_exists(known["shim"]):
                    yield int(known["shim"]), int(known["group"])
