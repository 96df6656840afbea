"""A benchmark that is told to end takes its processes and networks with it."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from potluck.testing import namespaces
from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import Children, ManagedProcess

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PREAMBLE = f"""
import asyncio, json, subprocess, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
import harness
harness.parser("a benchmark").parse_args()
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
"""
IN_A_LAB = """
from potluck.testing.natlab import NatLab
with NatLab() as lab:
    hub = lab.public("hub")
    hub.shape(rate_mbit=100)
    print(json.dumps({"pids": [hub.popen(SLEEPER).pid], "prefix": lab._names.prefix}), flush=True)
    time.sleep(600)
"""
IN_A_LOOP = """
async def measure():
    child = await asyncio.create_subprocess_exec(*SLEEPER, stdin=subprocess.PIPE)
    try:
        print(json.dumps({"pids": [child.pid]}), flush=True)
        await asyncio.sleep(600)
    finally:
        print("stopped by the benchmark itself", flush=True)
        child.terminate()
        await child.wait()
asyncio.run(measure())
"""
# Nothing of it would end this child: it is in a session of its own, and nobody waits for it.
FORGOTTEN = """
child = subprocess.Popen(SLEEPER, start_new_session=True)
print(json.dumps({"pids": [child.pid]}), flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ended_by(signum: signal.Signals, program: str, children: Children) -> tuple[ManagedProcess, dict[str, object]]:
    """Start the benchmark as a shell does in the background, where Ctrl-C is ignored; signal it; see that all ends."""
    ignoring = (
        "import signal, os, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", ignoring, sys.executable, "-c", PREAMBLE + program]
    benchmark = children.spawn(command, name="benchmark")
    told = json.loads(benchmark.wait_for_line('"pids"', 60).string)
    assert all(map(is_running, told["pids"]))
    benchmark.send_signal(signum)
    assert benchmark.wait(60) != 0
    poll_until_sync(lambda: not any(map(is_running, told["pids"])), 10, f"{told['pids']} to end with the benchmark")
    return benchmark, told


@pytest.mark.lab
@pytest.mark.usefixtures("needs_lab")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_lab_goes_with_its_benchmark(signum: signal.Signals, children: Children) -> None:
    _, told = ended_by(signum, IN_A_LAB, children)
    assert namespaces.existing(str(told["prefix"])) == []


def test_a_benchmark_in_an_event_loop_stops_what_it_started(children: Children) -> None:
    benchmark, _ = ended_by(signal.SIGTERM, IN_A_LOOP, children)
    assert benchmark.find_line("stopped by the benchmark itself")


def test_even_a_child_that_nobody_stops_ends(children: Children) -> None:
    ended_by(signal.SIGTERM, FORGOTTEN, children)
