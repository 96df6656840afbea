"""A laptop of a fleet is killed: what that costs the others. And how soon a fresh machine has its job's first step.

    scripts/bench fleet_crash [--json] [--seconds 20] [--quota 0.3]

Four laptops of examples/four_laptops train on this machine, each under a CPU quota of its own (a cgroup; needs root):
nobody gains what the dead one leaves. Their steps per second are counted in three windows: two before the kill,
whose ratio is the noise, and one after it. `least_ratio` is that of the laptop that lost most.

First steps: from `potluck fleet agent LINK` in an empty folder to the first thing that the job does. `potluck fleet up`
follows as soon as the agent is connected. The jobs: a program that only logs, one that imports torch and trains, and a
container whose image the machine has (where Podman can be started).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from harness import parser, report, say
from potluck.cli.fleetdemo.processes import RUN, FleetProcesses
from potluck.cli.fleetdemo.record import read_curve
from potluck.cli.fleetdemo.scenario import LEARNER, prepare
from potluck.cli.folders import hosted_run
from potluck.fleet.jobs.control import FleetControl, fleet_control
from potluck.fleet.jobs.fleetfile import parse, read_fleet_file
from potluck.testing.podman import IMAGE, podman_service, why_no_engine

START_SECONDS = 120.0
SETTLE_SECONDS = 15.0
PERIOD_MICROSECONDS = 100_000
LOGS = "import potluck.fleet\njob = potluck.fleet.current()\njob.log({'steps': 1})\njob.stopping.wait()\n"


@contextmanager
def quota(name: str, cores: float) -> Iterator[Path]:
    """A cgroup with so much CPU time; what is in it at the end is ended."""
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup" if unified else "/sys/fs/cgroup/cpu") / f"potluck-bench-{os.getpid()}-{name}"
    try:
        group.mkdir()
        allowed = str(int(cores * PERIOD_MICROSECONDS))
        if unified:
            (group / "cpu.max").write_text(f"{allowed} {PERIOD_MICROSECONDS}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (group / "cpu.cfs_quota_us").write_text(allowed)
    except OSError as error:
        raise SystemExit(
            f"no CPU quota can be set ({error}): run this as root, with the cpu controller mounted"
        ) from error
    try:
        yield group
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


class Fleet:
    """A host, laptops, and what their jobs logged."""

    def __init__(self, folder: Path) -> None:
        self.processes = FleetProcesses(folder)
        self.link = ""

    async def control(self, work: Any) -> Any:
        where, record = hosted_run(RUN, self.processes.hub_folder)
        async with fleet_control(where, record) as control:
            return await work(control)

    def steps(self, laptop: str, job: str) -> float:
        return max((value for _, value in read_curve(self.processes.metrics_of(laptop, job), "steps")), default=0.0)

    async def until_steps(self, jobs: dict[str, str]) -> None:
        await until(lambda: all(self.steps(laptop, job) for job, laptop in jobs.items()))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def open_fleet(folder: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(folder)
    try:
        fleet.link = str((await (await fleet.processes.host()).until("ready"))["link"])
        yield fleet
    finally:
        await fleet.processes.leave()
        fleet.processes.end_what_is_left()


async def measure_crash(folder: Path, seconds: float, cores: float) -> dict[str, Any]:
    """Steps per second of all before, and of three after one is killed."""
    prepare(folder)
    file = read_fleet_file(folder / "code")
    laptops = sorted({plan.machine for plan in file.jobs if plan.machine})
    with contextlib.ExitStack() as groups:
        async with open_fleet(folder) as fleet:
            for laptop in laptops:
                agent = await fleet.processes.agent(laptop, fleet.link)
                group = groups.enter_context(quota(laptop, cores))
                (group / "cgroup.procs").write_text(str(agent.process.pid))
                await agent.until("connected")
            await fleet.control(lambda control: control.up(file))
            statuses = await fleet.control(lambda control: control.jobs())
            jobs = {status.job.name: status.machine for status in statuses if status.job.name != LEARNER}
            with_learner = next(status.machine for status in statuses if status.job.name == LEARNER)
            await fleet.until_steps(jobs)
            say("all train")
            await asyncio.sleep(SETTLE_SECONDS)
            first = await rates(fleet, jobs, seconds)
            before = await rates(fleet, jobs, seconds)
            victim = next(job for job, laptop in jobs.items() if laptop != with_learner)
            await fleet.processes.kill_laptop(jobs[victim])
            others = {job: laptop for job, laptop in jobs.items() if job != victim}
            after = await rates(fleet, others, seconds)
            restarts = {
                status.job.name: status.report.restarts
                for status in await fleet.control(lambda control: control.jobs())
                if status.report is not None
            }
            await fleet.control(lambda control: control.down())
            await asyncio.sleep(2)
    ratios = {job: round(after[job] / before[job], 3) for job in others}
    noise = {job: round(before[job] / first[job], 3) for job in others}
    return {
        "steps_per_second_before": {job: round(rate, 1) for job, rate in before.items()},
        "ratio_after_the_kill": ratios,
        "ratio_without_a_kill": noise,
        "least_ratio": min(ratios.values()),
        "all_ratio": round(sum(after.values()) / sum(before[job] for job in others), 3),
        "restarts_of_the_others": sum(count for job, count in restarts.items() if job in others),
    }


async def rates(fleet: Fleet, jobs: dict[str, str], seconds: float) -> dict[str, float]:
    """Steps per second of each over a window, from one logged figure to another."""
    began = time.time()
    await asyncio.sleep(seconds)
    found = {}
    for job, laptop in jobs.items():
        points = [p for p in read_curve(fleet.processes.metrics_of(laptop, job), "steps") if began <= p[0]]
        (start, low), (end, high) = points[0], points[-1]
        found[job] = (high - low) / (end - start)
    return found


async def measure_first_step(folder: Path, job: dict[str, Any], options: tuple[str, ...] = ()) -> dict[str, float]:
    """From the agent's command to the first thing that its job does."""
    prepare(folder)
    (folder / "code" / "logs.py").write_text(LOGS)
    async with open_fleet(folder) as fleet:
        began = time.monotonic()
        agent = await fleet.processes.agent("fresh", fleet.link, *options)
        await agent.until("connected")
        connected = time.monotonic() - began
        queues = {"experience": {"when_full": "drop"}, "value": {"kind": "topic"}}
        file = parse({"queues": queues, "jobs": {"first": {"machine": "fresh", **job}}}, folder / "code")

        async def up(control: FleetControl) -> None:
            await control.up(file)

        await fleet.control(up)
        work = fleet.processes.metrics_of("fresh", "first").parents[1] / "work" / "first"
        await until(lambda: work.exists() or fleet.steps("fresh", "first") > 0)
        took = time.monotonic() - began
        await fleet.control(lambda control: control.down())
        await asyncio.sleep(1)
    return {"connected_seconds": round(connected, 2), "first_step_seconds": round(took, 2)}


