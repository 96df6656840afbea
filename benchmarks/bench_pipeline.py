"""A pipeline of four stages in processes: micro-batches per second, beside torch.distributed.pipelining 1F1B over gloo.

Two sizes of a toy transformer: one dominated by hand-over, one by compute. No recomputation on either side; links in
the clear, as gloo's. Each server and rank has one thread.

    scripts/bench pipeline --json
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvloop

from bench_groups import process
from harness import ROOT, parser, report, say
from pipelinetoy import SEED, SIZES, Toy
from potluck.hub.joinlink import JoinLink, fetch_address
from potluck.peer.identity import Identity
from potluck.pipeline.blocks import State
from potluck.pipeline.blueprint import Blueprint
from potluck.pipeline.book import HubBook
from potluck.pipeline.conducting import Conductor
from potluck.pipeline.feeding import FeederConfig
from potluck.pipeline.following import Following
from potluck.pipeline.holding import Holding
from potluck.pipeline.layout import Layout
from potluck.pipeline.member import MemberConfig, Part, PipelineMember
from potluck.pipeline.messages import Place
from potluck.pipeline.staffing import Staff
from potluck.pipeline.unitstate import Optimizing
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.polling import poll_until

WARM_UP = 2
IN_FLIGHT = 16


class ToySource:
    """The same micro-batch again and again."""

    def __init__(self, toy: Toy) -> None:
        self._toy = toy

    def batch(self, step: int, place: Place, first: int, samples: int) -> State:
        return self._toy.batch(samples)

    def after(self, step: int, place: Place, samples: int) -> Place:
        return place


class ToyCourse:
    """Steps without end."""

    def __init__(self, toy: Toy) -> None:
        self._toy = toy

    def sizes(self, step: int, num_stages: int) -> tuple[int, ...]:
        return (self._toy.micro_batch,) * self._toy.num_micro_batches

    def max_norm(self, step: int) -> float:
        return 0.0

    def stands_still(self, step: int) -> str:
        return ""


@dataclass
class Bench:
    """A run in processes, with its conductor and one feeder in this one."""

    toy: Toy
    size: str
    link: JoinLink
    conductor: Conductor
    feeder: PipelineMember
    processes: ExitStack

    def serve(self, **options: object) -> subprocess.Popen[str]:
        """One more server."""
        arguments = {"link": str(self.link), "size": self.size, "conductor": self.conductor_id, "recompute": "never"}
        return self.processes.enter_context(process("pipeline_member.py", json.dumps({**arguments, **options})))

    @property
    def conductor_id(self) -> str:
        return self.feeder.following.peer


@asynccontextmanager
async def bench(size: str, layout_for: Callable[[int], Layout], *, listens: bool = False) -> AsyncIterator[Bench]:
    """Open a run; servers are still to come."""
    toy = SIZES[size]
    async with AsyncExitStack() as stack:
        processes = stack.enter_context(ExitStack())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        host = processes.enter_context(process("group_host.py", str(folder)))
        assert host.stdout is not None
        link = JoinLink.parse(json.loads(await asyncio.to_thread(host.stdout.readline))["link"])
        config = PeerConfig(name="conductor", link=link, listen=("tcp://127.0.0.1:0",), trusted_lan=True)
        peer = Peer(await fetch_address(link), link.run, Identity.temporary(), config)
        await peer.start()
        stack.push_async_callback(peer.close)
        blueprint = Blueprint.of(toy.blocks, SEED)
        conductor = Conductor(
            peer.links,
            peer.session.roster,
            peer.clock,
            blueprint=blueprint,
            staff=Staff([1.0] * blueprint.num_blocks, [1] * blueprint.num_blocks, layout_for),
            course=ToyCourse(toy),
            book=HubBook(peer.session.hub.store("groups")),
        )
        stack.push_async_callback(conductor.close)
        feeder = PipelineMember(
            peer.links,
            peer.clock,
            peer.peer_id,
            Following(peer.peer_id),
            Holding(blueprint, Optimizing(lambda named: torch.optim.SGD(named.values(), lr=1e-3))),
            Part(feeds=True, listens=listens),
            source=ToySource(toy),
            config=MemberConfig(feeder=FeederConfig(in_flight=IN_FLIGHT)),
        )
        await feeder.start()
        stack.push_async_callback(feeder.close)
        yield Bench(toy, size, link, conductor, feeder, processes)


async def ours(size: str, steps: int) -> float:
    toy = SIZES[size]
    layout = Layout.even(toy.num_stages * toy.layers_per_stage, toy.num_stages)
    async with bench(size, lambda _count: layout) as made:
        for stage in range(toy.num_stages):
            made.serve(stage=stage)
        conductor = made.conductor
        await poll_until(lambda: len(conductor.overview()["peers"]) > toy.num_stages, 120, "all servers")
        began = 0.0
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                began = time.perf_counter()
            await conductor.until_ready()
            await conductor.take_step()
        return steps * toy.num_micro_batches / (time.perf_counter() - began)


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
    out, _ = ranks[-1].communicate(timeout=300)
    for rank in ranks:
        rank.wait(30)
    return float(json.loads(out.strip().splitlines()[-1])["micro_batches_per_second"])


def main() -> None:
    options = parser(__doc__, repeats=3)
    options.add_argument("--steps", type=int, default=6, help="steps that are measured, of 32 micro-batches each")
    arguments = options.parse_args()
    figures: dict[str, Any] = {}
    for size in SIZES:
        found: dict[str, list[float]] = {"potluck": [], "torch_1f1b": []}
        for _ in range(arguments.repeats):
            found["potluck"].append(uvloop.run(ours(size, arguments.steps)))
            found["torch_1f1b"].append(torchs(size, arguments.steps))
            say(f"{size}: {found['potluck'][-1]:.1f} micro-batches/s, 1F1B {found['torch_1f1b'][-1]:.1f}")
        for name, values in found.items():
            figures[f"{size}_{name}"] = sorted(values)[len(values) // 2]
        figures[f"{size}_ratio"] = figures[f"{size}_potluck"] / figures[f"{size}_torch_1f1b"]
    report(figures, as_json=arguments.json, title="micro-batches per second, 4 stages")


if __name__ == "__main__":
    main()
