"""A server, feeder or conductor of a pipeline in a process of its own.

python pipelinechild.py ARGUMENTS

ARGUMENTS is JSON: servers, ca_pem, run, identity, invite; then conductor, and stages (to serve; slow_seconds is how
much longer each micro-batch takes) or none (to feed); or samples of each step, num_stages and term (to conduct).
Writes "enlisted PEER" when it counts, or "conducting PEER". On standard input: "weights FILE STEP" writes the
parameters of its blocks at that step, "follow PEER" names another conductor, "arm FILE POINT ACTION" has a fault from
then on, whose record goes to the file; a conductor begins with the line "go".
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from potluck import faultpoints
from potluck.hub.address import HubAddress
from potluck.peer.identity import Identity
from potluck.pipeline.blocks import State
from potluck.pipeline.blueprint import Blueprint
from potluck.pipeline.book import HubBook
from potluck.pipeline.compute import StageCompute
from potluck.pipeline.conducting import Conductor
from potluck.pipeline.following import Following
from potluck.pipeline.holding import Holding
from potluck.pipeline.layout import Layout
from potluck.pipeline.member import Part, PipelineMember
from potluck.pipeline.staffing import Staff
from potluck.pipeline.unitstate import Optimizing
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.faults import Fault, FaultHook
from potluck.testing.polling import poll_until

sys.path.insert(0, str(Path(__file__).parent.parent))
from pipelinelab import RUN_SEED, LabCourse, LabSource, build, make_optimizer

torch.set_num_threads(1)


async def main(arguments: dict[str, Any]) -> None:
    address = HubAddress(servers=tuple(arguments["servers"]), ca_pem=arguments["ca_pem"])
    config = PeerConfig(name="stage", invite=arguments["invite"], listen=("tcp://127.0.0.1:0",))
    peer = Peer(address, arguments["run"], Identity.open(Path(arguments["identity"])), config)
    await peer.start()
    blueprint = Blueprint.of(lambda: build(tied=True, dropout=0.1), RUN_SEED)
    if "samples" in arguments:
        await conduct(peer, blueprint, arguments)
    else:
        await take_part(peer, blueprint, arguments)


async def conduct(peer: Peer, blueprint: Blueprint, arguments: dict[str, Any]) -> None:
    layout = Layout.even(blueprint.num_blocks, arguments["num_stages"])
    course = LabCourse()
    course.steps = [arguments["samples"]] * 1000
    conductor = Conductor(
        peer.links,
        peer.session.roster,
        peer.clock,
        blueprint=blueprint,
        staff=Staff([1.0] * blueprint.num_blocks, [1] * blueprint.num_blocks, lambda _num_servers: layout),
        course=course,
        book=HubBook(peer.session.hub.store("groups")),
        term=arguments["term"],
    )
    print(f"conducting {peer.peer_id}", flush=True)
    while (line := (await asyncio.to_thread(sys.stdin.readline)).split()) and line[0] != "go":
        arm(*line[1:])
    await conductor.run()


async def take_part(peer: Peer, blueprint: Blueprint, arguments: dict[str, Any]) -> None:
    conductor, stages = arguments["conductor"], tuple(arguments["stages"])
    if seconds := arguments.get("slow_seconds", 0.0):
        slow_down(seconds)
    holding = Holding(blueprint, Optimizing(make_optimizer))
    part = Part(serves=bool(stages), stages=stages, feeds=not stages)
    source = None if stages else LabSource()
    await poll_until(lambda: peer.session.roster.get(conductor), 60, "the conductor to be in the roster")
    following = Following(conductor)
    member = PipelineMember(peer.links, peer.clock, peer.peer_id, following, holding, part, source=source)
    await member.start()
    if stages:
        await poll_until(lambda: holding.blocks and not holding.missing, 60, "its blocks")
    print(f"enlisted {peer.peer_id}", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        order, *given = line.split()
        if order == "arm":
            arm(*given)
        elif order == "follow":
            following.set(given[0])
        else:
            await save_weights(holding, *given)


def slow_down(seconds: float) -> None:
    forward = StageCompute.forward

    def slower(self: StageCompute, step: int, key: tuple[int, int], inputs: State) -> State | None:
        time.sleep(seconds)
        return forward(self, step, key, inputs)

    StageCompute.forward = slower  # type: ignore[method-assign]


def arm(path: str, point: str, action: str) -> None:
    faultpoints.install(FaultHook([Fault(point=point, action=action)], Path(path)))
    print(f"armed {path}", flush=True)


async def save_weights(holding: Holding, path: str, step: str) -> None:
    await poll_until(lambda: holding.step >= int(step), 60, "the last step to be taken")
    held = {
        f"{number}.{name}": parameter.detach()
        for number in holding.standing
        for name, parameter in holding.blocks[number].named_parameters()
    }
    torch.save(held, path)
    print(f"saved {path}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
