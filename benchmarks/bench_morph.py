"""A pipeline that loses machines: seconds until the new shape computes, and the share of useful work with a preemption.

Four servers in processes, four stages; three servers make three stages. The feeder holds spare copies. Beside it, the
same model by torchrun with a checkpoint every ten steps, which restarts all ranks when one is killed. A pause is the
longest time between two micro-batches of a feeder; what is lost is a pause less the longest of the three steps before.
With --sleeping the layers sleep instead of computing: then the figures do not depend on what else the machine does.

    scripts/bench morph --json
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import uvloop

from bench_pipeline import Bench, bench
from harness import ROOT, parser, report, say
from pipelinetoy import TOYS
from potluck import faultpoints
from potluck.pipeline.layout import Layout
from potluck.testing.polling import poll_until

STEPS_BEFORE = 3
PATIENCE_SECONDS = 300.0


class Watch:
    """When micro-batches went in, steps were committed and shapes changed."""

    def __init__(self) -> None:
        self.fed: list[float] = []
        self.committed: list[float] = []
        self.morphed: list[float] = []
        self.gone: list[float] = []
        self.lost_at = 0.0

    def reached(self, name: str, _labels: Mapping[str, object]) -> None:
        times = {
            "pipeline.fed": self.fed,
            "pipeline.conductor.committed": self.committed,
            "pipeline.conductor.morphed": self.morphed,
        }
        if name in times:
            times[name].append(time.monotonic())

    def told(self, event: str, _about: Mapping[str, object]) -> None:
        if event == "gone":
            self.gone.append(time.monotonic())

    def first_after(self, times: list[float], moment: float) -> float | None:
        return next((each for each in times if each > moment), None)

    def lost_since(self, moment: float) -> float:
        """The longest pause since then, less the longest of three steps before: a step's end is a pause, too."""
        before = [each for each in self.committed if each < moment][-STEPS_BEFORE]
        gaps = [(b, b - a) for a, b in zip(self.fed, self.fed[1:], strict=False)]
        usual = max(gap for at, gap in gaps if before < at <= moment)
        return max(0.0, max(gap for at, gap in gaps if at > moment) - usual)


async def until(what: Callable[[], Any], words: str) -> Any:
    return await poll_until(what, PATIENCE_SECONDS, words)


async def until_shape(made: Bench, num_stages: int) -> None:
    def is_there() -> bool:
        overview = made.conductor.overview()
        serving = {name for row in overview["rows"] for name in row["servers"]}
        return overview["stages"] == num_stages == len(serving) and all(row["servers"] for row in overview["rows"])

    await until(is_there, f"{num_stages} stages")


async def lose_one(made: Bench, watch: Watch, servers: list[subprocess.Popen[str]], how: signal.Signals) -> float:
    """From the signal, or from its detection where the machine says nothing, to the first of the new shape."""
    await until_shape(made, 4)
    await until_steps(watch, STEPS_BEFORE)
    victim = servers.pop(0)
    began = watch.lost_at = time.monotonic()
    victim.send_signal(how)
    if how == signal.SIGSTOP:
        began = await until(lambda: watch.first_after(watch.gone, began), "the frozen server to be noticed")
    morphed = await until(lambda: watch.first_after(watch.morphed, began), "the new shape")
    first = await until(lambda: watch.first_after(watch.fed, morphed), "a micro-batch of the new shape")
    if how == signal.SIGSTOP:
        victim.kill()
    servers.append(made.serve())
    return float(first - began)


async def leave_with_notice(made: Bench, watch: Watch, servers: list[subprocess.Popen[str]]) -> float:
    await until_shape(made, 4)
    await until_steps(watch, STEPS_BEFORE)
    leaving = servers.pop(0)
    began = time.monotonic()
    assert leaving.stdin is not None
    assert leaving.stdout is not None
    leaving.stdin.write("leave\n")
    leaving.stdin.flush()
    told = json.loads(await asyncio.to_thread(leaving.stdout.readline))
    assert told["handed_over"], "nobody took over"
    await until_steps(watch, 2)
    servers.append(made.serve())
    return watch.lost_since(began)


async def until_steps(watch: Watch, count: int) -> None:
    wanted = len(watch.committed) + count
    await until(lambda: len(watch.committed) >= wanted, f"{count} steps")


