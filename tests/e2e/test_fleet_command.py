"""`potluck fleet` by the real commands: a host, machines with agents, jobs as real processes, and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from commandline import PATIENCE_SECONDS, Terminal, until_event

from potluck.cli.fleet import job_record
from potluck.cli.folders import hosted_run
from potluck.fleet.agent.runners.process import _read
from potluck.fleet.jobs.control import JobStatus, fleet_control
from potluck.testing.podman import IMAGE, podman_service, why_no_engine
from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import Children, ManagedProcess

RUN = "kitchen"
pytestmark = pytest.mark.timeout(300)  # many commands, each of which takes seconds to start on a busy machine

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

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
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
            "fleet", "host", *self.place, "--listen", "127.0.0.1", "--no-wheel", "--json", name="host"
        )

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


@pytest.fixture
def kitchen(terminal: Terminal, children: Children) -> Iterator[Kitchen]:
    kitchen = Kitchen(terminal)
    try:
        yield kitchen
    finally:
        children.close()
        for path in terminal.folder.glob("machines/*/jobs/*/run/running.json"):  # jobs outlive their agents
            known = _read(path) or {}
            for pid in (known.get("shim"), known.get("group")):
                if pid and psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGKILL)


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


def test_jobs_on_two_machines(kitchen: Kitchen) -> None:
    anna, bert = kitchen.agent("anna"), kitchen.agent("bert")
    for machine in (anna, bert):
        until_event(machine, "connected")
    rows = {row["name"]: row for row in kitchen.ask("machines")}
    assert rows["anna"]["report"]["facts"]["cpus"] >= 1
    assert rows["bert"]["is_there"]

    text = (
        "[queues.experience]\nwhen_full = 'drop'\n"
        + job("walker", "anna", more='secrets = ["TOKEN"]')
        + "[jobs.shown]\ncommand = 'python shown.py'\nmachine = 'anna'\nfiles = ['shown.py']\n"
        "queues = ['experience=put']\n" + job("hopper", "bert", seed=2)
    )
    assert kitchen.up(text, "--wait", "100", TOKEN="s3cr3t") == dict.fromkeys(("walker", "hopper", "shown"), "new")
    walker = kitchen.until("walker", "running")
    assert walker["machine"] == "anna"
    assert {row["job"] for row in kitchen.ask("ps")} == {"walker", "hopper", "shown"}
    poll_until_sync(lambda: kitchen.jobs()["walker"]["metrics"].get("reward", 0) > 0, PATIENCE_SECONDS, "figures")
    before = (kitchen.until_started("anna", "walker"), kitchen.until_started("bert", "hopper"))
    assert "hello from walker with 1 and s3cr3t" in kitchen.run("logs", "walker")
    assert "hello from hopper with 2 and no token" in kitchen.run("logs", "hopper")
    for folder in (kitchen.folder, kitchen.machine_folder("anna")):  # sealed: nowhere in the clear, but what it said
        assert [path.name for path in files_with(folder, b"s3cr3t")] in ([], ["log"])
    taken = kitchen.terminal.run("queue", "take", "experience", "--wait", "20", "--json", *kitchen.place)
    assert json.loads(taken)["value"]["step"] >= 1

    # Again: nothing differs, nothing is started anew.
    assert kitchen.up(text, TOKEN="s3cr3t") == dict.fromkeys(("walker", "hopper", "shown"), "same")
    assert kitchen.up(text.replace("SEED = 2", "SEED = 3"), "--dry-run", TOKEN="s3cr3t")["hopper"] == "changed"
    assert (kitchen.starts("anna", "walker"), kitchen.starts("bert", "hopper")) == before

    # One differs: only that one is started anew, with notice.
    changed = text.replace("SEED = 2", "SEED = 3")
    assert kitchen.up(changed, TOKEN="s3cr3t") == {"walker": "same", "shown": "same", "hopper": "changed"}
    kitchen.until_started("bert", "hopper", 2)
    said = kitchen.run("logs", "hopper")
    assert "stopped with notice" in said
    assert "hello from hopper with 3" in said
    assert kitchen.starts("anna", "walker") == before[0]


def test_a_job_is_stopped_and_started_and_its_machine_taken_back(kitchen: Kitchen) -> None:
    bert = kitchen.agent("bert")
    until_event(bert, "connected")
    kitchen.up(job("hopper", "bert"))
    kitchen.until_started("bert", "hopper")
    poll_until_sync(lambda: kitchen.jobs()["hopper"]["metrics"].get("reward", 0) > 0, PATIENCE_SECONDS, "figures")
    copied = kitchen.terminal.folder / "copied"
    kitchen.run("cp", "hopper:checkpoints", copied)
    assert (copied / "checkpoints" / "model.bin").read_text() == "weights"
    kitchen.run("stop", "hopper")
    kitchen.until("hopper", "stopped")
    kitchen.run("restart", "hopper")
    [_, pid] = kitchen.until_started("bert", "hopper", 2)

    bert.send_signal(signal.SIGTERM)  # its owner wants it back
    assert bert.wait(PATIENCE_SECONDS) == 0
    assert not psutil.pid_exists(pid)
    assert kitchen.jobs()["hopper"]["state"] == "unknown"
    bert = kitchen.agent("bert")
    [*_, pid] = kitchen.until_started("bert", "hopper", 3)
    assert kitchen.until("hopper", "running")["restarts"] == 0
    kitchen.run("down")
    poll_until_sync(lambda: not psutil.pid_exists(pid), PATIENCE_SECONDS, "the hopper's end")
    assert kitchen.jobs() == {}


def test_an_agent_and_the_hub_are_killed_and_no_job_is_started_twice_or_lost(kitchen: Kitchen) -> None:
    anna = kitchen.agent("anna")
    until_event(anna, "connected")
    kitchen.up(job("walker", "anna") + job("hopper", "anna", seed=2), "--wait", "100")
    pids = {name: kitchen.until_started("anna", name) for name in ("walker", "hopper")}

    kill(anna)
    assert all(psutil.pid_exists(each[0]) for each in pids.values())
    os.kill(pids["hopper"][0], signal.SIGKILL)  # dies while nobody looks: that, too, is made good

    kill(kitchen.host)  # and its successor begins without a hub
    for process in psutil.process_iter(["cmdline"]):
        if (
            any(str(kitchen.folder) in word for word in process.info["cmdline"] or ())
            and "nats-server" in process.name()
        ):
            process.kill()
    anna = kitchen.agent("anna")
    kitchen.until_started("anna", "hopper", 2)
    assert not [line for line in anna.output().splitlines() if "connected" in line], "the hub was away"
    kitchen.host = kitchen.start_host()
    until_event(kitchen.host, "ready")
    until_event(anna, "connected")
    assert kitchen.until("hopper", "running")["restarts"] == 1
    assert kitchen.until("walker", "running")["restarts"] == 0
    assert kitchen.starts("anna", "walker") == pids["walker"]
    kitchen.run("stop", "walker")  # what its successor did not start, it can end all the same
    kitchen.until("walker", "stopped")
    assert not psutil.pid_exists(pids["walker"][0])
    kitchen.run("down")


def test_what_goes_wrong_is_said_in_plain_words(kitchen: Kitchen) -> None:
    anna = kitchen.agent("anna")
    until_event(anna, "connected")
    kitchen.up(
        """
        [jobs.hungry]
        command = ["python", "-c", "x = []\\nwhile True: x.append(bytearray(10_000_000))"]
        machine = "anna"
        limits = { memory = "200MB" }
        restart = "never"

        [jobs.missing]
        command = "no-such-program"
        needs = {}
        restart = { tries = 2, first_seconds = 0.1 }

        [jobs.boxed]
        image = "box:1"
        machine = "anna"

        [jobs.short]
        command = "python -c 'print(42)'"
        machine = "anna"
        """
    )
    assert (
        "killed for memory: it wanted more than its limit of 200 MB" in kitchen.until("hungry", "failed")["last_words"]
    )
    assert "no program no-such-program" in kitchen.until("missing", "failed", restarts=1)["last_words"]
    assert "does not allow the image box:1" in kitchen.until("boxed", "refused")["last_words"]
    assert "finished" in kitchen.until("short", "finished", restarts=0)["last_words"]
    assert "42" in kitchen.run("logs", "short")
    assert "there is no machine zoe" in kitchen.terminal.refuse(
        "fleet", "up", _file(kitchen, job("a", "zoe")), *kitchen.place, code=2
    )
    assert "secret TOKEN of a is not there" in kitchen.terminal.refuse(
        "fleet", "up", _file(kitchen, job("a", "anna", more='secrets = ["TOKEN"]')), *kitchen.place, code=2
    )
    assert "there is no job" in kitchen.terminal.refuse("fleet", "logs", "nobody", *kitchen.place, code=2)
    assert "what may jobs do" in kitchen.terminal.refuse("fleet", "agent", kitchen.link, code=2)
    kitchen.run("down")


def _file(kitchen: Kitchen, text: str) -> Path:
    (kitchen.code / "fleet.toml").write_text(text)
    return kitchen.code


def test_an_image_travels_to_a_machine_and_runs_there(kitchen: Kitchen) -> None:
    if reason := why_no_engine():
        pytest.skip(reason)
    kitchen.terminal.folder.chmod(0o755)
    for above in kitchen.terminal.folder.parents:
        if "pytest" in above.name:
            above.chmod(0o755)  # containers run as somebody else
    with podman_service() as here, podman_service(with_image=False) as there:
        anna = kitchen.agent("anna", "--engine", there, allow=f"images={IMAGE},network=host")
        until_event(anna, "connected")
        [row] = kitchen.ask("machines")
        assert row["report"]["facts"]["engines"][0].startswith("podman")
        kitchen.up(
            f"""
            [jobs.boxed]
            image = "{IMAGE}"
            command = ["sh", "-c", "id -u; echo $COLOUR; touch here; while true; do sleep 0.2; done"]
            machine = "anna"
            network = "host"
            environment = {{ COLOUR = "blue" }}
            stop_seconds = 1

            [jobs.hungry]
            image = "{IMAGE}"
            command = ["tail", "/dev/zero"]
            machine = "anna"
            network = "host"
            limits = {{ memory = "64MB" }}
            restart = "never"

            [jobs.process]
            command = "true"
            machine = "anna"
            """,
            "--engine", here,
        )  # fmt: skip
        kitchen.until("boxed", "running")
        assert "killed for memory" in kitchen.until("hungry", "failed")["last_words"]
        assert "no plain processes" in kitchen.until("process", "refused")["last_words"]
        kill(anna)  # the engine goes on, and so does the job
        anna = kitchen.agent("anna", "--engine", there, allow=f"images={IMAGE},network=host")
        until_event(anna, "connected")
        assert kitchen.until("boxed", "running")["restarts"] == 0
        assert kitchen.run("logs", "boxed").split() == ["10001", "blue"]  # once: it was not started again
        kitchen.run("cp", "boxed:here", kitchen.terminal.folder / "copied")
        assert (kitchen.terminal.folder / "copied" / "here").exists()
        anna.send_signal(signal.SIGTERM)
        assert anna.wait(PATIENCE_SECONDS) == 0
