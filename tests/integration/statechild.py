"""A keeper in a process of its own: joins, keeps a state, serves it, and dies where it is told to.

python statechild.py ARGUMENTS.json
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch

from potluck import faultpoints
from potluck.hub.address import HubAddress
from potluck.peer.identity import Identity
from potluck.round.averager import Averager, AveragerConfig
from potluck.run.peer import Peer, PeerConfig
from potluck.state.config import StateConfig
from potluck.state.keeper import StateKeeper
from potluck.testing.faults import Fault, FaultHook


def model(seed: int, megabytes: int) -> dict[str, torch.Tensor]:
    """So many MB, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{n}": torch.randn(250_000, generator=generator) for n in range(megabytes)}


async def main(arguments: dict[str, Any]) -> None:
    parent = os.getppid()
    address = HubAddress(servers=tuple(arguments["servers"]), ca_pem=arguments["ca_pem"])
    config = PeerConfig(role="aux", invite=arguments["invite"], listen=("tcp://127.0.0.1:0",))
    peer = Peer(address, arguments["run"], Identity.open(Path(arguments["identity"])), config)
    await peer.start()
    averager = Averager(peer, AveragerConfig(num_threads=1))
    await averager.start()
    keeper = StateKeeper(peer, averager, StateConfig())
    await keeper.start()
    if arguments["kill_at"]:
        fault = Fault(point="state.chunk_served", action="kill", labels={"number": arguments["kill_at"]})
        faultpoints.install(FaultHook([fault], Path(arguments["fired"])))
    tensors = model(arguments["seed"], arguments["megabytes"])
    digest = await asyncio.wrap_future(keeper.publish(tensors, {"epoch": 0}, 0))
    print(json.dumps({"kept": digest, "peer": peer.peer_id}), flush=True)
    while os.getppid() == parent:  # noqa: ASYNC110 - there is nobody who could set an event
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
