"""Conductor and feeder of bench_pipeline.py on a node of the lab. It says {"peer": …}, and at its end {"seconds": …}.

python pipeline_conductor.py '{"link": …, "size": …, "listen": …, "steps": …}'
"""

from __future__ import annotations

import json
import sys

import torch
import uvloop

from pipelinerun import conducting, timed_steps
from pipelinetoy import TOYS
from potluck.hub.joinlink import JoinLink
from potluck.pipeline.layout import Layout


async def main() -> None:
    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    toy = TOYS[arguments["size"]]
    layout = Layout.even(toy.num_blocks, toy.num_stages)
    link = JoinLink.parse(arguments["link"])
    async with conducting(link, toy, lambda _count: layout, listen=arguments["listen"]) as (conductor, feeder):
        print(json.dumps({"peer": feeder.following.peer}), flush=True)
        seconds = await timed_steps(conductor, toy.num_stages, warm_up=1, steps=arguments["steps"])
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
