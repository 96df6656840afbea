"""A server or feeder of a pipeline in a process of its own.

python pipelinechild.py ARGUMENTS

ARGUMENTS is JSON: servers, ca_pem, run, identity, invite, conductor, and stages (to serve) or none (to feed). Writes
"enlisted PEER" when it counts. On standard input: "weights FILE" writes the parameters of its blocks, "arm FILE POINT
ACTION" has a fault from then on, whose record goes to the file.
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
from potluck.pipeline.averaging import LinkedGroup
from potluck.pipeline.blocks import ties_of
from potluck.pipeline.compute import StageCompute
from potluck.pipeline.feeding import Feeder
from potluck.pipeline.layout import Layout
from potluck.pipeline.messages import Enlist, Enlisted
from potluck.pipeline.serving import StageServer
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.faults import Fault, FaultHook
from potluck.testing.polling import poll_until

sys.path.insert(0, str(Path(__file__).parent.parent))
from pipelinelab import RUN_SEED, batch_of, build, make_optimizer

torch.set_num_threads(1)


async def main(arguments: dict[str, Any]) -> None:
    address = HubAddress(servers=tuple(arguments["servers"]), ca_pem=arguments["ca_pem"])
    config = PeerConfig(name="stage", invite=arguments["invite"], listen=("tcp://127.0.0.1:0",))
    peer = Peer(address, arguments["run"], Identity.open(Path(arguments["identity"])), config)
    await peer.start()
    blocks = build(tied=True, dropout=0.1)
    layout, ties = Layout.even(len(blocks), arguments["num_stages"]), ties_of(blocks)
    conductor, stages = arguments["conductor"], tuple(arguments["stages"])
    if stages:
        computes = {
            stage: StageCompute(
                stage=stage,
                stages=layout.stages,
                blocks=dict(enumerate(blocks)),
                ties=ties,
                make_optimizer=make_optimizer,
                run_seed=RUN_SEED,
            )
            for stage in stages
        }
        sizes = {unit: sum(p.numel() for p in found) for c in computes.values() for unit, found in c.units.items()}
        server = StageServer(peer.links, peer.clock, conductor, computes, LinkedGroup(peer.links, peer.peer_id, sizes))
        await server.start()
    else:
        feeder = Feeder(peer.links, peer.clock, conductor, batch_of)
        assert feeder.statistics()["sent"] == 0
    await poll_until(lambda: peer.session.roster.get(conductor), 60, "the conductor to be in the roster")
    offer = Enlist(stages=stages, feeds=not stages)
    await peer.links.request(conductor, offer, reply=Enlisted, timeout_seconds=60)
    print(f"enlisted {peer.peer_id}", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        order, path, *fault = line.split()
        if order == "arm":
            faultpoints.install(FaultHook([Fault(point=fault[0], action=fault[1])], Path(path)))
            print(f"armed {path}", flush=True)
            continue
        held = {
            f"{number}.{name}": parameter.detach()
            for stage in stages
            for number in layout.stages[stage]
            for name, parameter in blocks[number].named_parameters()
        }
        torch.save(held, path)
        print(f"saved {path}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
