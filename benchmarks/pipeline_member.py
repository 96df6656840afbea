"""A server of bench_pipeline.py and bench_morph.py. It ends with its input; at a line "leave" it hands over first.

python pipeline_member.py '{"link": …, "size": …, "conductor": …, "recompute": …, "stage": …, "slowness": …}'

Without a stage (null) it serves the one that the run needs most.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial

import torch
import torch._dynamo  # the first optimizer imports it: before this peer is counted on
import uvloop

from pipelinerun import LOOPBACK
from pipelinetoy import SEED, TOYS
from potluck.hub.joinlink import JoinLink, fetch_address
from potluck.peer.identity import Identity
from potluck.pipeline.blueprint import Blueprint
from potluck.pipeline.following import Following
from potluck.pipeline.holding import Holding
from potluck.pipeline.member import MemberConfig, Part, PipelineMember
from potluck.pipeline.serving import ServerConfig
from potluck.pipeline.unitstate import Optimizing
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.polling import poll_until


async def main() -> None:
    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    link, stage = JoinLink.parse(arguments["link"]), arguments["stage"]
    listen = arguments.get("listen", LOOPBACK)
    config = PeerConfig(name="server", link=link, listen=(listen,), trusted_lan=True)
    peer = Peer(await fetch_address(link), link.run, Identity.temporary(), config)
    await peer.start()
    blueprint = Blueprint.of(partial(TOYS[arguments["size"]].blocks, arguments["slowness"]), SEED)
    holding = Holding(blueprint, Optimizing(lambda named: torch.optim.SGD(named.values(), lr=1e-3)))
    await poll_until(lambda: peer.session.roster.get(arguments["conductor"]), 60, "the conductor")
    member = PipelineMember(
        peer.links,
        peer.clock,
        peer.peer_id,
        Following(arguments["conductor"]),
        holding,
        Part(serves=True, stages=() if stage is None else (stage,)),
        config=MemberConfig(server=ServerConfig(recompute=arguments["recompute"])),
    )
    await member.start()
    if (await asyncio.to_thread(sys.stdin.readline)).strip() == "leave":
        print(json.dumps({"handed_over": await member.leave(30)}), flush=True)
    await member.close()
    await peer.close()


if __name__ == "__main__":
    uvloop.run(main())
