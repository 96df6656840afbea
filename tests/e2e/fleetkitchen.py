"""A fleet by the real commands: a host, agents, and jobs that are real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
from commandline import PATIENCE_SECONDS, Terminal, until_event

from potluck.cli.fleet import job_record
from potluck.cli.folders import hosted_run
from potluck.fleet.jobs.control import JobStatus, fleet_control
from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess

RUN = "kitchen"

POLICY = """
import os
import potluck.fleet

job = potluck.fleet.current()
with open("starts", "a") as file:
    file.write(f"{os.getpid()}\\n")
print(f"hello from {job.name} with {os.environ['SEED']} and {os.environ.get('TOKEN', 'no token')}", flush=True)
step = 0
while not job.stopping.wait(0.1):
    step += 1
    job.log({"reward": step / 2, "step": step})
    with open("model.bin", "w") as file:
        file.write("weights")
    job.checkpoint("model.bin")
print(f"stopped with notice, {job.seconds_left:.0f} s left", flush=True)
job.close()
"""


def program_of_the_page() -> str:
    """The job that docs/fleet.md shows."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "fleet.md").read_text()
    [program] = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "fleet.current()" in each]
    return str(program)


class Kitchen:
    """A fleet with its host."""

    def __init__(self, terminal: Terminal, *options: str, **environment: str) -> None:
        self.terminal = terminal
        self._options, self._environment = options, environment
        self.folder = terminal.folder / "hub"
        self.place = ("--run", RUN, "--folder", self.folder)
        self.host = self.start_host()
        self.link = until_event(self.host, "ready")["link"]
        self.code = terminal.folder / "code"
        self.code.mkdir()
        (self.code / "policy.py").write_text(POLICY)
        (self.code / "shown.py").write_text(program_of_the_page())

    def start_host(self) -> ManagedProcess:
        return self.terminal.start(
            "fleet", "host", *self.place, "--listen", "127.0.0.1", "--no-wheel", "--json", *self._options,
            name="host", **self._environment,
        )  # fmt: skip

    def agent(self, name: str, *options: str | Path, allow: str = "process") -> ManagedProcess:
        return self.terminal.start(
            "fleet", "agent", self.link, "--name", name, "--allow", allow, "--json",
            "--folder", self.machine_folder(name), *options, name=name,
        )  # fmt: skip

    def machine_folder(self, name: str) -> Path:
        return self.terminal.folder / "machines" / name

    def work(self, machine: str, job: str) -> Path:
        return self.machine_folder(machine) / "jobs" / job / "work"

    def starts(self, machine: str, job: str) -> list[int]:
        path = self.work(machine, job) / "starts"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def until_started(self, machine: str, job: str, number: int = 1) -> list[int]:
        """The pids of all its starts, once there are so many."""
        poll_until_sync(
            lambda: len(self.starts(machine, job)) >= number, PATIENCE_SECONDS, f"start {number} of {job} on {machine}"
        )
        assert len(self.starts(machine, job)) == number
        return self.starts(machine, job)

    def run(self, *arguments: str | Path, **options: Any) -> str:
        return self.terminal.run("fleet", *arguments, *self.place, **options)

    def ask(self, *arguments: str | Path) -> Any:
        return json.loads(self.terminal.run("fleet", *arguments, *self.place, "--json"))

    def up(self, text: str, *options: str, **environment: str) -> dict[str, str]:
        (self.code / "fleet.toml").write_text(text)
        said = self.terminal.run("fleet", "up", self.code, *self.place, "--json", *options, **environment)
        return dict(json.loads(said.splitlines()[-1])["changes"])

    def jobs(self) -> dict[str, dict[str, Any]]:
        """What `potluck fleet ps --json` says, without the seconds that a command takes to start."""

        async def look() -> list[JobStatus]:
            where, record = hosted_run(RUN, self.folder)
            async with fleet_control(where, record) as control:
                return await control.jobs()

        return {status.job.name: job_record(status) for status in asyncio.run(look())}

    def until(self, job: str, *states: str, **wanted: Any) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            row = self.jobs().get(job)
            fits = row is not None and row["state"] in states and all(row[k] == v for k, v in wanted.items())
            return row if fits else None

        found_row = poll_until_sync(found, PATIENCE_SECONDS, lambda: f"{job} to be {states} {wanted}: {self.jobs()}")
        assert found_row is not None
        return found_row


def job(name: str, machine: str, *, more: str = "", seed: int = 1) -> str:
    return f"""
[jobs.{name}]
command = "python policy.py"
machine = "{machine}"
files = ["policy.py"]
environment = {{ SEED = {seed} }}
{more}
"""


def files_with(folder: Path, text: bytes) -> list[Path]:
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # the hub's files come and go
            if path.is_file() and text in path.read_bytes():
                found.append(path)
    return found


def kill(process: ManagedProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_SECONDS)


def end_jobs(machines: Path, machine: str = "*") -> None:
    """Jobs outlive their agents, and should not outlive a test."""
    for path in machines.glob(f"{machine}/jobs/*/run/running.json"):
        known = json.loads(path.read_text())
        for pid in (known["shim"], known["group"]):
            if pid and psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