async def measure(folder: Path, options: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    process = {"command": "python logs.py", "files": ["logs.py"]}
    figures["first_step_process"] = await measure_first_step(folder / "a", process)
    say(f"process: {figures['first_step_process']}")
    files = ["laptop.py", "ppo.py", "policies.py", "environments.py"]
    rights = ["experience=put", "value=take"]
    torch = {"command": "python laptop.py", "files": files, "queues": rights}
    figures["first_step_torch"] = await measure_first_step(folder / "b", torch)
    say(f"torch: {figures['first_step_torch']}")
    if reason := why_no_engine():
        say(f"no container: {reason}")
    else:
        with podman_service() as engine:
            job = {"image": IMAGE, "command": ["sh", "-c", "touch first; sleep 1000"], "network": "host"}
            allow = ("--allow", f"images={IMAGE},network=host", "--engine", engine)
            figures["first_step_container"] = await measure_first_step(folder / "c", job, allow)
            say(f"container: {figures['first_step_container']}")
    if options.seconds:
        figures["crash"] = await measure_crash(folder / "crash", options.seconds, options.quota)
    return figures


def main() -> None:
    arguments = parser(__doc__, repeats=None)
    arguments.add_argument("--seconds", type=float, default=20.0, help="of each window; 0: only first steps")
    arguments.add_argument("--quota", type=float, default=0.3, help="cores of each laptop")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        Path(folder).chmod(0o755)  # containers run as somebody else
        report(asyncio.run(measure(Path(folder), options)), as_json=options.json, title="fleet_crash")


if __name__ == "__main__":
    main()
