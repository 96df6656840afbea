"""`potluck fleet` by the real commands: a host, machines with agents, jobs as real processes, and what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from commandline import PATIENCE_SECONDS, Terminal, until_event
from fleetkitchen import Kitchen, end_jobs, files_with, job, kill

from potluck.testing.podman import IMAGE, podman_service, why_no_engine
from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import Children

pytestmark = pytest.mark.timeout(300)  # many commands, each of which takes seconds to start on a busy machine


@pytest.fixture
def kitchen(terminal: Terminal, children: Children) -> Iterator[Kitchen]:
    try:
        yield Kitchen(terminal)
    finally:
        children.close()
        end_jobs(terminal.folder / "machines")


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

    # One laptop is gone, with all that ran on it: nothing of the others' is started anew.
    kill(bert)
    end_jobs(kitchen.terminal.folder / "machines", "bert")
    kitchen.until("hopper", "unknown")
    assert kitchen.until("walker", "running")["restarts"] == 0
    assert kitchen.starts("anna", "walker") == before[0]
    assert psutil.pid_exists(before[0][0])


def test_a_job_is_stopped_and_started_and_its_machine_taken_back(kitchen: Kitchen) -> None:
    bert = kitchen.agent("bert")
    until_event(bert, "connected")
    kitchen.up(job("hopper", "bert"))
    kitchen.until_started("bert", "hopper")
    poll_until_sync(lambda: kitchen.jobs()["hopper"]["metrics"].get("reward", 0) > 0, PATIENCE_SECONDS, "figures")
    top = kitchen.terminal.start("fleet", "top", *kitchen.place, "--every", "0.5", "--json", name="top")
    seen = json.loads(top.wait_for_line(r'^\{"machines".*"hopper".*', PATIENCE_SECONDS).string)
    assert [row["name"] for row in seen["machines"]] == ["bert"]
    assert [(row["job"], row["state"]) for row in seen["jobs"]] == [("hopper", "running")]
    top.send_signal(signal.SIGINT)
    assert top.wait(PATIENCE_SECONDS) == 0
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
    assert json.loads(kitchen.run("logs", "short", "--json")) == {"job": "short", "line": "42"}
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


SYSTEM_FOLDERS = ("/lib", "/lib64", "/usr")
IN_THE_BOX = """
import os
import potluck.fleet
job = potluck.fleet.current()
job.queue("boxes").put({"by": os.getuid()})
job.log({"reward": 1.5})
job.stopping.wait()
job.close()
"""


def folders_of_python() -> list[str]:
    """What a container must see of this machine so that this very Python runs in it."""
    return sorted({sys.base_prefix, *(each for each in sys.path if Path(each).is_dir()), sys.prefix, *SYSTEM_FOLDERS})


def test_an_image_travels_to_a_machine_and_runs_there(kitchen: Kitchen) -> None:
    if reason := why_no_engine():
        pytest.skip(reason)
    kitchen.terminal.folder.chmod(0o755)
    for above in kitchen.terminal.folder.parents:
        if "pytest" in above.name:
            above.chmod(0o755)  # containers run as somebody else
    with podman_service() as here, podman_service(with_image=False) as there:
        folders = folders_of_python()
        allow = f"images={IMAGE},network=host,mounts={','.join(folders)}"
        anna = kitchen.agent("anna", "--engine", there, allow=allow)
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

            [queues.boxes]

            [jobs.python]
            image = "{IMAGE}"
            command = ["{sys.executable}", "-c", {json.dumps(IN_THE_BOX)}]
            machine = "anna"
            network = "host"
            queues = ["boxes=put"]
            environment = {{ PYTHONPATH = "{":".join(each for each in sys.path if Path(each).is_dir())}" }}
            mounts = {json.dumps([f"{each}:{each}" for each in folders])}
            """,
            "--engine", here,
        )  # fmt: skip
        kitchen.until("boxed", "running")
        assert "killed for memory" in kitchen.until("hungry", "failed")["last_words"]
        assert "no plain processes" in kitchen.until("process", "refused")["last_words"]
        took = kitchen.terminal.ask("queue", "take", "boxes", "--wait", "60", *kitchen.place)
        assert took["value"] == {"by": 10001}, "Potluck works in a container, and not as root"
        assert kitchen.until("python", "running")["metrics"] == {"reward": 1.5}
        kill(anna)  # the engine goes on, and so does the job
        anna = kitchen.agent("anna", "--engine", there, allow=allow)
        until_event(anna, "connected")
        assert kitchen.until("boxed", "running")["restarts"] == 0
        assert kitchen.run("logs", "boxed").split() == ["10001", "blue"]  # once: it was not started again
        kitchen.run("cp", "boxed:here", kitchen.terminal.folder / "copied")
        assert (kitchen.terminal.folder / "copied" / "here").exists()
        anna.send_signal(signal.SIGTERM)
        assert anna.wait(PATIENCE_SECONDS) == 0
