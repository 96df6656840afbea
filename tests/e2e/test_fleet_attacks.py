"""A fleet under attack, by the real commands: twins, a wrong clock, frozen processes, jobs that will not end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from commandline import PATIENCE_SECONDS, Terminal, until_event
from fleetkitchen import Kitchen, end_jobs, job

from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import Children

pytestmark = pytest.mark.timeout(300)

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
children = []
for number in range(4):
    child = os.fork()
    if not child:
        if number % 2:
            os.setsid()
        if number > 1:
            os.closerange(3, 100)  # not even the lock is left
        time.sleep(1000)
    children.append(child)
print("children", *children, flush=True)
time.sleep(1000)
"""
WRONG_CLOCK = """
import runpy, time
true = time.time
time.time = lambda: true() - 7200
runpy.run_module("potluck.cli", run_name="__main__")
"""


@pytest.fixture
def kitchen(terminal: Terminal, children: Children) -> Iterator[Kitchen]:
    try:
        yield Kitchen(terminal)
    finally:
        children.close()
        end_jobs(terminal.folder / "machines")


def freeze(pids: list[int], seconds: float) -> None:
    """Processes that get no time for a while, as on a laptop whose lid is closed."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def test_a_job_that_forks_and_ignores_its_notice_is_ended_whole(kitchen: Kitchen) -> None:
    anna = kitchen.agent("anna")
    until_event(anna, "connected")
    (kitchen.code / "stubborn.py").write_text(STUBBORN)
    kitchen.up(
        "[jobs.stubborn]\ncommand = 'python stubborn.py'\nmachine = 'anna'\nfiles = ['stubborn.py']\nstop_seconds = 1\n"
    )
    kitchen.until("stubborn", "running")
    said = poll_until_sync(lambda: kitchen.run("logs", "stubborn").split(), PATIENCE_SECONDS, "its children")
    assert said is not None
    pids = [int(pid) for pid in said[1:]]
    assert len(pids) == 4
    kitchen.run("stop", "stubborn")
    kitchen.until("stubborn", "stopped")
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_twins_are_told_apart_and_a_wrong_clock_changes_nothing(kitchen: Kitchen, terminal: Terminal) -> None:
    late = terminal.start(
        "fleet", "agent", kitchen.link, "--name", "anna", "--allow", "process", "--json",
        "--folder", kitchen.machine_folder("late"), name="late", program=(sys.executable, "-c", WRONG_CLOCK),
    )  # fmt: skip
    peer = until_event(late, "connected")["peer"]
    until_event(kitchen.agent("anna"), "connected")
    again = kitchen.agent("anna")  # the same folder
    assert again.wait(PATIENCE_SECONDS) == 2
    assert "stop it first, or give this one a place of its own with --folder" in again.output()
    (kitchen.code / "fleet.toml").write_text(job("walker", "anna"))
    refused = terminal.refuse("fleet", "up", kitchen.code, *kitchen.place, code=2)
    assert "2 machines are called anna" in refused
    assert "start one agent with another --name" in refused
    kitchen.up(job("walker", peer))
    kitchen.until("walker", "running")
    assert "hello from walker" in kitchen.run("logs", "walker")
    kitchen.run("stop", "walker")
    kitchen.until("walker", "stopped")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_twenty_seconds_of_frozen_processes_cost_no_job_and_no_item(kitchen: Kitchen, terminal: Terminal) -> None:
    anna = kitchen.agent("anna")
    until_event(anna, "connected")
    kitchen.up(
        "[queues.experience]\n[jobs.shown]\ncommand = 'python shown.py'\nmachine = 'anna'\nfiles = ['shown.py']\n"
        "queues = ['experience=put']\n" + job("walker", "anna")
    )
    kitchen.until("shown", "running")
    [walker] = kitchen.until_started("anna", "walker")
    server = [each.pid for each in psutil.Process(kitchen.host.pid).children(recursive=True)]
    for who in ([anna.pid], [walker], [kitchen.host.pid, *server], server):
        freeze(who, 20.0)
        row = kitchen.until("walker", "running")
        assert row["restarts"] == 0
        before = int(row["metrics"]["step"])
        poll_until_sync(lambda at=before: kitchen.jobs()["walker"]["metrics"]["step"] > at, PATIENCE_SECONDS, "steps")
    assert kitchen.jobs()["shown"]["restarts"] == 0
    steps = []
    while len(steps) < 50:  # each put is there, once and in order
        said = terminal.run("queue", "take", "experience", "-n", "50", "--wait", "20", "--json", *kitchen.place)
        steps += [json.loads(line)["value"]["step"] for line in said.splitlines()]
    assert steps == list(range(1, len(steps) + 1))
