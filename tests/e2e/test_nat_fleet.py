"""A laptop behind a NAT that lets only WebSocket out is a machine of a fleet like any other."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleetkitchen import end_jobs

from potluck.hub.joinlink import JoinLink
from potluck.testing.natlab import NatLab
from potluck.testing.polling import poll_until_sync

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("needs_lab"), pytest.mark.timeout(300)]

FLEET = (sys.executable, "-m", "potluck.cli", "fleet")
PATIENCE_SECONDS = 100.0
PROGRAM = """
import potluck.fleet
job = potluck.fleet.current()
print("hello from behind a NAT", flush=True)
open("result", "w").write("42")
while not job.stopping.wait(0.2):
    job.queue("experience").put({"reward": 1.5})
job.close()
"""


LARGE = """
import hashlib
import numpy as np
import potluck.fleet
job = potluck.fleet.current()
queue = job.queue("experience")
for size in (100_000, 1_000_000):  # whole, and in parts: 8 MB
    sent = np.random.default_rng(size).random(size)
    queue.put(sent)
    [item] = queue.take(1, wait_seconds=100)
    assert (item.value == sent).all() and item.tries == 1, item
    item.done()
many = [np.random.default_rng(number).random(100_000) for number in range(8)]
for each in many:
    queue.send(each)
queue.flush(200)
came = 0
while came < len(many):
    items = queue.take(8, wait_seconds=100)
    assert all(item.tries == 1 for item in items), items
    came += len(items)
    for item in items:
        item.done()
print("all came, once", flush=True)
job.close()
"""


@pytest.fixture(autouse=True)
def _no_jobs_left(tmp_path: Path) -> Iterator[None]:
    yield
    end_jobs(tmp_path, "laptop")


def test_a_laptop_behind_a_nat_with_websocket_alone(lab: NatLab, tmp_path: Path) -> None:
    place = ("--run", "lab", "--folder", tmp_path / "hub")
    hub, laptop = lab.public("hub"), lab.behind_nat("laptop", kind="symmetric")
    host = hub.popen([*FLEET, "host", *place, "--announce", hub.address, "--no-dashboard", "--json"], name="host")
    ready = json.loads(host.wait_for_line('"event":"ready"', PATIENCE_SECONDS).string)
    websocket_port = JoinLink.parse(ready["link"]).websocket_port
    assert websocket_port is not None
    lab.only_websocket(laptop, websocket_port)
    folder = tmp_path / "laptop"
    agent = laptop.popen(
        [*FLEET, "agent", ready["link"], "--name", "laptop", "--allow", "process", "--folder", folder, "--json"],
        name="agent",
    )
    agent.wait_for_line('"event":"connected"', PATIENCE_SECONDS)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "fleet.toml").write_text(
        "[queues.experience]\n[jobs.walker]\ncommand = 'python program.py'\nmachine = 'laptop'\n"
        "files = ['program.py']\nqueues = ['experience=put']\n"
    )

    def command(*words: str | Path) -> str:
        process = hub.popen([sys.executable, "-m", "potluck.cli", *words, *place], name=str(words[0]))
        assert process.wait(PATIENCE_SECONDS) == 0, process.output()
        return process.output()

    command("fleet", "up", tmp_path / "fleet.toml")
    result = folder / "jobs" / "walker" / "work" / "result"
    poll_until_sync(result.exists, PATIENCE_SECONDS, lambda: f"the job's first step: {agent.output()}")
    assert "hello from behind a NAT" in command("fleet", "logs", "walker")
    command("fleet", "cp", "walker:result", tmp_path / "copied")
    assert (tmp_path / "copied" / "result").read_text() == "42"
    assert json.loads(command("queue", "take", "experience", "--wait", "30", "--json"))["value"] == {"reward": 1.5}
    agent.interrupt()
    assert agent.wait(PATIENCE_SECONDS) == 0
    assert "WARNING" not in agent.output(), agent.output()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_large_items_over_two_megabits_a_second(lab: NatLab, tmp_path: Path) -> None:
    place = ("--run", "lab", "--folder", tmp_path / "hub")
    hub, laptop = lab.public("hub"), lab.behind_nat("laptop")
    host = hub.popen([*FLEET, "host", *place, "--announce", hub.address, "--no-dashboard", "--json"], name="host")
    link = json.loads(host.wait_for_line('"event":"ready"', PATIENCE_SECONDS).string)["link"]
    laptop.shape(rate_mbit=2.0, delay_ms=30.0)
    folder = tmp_path / "laptop"
    agent = laptop.popen(
        [*FLEET, "agent", link, "--name", "laptop", "--allow", "process", "--folder", folder, "--json"], name="agent"
    )
    agent.wait_for_line('"event":"connected"', PATIENCE_SECONDS)
    (tmp_path / "program.py").write_text(LARGE)
    (tmp_path / "fleet.toml").write_text(
        "[queues.experience]\n[jobs.large]\ncommand = 'python program.py'\nmachine = 'laptop'\n"
        "files = ['program.py']\nqueues = ['experience']\nrestart = 'never'\n"
    )
    up = hub.popen([*FLEET, "up", tmp_path / "fleet.toml", *place], name="up")
    assert up.wait(PATIENCE_SECONDS) == 0, up.output()
    log = folder / "jobs" / "large" / "log"
    poll_until_sync(
        lambda: log.exists() and ("all came, once" in log.read_text() or "Traceback" in log.read_text()),
        400.0,
        lambda: f"the items: {agent.output()} {log.read_text() if log.exists() else ''}",
    )
    assert "Traceback" not in log.read_text(), log.read_text()
