"""A pipeline of four stages in processes: micro-batches per second, beside torch's 1F1B and hivemind's expert server.

Computing: two sizes of a toy transformer, one dominated by hand-over, one by compute; each server, rank and expert has
one thread. torch.distributed.pipelining over gloo in the clear, without recomputation on either side; hivemind computes
forward again in backward, so ours does too beside it.
Sleeping: layers that sleep instead of computing. The planner's prediction against the measured step; 16 servers of 1 to
1/4 the speed against the sum of their rates; 50 ms and 100 Mbit/s on each line against lines without.

    scripts/bench pipeline --json
    scripts/bench pipeline --only planned,unequal,far
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench_groups import process
from harness import HIVEMIND, ROOT, environment_with, median_of, parser, report, run_baseline, say
from pipelinerun import IN_FLIGHT, conducting, timed_steps
from pipelinetoy import SIZES, TOYS, Toy
from potluck.hub.joinlink import JoinLink
from potluck.pipeline.conducting import Conductor
from potluck.pipeline.layout import Layout
from potluck.pipeline.member import PipelineMember
from potluck.pipeline.planning import BlockProfile, Machine, Profile, shape_of
from potluck.testing.natlab import Host, NatLab

WARM_UP = 2
SHAPES = [(4, 1), (2, 2), (1, 4)]  # stages × replicas
DELAY_MS, RATE_MBIT = 25.0, 100.0  # of each machine's line: 50 ms from one machine to another
SLOWNESS = [1 + 3 * number / 15 for number in range(16)]
PATIENCE_SECONDS = 300.0


@dataclass
class Bench:
    """A run in processes, with its conductor and one feeder in this one."""

    toy: Toy
    size: str
    link: JoinLink
    conductor: Conductor
    feeder: PipelineMember
    processes: ExitStack

    def serve(
        self, stage: int | None = None, *, slowness: float = 1.0, recompute: str = "never"
    ) -> subprocess.Popen[str]:
        """One more server."""
        about = {"stage": stage, "slowness": slowness, "recompute": recompute}
        arguments = {"link": str(self.link), "size": self.size, "conductor": self.feeder.following.peer, **about}
        return self.processes.enter_context(process("pipeline_member.py", json.dumps(arguments)))


@asynccontextmanager
async def bench(
    size: str, layout_for: Callable[[int], Layout], *, listens: bool = False, in_flight: int = IN_FLIGHT
) -> AsyncIterator[Bench]:
    """Open a run; servers are still to come."""
    toy = TOYS[size]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = stack.enter_context(ExitStack())
        host = processes.enter_context(process("group_host.py", str(folder)))
        assert host.stdout is not None
        link = JoinLink.parse(json.loads(await asyncio.to_thread(host.stdout.readline))["link"])
        opened = conducting(link, toy, layout_for, listens=listens, in_flight=in_flight)
        conductor, feeder = await stack.enter_async_context(opened)
        yield Bench(toy, size, link, conductor, feeder, processes)


# Computing


async def ours(size: str, steps: int, recompute: str) -> float:
    toy = TOYS[size]
    layout = Layout.even(toy.num_blocks, toy.num_stages)
    async with bench(size, lambda _count: layout) as made:
        for stage in range(toy.num_stages):
            made.serve(stage, recompute=recompute)
        seconds = await timed_steps(made.conductor, toy.num_stages, warm_up=WARM_UP, steps=steps)
        return toy.num_micro_batches / seconds


def torchs(size: str, steps: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = str(ROOT / "benchmarks" / "baselines" / "torch_1f1b.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(port), size, str(steps)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(SIZES[size].num_stages)
    ]
    out, _ = ranks[-1].communicate(timeout=PATIENCE_SECONDS)
    for rank in ranks:
        rank.wait(30)
    return float(json.loads(out.strip().splitlines()[-1])["micro_batches_per_second"])


@contextmanager
def expert(python: Path, *arguments: object) -> Iterator[list[str]]:
    """Hivemind's server of one stage; its addresses."""
    script = ROOT / "benchmarks" / "baselines" / "hivemind_experts.py"
    command = [str(python), str(script), "server", *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdin is not None
        try:
            yield json.loads(started.stdout.readline())["addresses"]
        finally:
            started.stdin.close()
            try:
                started.wait(30)
            except subprocess.TimeoutExpired:
                started.kill()


def hiveminds(size: str, steps: int) -> float:
    python = environment_with("hivemind", [HIVEMIND])
    with ExitStack() as stack:
        addresses: list[str] = []
        for stage in range(SIZES[size].num_stages):
            found = stack.enter_context(expert(python, size, stage, *addresses))
            addresses = addresses or found
        answer = run_baseline(python, "hivemind_experts.py", "client", size, steps, IN_FLIGHT, *addresses)
    return float(answer["micro_batches_per_second"])


def computing(size: str, steps: int, repeats: int) -> dict[str, float]:
    found = {
        "potluck": median_of(lambda: uvloop.run(ours(size, steps, "never")), repeats),
        "torch_1f1b": median_of(lambda: torchs(size, steps), repeats),
        "potluck_recomputing": median_of(lambda: uvloop.run(ours(size, steps, "always")), repeats),
        "hivemind": median_of(lambda: hiveminds(size, steps), repeats),
    }
    say(f"{size}: " + ", ".join(f"{name} {rate:.1f}" for name, rate in found.items()) + " micro-batches/s")
    return {
        **{f"{size}_{name}": rate for name, rate in found.items()},
        f"{size}_ratio_1f1b": found["potluck"] / found["torch_1f1b"],
        f"{size}_ratio_hivemind": found["potluck_recomputing"] / found["hivemind"],
    }


# Sleeping


async def planned(steps: int) -> dict[str, float]:
    """The planner's prediction of a step against the step, for several shapes; the largest difference."""
    toy = TOYS["planned"]
    assert toy.sleep_seconds is not None
    forward, backward = (seconds / toy.micro_batch for seconds in toy.sleep_seconds)
    profile = Profile(blocks=(BlockProfile(forward_seconds=forward, backward_seconds=backward),) * toy.num_blocks)
    figures = {}
    for stages, replicas in SHAPES:
        layout = Layout.even(toy.num_blocks, stages)
        size = toy.micro_batch * toy.num_micro_batches
        shape = shape_of(profile, Machine(), layout, replicas, size, toy.micro_batch, recompute=False)
        async with bench("planned", lambda _count, layout=layout: layout) as made:
            for stage in range(stages):
                for _ in range(replicas):
                    made.serve(stage)
            seconds = await timed_steps(made.conductor, stages * replicas, warm_up=1, steps=steps)
        say(f"{stages}×{replicas}: {shape.seconds:.3f} s predicted, {seconds:.3f} s measured")
        figures[f"planned_{stages}x{replicas}_measured_by_predicted"] = seconds / shape.seconds
    figures["planned_largest_error"] = max(abs(ratio - 1) for ratio in figures.values())
    return figures


def stages_of(num_stages: int) -> list[tuple[int, float]]:
    """The stage and slowness of sixteen servers, in stages of nearly the same rate: the fastest first, each to the
    slowest stage.
    """
    rates, found = [0.0] * num_stages, []
    for slowness in sorted(SLOWNESS):
        stage = rates.index(min(rates))
        rates[stage] += 1 / slowness
        found.append((stage, slowness))
    return found


async def unequal(steps: int) -> dict[str, float]:
    """Sixteen servers of different speeds against all of their rates, spread evenly over the stages."""
    toy = TOYS["unequal"]
    assert toy.sleep_seconds is not None
    optimum = sum(1 / slowness for slowness in SLOWNESS) / sum(toy.sleep_seconds) / toy.num_stages
    layout = Layout.even(toy.num_blocks, toy.num_stages)
    async with bench("unequal", lambda _count: layout, in_flight=4 * IN_FLIGHT) as made:
        for stage, slowness in stages_of(toy.num_stages):
            made.serve(stage, slowness=slowness)
        seconds = await timed_steps(made.conductor, len(SLOWNESS), warm_up=1, steps=steps)
    rate = toy.num_micro_batches / seconds
    say(f"16 servers of 1 to 1/4 the speed: {rate:.2f} micro-batches/s of {optimum:.2f}")
    return {"unequal_share_of_optimum": rate / optimum}


def far(steps: int) -> dict[str, float]:
    """Machines 50 ms and 100 Mbit/s apart against the same without."""
    seconds = {is_far: in_lab("far", steps, is_far) for is_far in (False, True)}
    toy = TOYS["far"]
    say(f"a step of {toy.num_micro_batches}: {seconds[True]:.2f} s far apart, {seconds[False]:.2f} s side by side")
    return {"far_rate_share": seconds[False] / seconds[True]}


def in_lab(size: str, steps: int, is_far: bool) -> float:
    """Seconds of a step, with each server and the conductor on a machine of its own."""
    toy = TOYS[size]

    def script(node: Host, name: str, *arguments: object) -> Any:
        command = [sys.executable, ROOT / "benchmarks" / name, *map(str, arguments)]
        return node.popen(command, name=name, stdin=True)

    def listening(node: Host) -> dict[str, str]:
        return {"link": link, "size": size, "listen": f"tcp://{node.address}:0"}

    with tempfile.TemporaryDirectory() as folder, NatLab() as lab:
        hub, feeding, *serving = [lab.public(name) for name in ("hub", "feeder", "a", "b", "c", "d")]
        for node in (feeding, *serving) if is_far else ():
            node.shape(rate_mbit=RATE_MBIT, delay_ms=DELAY_MS)
        host = script(hub, "group_host.py", folder, hub.address)
        link = json.loads(host.wait_for_line(r'(\{"link".*\})', PATIENCE_SECONDS)[1])["link"]
        conductor = script(feeding, "pipeline_conductor.py", json.dumps({**listening(feeding), "steps": steps}))
        peer = json.loads(conductor.wait_for_line(r'(\{"peer".*\})', PATIENCE_SECONDS)[1])["peer"]
        for stage, node in enumerate(serving[: toy.num_stages]):
            about = {"conductor": peer, "recompute": "never", "stage": stage, "slowness": 1.0}
            script(node, "pipeline_member.py", json.dumps({**listening(node), **about}))
        return float(json.loads(conductor.wait_for_line(r'(\{"seconds".*\})', PATIENCE_SECONDS)[1])["seconds"])


def main() -> None:
    options = parser(__doc__, repeats=3)
    options.add_argument("--steps", type=int, default=6, help="steps that are measured where layers compute")
    parts = ("handover", "compute", "planned", "unequal", "far")
    options.add_argument("--only", default=",".join(parts), help=f"some of {', '.join(parts)}")
    arguments = options.parse_args()
    wanted = arguments.only.split(",")
    if unknown := set(wanted) - set(parts):
        options.error(f"--only {', '.join(sorted(unknown))}: there are {', '.join(parts)}")
    figures: dict[str, Any] = {}
    for size in SIZES:
        if size in wanted:
            figures |= computing(size, arguments.steps, arguments.repeats)
    if "planned" in wanted:
        figures |= uvloop.run(planned(steps=3))
    if "unequal" in wanted:
        figures |= uvloop.run(unequal(steps=1))
    if "far" in wanted:
        figures |= far(steps=3)
    report(figures, as_json=arguments.json, title="pipelines of four stages")


if __name__ == "__main__":
    main()
