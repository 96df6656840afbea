"""A server or feeder of a pipeline in a process of its own.

python pipelinechild.py ARGUMENTS

ARGUMENTS is JSON: servers, ca_pem, run, identity, invite, conductor, and stages (to serve) or none (to feed). Writes
"enlisted PEER" when it counts. On standard input: "weights FILE STEP" writes the parameters of its blocks at that step,
"arm FILE POINT ACTION" has a fault from then on, whose record goes to the file.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch

from potluck import faultpoints
from potluck.hub.address import HubAddress
from potluck.peer.identity import Identity
from potluck.pipeline.blueprint import Blueprint
from potluck.pipeline.following import Following
from potluck.pipeline.holding import Holding
from potluck.pipeline.member import Part, PipelineMember
from potluck.pipeline.unitstate import Optimizing
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.faults import Fault, FaultHook
from potluck.testing.polling import poll_until

sys.path.insert(0, str(Path(__file__).parent.parent))
from pipelinelab import RUN_SEED, LabSource, build, make_optimizer

torch.set_num_threads(1)


async def main(arguments: dict[str, Any]) -> None:
    address = HubAddress(servers=tuple(arguments["servers"]), ca_pem=arguments["ca_pem"])
    config = PeerConfig(name="stage", invite=arguments["invite"], listen=("tcp://127.0.0.1:0",))
    peer = Peer(address, arguments["run"], Identity.open(Path(arguments["identity"])), config)
    await peer.start()
    conductor, stages = arguments["conductor"], tuple(arguments["stages"])
    blueprint = Blueprint.of(lambda: build(tied=True, dropout=0.1), RUN_SEED)
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
        order, path, *fault = line.split()
        if order == "arm":
            faultpoints.install(FaultHook([Fault(point=fault[0], action=fault[1])], Path(path)))
            print(f"armed {path}", flush=True)
            continue
        wanted = int(fault[0])
        await poll_until(lambda: holding.step >= wanted, 60, "the last step to be taken")  # noqa: B023
        held = {
            f"{number}.{name}": parameter.detach()
            for number in holding.standing
            for name, parameter in holding.blocks[number].named_parameters()
        }
        torch.save(held, path)
        print(f"saved {path}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
