"""One Potluck peer for bench_groups.py: averages in several groups at once, and tells each commit with its time.

    python group_member.py '{"link": …, "groups": […], "elements": …}'

It says {"event": "in"} when it is in the run, then {"commit": GROUP, "coordinator": PEER, "at": …} for every epoch.
Times are those of the wall clock, which all processes of one machine share. It ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import torch
import uvloop

from potluck.errors import RoundFailedError
from potluck.hub.joinlink import JoinLink, fetch_address
from potluck.peer.identity import Identity
from potluck.round.averager import Averager, AveragerConfig
from potluck.round.plan.messages import Commit
from potluck.run.group import Group
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.polling import poll_until

ROUND_SECONDS = 60.0
START_SECONDS = 120.0


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


async def keep_averaging(group: Group, arguments: dict[str, Any]) -> None:
    averager = Averager(group, AveragerConfig(num_threads=1))

    def committed(commit: Commit) -> None:
        tell(commit=group.name, coordinator=commit.coordinator, members=len(commit.members), at=time.time())

    averager.listen(committed)
    await averager.start()
    try:
        num_members = arguments["members"]
        await poll_until(lambda: len(group.members) >= num_members, START_SECONDS, "the other members")
        values = torch.zeros(arguments["elements"])
        while True:
            try:
                await averager.average({"w": values}, weight=1.0, timeout_seconds=ROUND_SECONDS)
            except RoundFailedError as error:
                print(f"{group.name}: {error}", file=sys.stderr, flush=True)
    finally:
        await averager.close()


async def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    link = JoinLink.parse(arguments["link"])
    groups = tuple(arguments["groups"])
    config = PeerConfig(link=link, listen=("tcp://127.0.0.1:0",), name="bench", groups=groups)
    peer = Peer(await fetch_address(link), link.run, Identity.temporary(), config)
    await peer.start()
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    work = [asyncio.create_task(keep_averaging(Group(peer, name), arguments)) for name in groups]
    tell(event="in", peer=peer.peer_id)
    await lines.read()
    for task in work:
        task.cancel()
    await asyncio.wait(work)
    await peer.close()


if __name__ == "__main__":
    uvloop.run(main())