async def useful_share(made: Bench, watch: Watch, servers: list[subprocess.Popen[str]], seconds: float) -> float:
    """Steps with a SIGKILL and a newcomer in this time, against the same time without."""
    await until_shape(made, 4)
    counts = []
    for is_disturbed in (False, True):
        await until_steps(watch, 2)
        before = len(watch.committed)
        if is_disturbed:
            servers.pop(0).kill()
            servers.append(made.serve())
        await asyncio.sleep(seconds)
        counts.append(len(watch.committed) - before)
    return counts[1] / counts[0]


async def ours(size: str, repeats: int, seconds: float) -> dict[str, list[float]]:
    toy = TOYS[size]
    watch = Watch()
    found: dict[str, list[float]] = {"kill": [], "pause": [], "frozen": [], "notice": [], "share": []}
    before = faultpoints.install(watch.reached)
    blocks = toy.num_blocks
    try:
        async with bench(size, lambda count: Layout.even(blocks, max(1, min(count, 4))), listens=True) as made:
            made.conductor.on_event = watch.told
            servers = [made.serve() for _ in range(4)]
            running = asyncio.create_task(made.conductor.run())
            try:
                for _ in range(repeats):
                    found["kill"].append(await lose_one(made, watch, servers, signal.SIGKILL))
                    found["pause"].append(watch.lost_since(watch.lost_at))
                    say(
                        f"SIGKILL: {found['kill'][-1]:.2f} s to the first micro-batch of the new shape, "
                        f"{found['pause'][-1]:.2f} s without any"
                    )
                    found["notice"].append(await leave_with_notice(made, watch, servers))
                    say(f"with notice: {found['notice'][-1]:.2f} s lost")
                found["frozen"].append(await lose_one(made, watch, servers, signal.SIGSTOP))
                say(f"frozen: {found['frozen'][-1]:.2f} s from its detection")
                found["share"].append(await useful_share(made, watch, servers, seconds))
                say(f"useful work with a preemption in {seconds:.0f} s: {found['share'][-1]:.0%}")
            finally:
                running.cancel()
    finally:
        faultpoints.install(before)
    return found


def torchs(size: str) -> float:
    """Seconds from the SIGKILL of a rank until all that was done before is done again, by torchrun."""
    script = str(ROOT / "benchmarks" / "baselines" / "torch_restart.py")
    with tempfile.TemporaryDirectory() as folder:
        steps = Path(folder) / "steps.jsonl"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        job = subprocess.Popen([*command, "--max-restarts=2", script, folder, size], stderr=subprocess.DEVNULL)
        try:
            done = _until_lines(steps, 12)
            pid = json.loads((Path(folder) / "rank1.json").read_text())["pid"]
            subprocess.run(["kill", "-9", str(pid)], check=True)
            began = time.time()
            lines = _until(lambda: [e for e in _lines(steps) if e["at"] > began and e["step"] > done[-1]["step"]])
            return float(lines[0]["at"] - began)
        finally:
            job.terminate()
            job.wait(60)


def _lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _until(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + 2 * PATIENCE_SECONDS
    while not (found := what()):
        if time.monotonic() > end:
            raise TimeoutError("torchrun does not go on")
        time.sleep(0.05)
    return found


def _until_lines(path: Path, count: int) -> list[dict[str, float]]:
    return list(_until(lambda: found if len(found := _lines(path)) >= count else None))


def main() -> None:
    options = parser(__doc__, repeats=3)
    options.add_argument("--seconds", type=float, default=60.0, help="between two preemptions")
    options.add_argument("--sleeping", action="store_true", help="layers that sleep instead of computing")
    arguments = options.parse_args()
    size = "morphing" if arguments.sleeping else "compute"
    found = uvloop.run(ours(size, arguments.repeats, arguments.seconds))
    restart = torchs(size)
    say(f"torchrun: {restart:.1f} s until it is where it was")
    figures = {
        "kill_to_new_shape_seconds": statistics.median(found["kill"]),
        "kill_pause_seconds": statistics.median(found["pause"]),
        "detection_to_new_shape_seconds": statistics.median(found["frozen"]),
        "lost_with_notice_seconds": statistics.median(found["notice"]),
        "useful_share": statistics.median(found["share"]),
        "torchrun_restart_seconds": restart,
        "torchrun_useful_share": max(0.0, 1 - restart / arguments.seconds),
        "seconds_between_preemptions": arguments.seconds,
    }
    report(figures, as_json=arguments.json, title="a pipeline that loses machines, 4 servers")


if __name__ == "__main__":
    main()
