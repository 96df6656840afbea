"""A peer in several groups, in a process of its own: averages in each of them at once, and tells every commit.

python groupchild.py ARGUMENTS.json
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
from potluck.errors import RoundFailedError
from potluck.hub.address import HubAddress
from potluck.peer.identity import Identity
from potluck.round.averager import Averager, AveragerConfig
from potluck.round.codecs import CodecChoice
from potluck.round.plan.messages import Commit
from potluck.run.group import Group
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.faults import Fault, FaultHook

ELEMENTS = 200_000


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Fuse:
    """Puts a fault in place once this peer has coordinated an epoch of three members in each of its groups."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._waiting = set(arguments["groups"])
        self._fault = arguments["fault"]
        self._fired = Path(arguments["fired"])

    def made(self, group: str, num_members: int, *, is_ours: bool) -> None:
        if num_members >= 3 and is_ours:
            self._waiting.discard(group)
        if self._fault and not self._waiting:
            faultpoints.install(FaultHook([Fault(**self._fault)], self._fired))
            self._fault = None


async def take_part(group: Group, value: float, fuse: Fuse, parent: int) -> None:
    averager = Averager(group, AveragerConfig(codecs=CodecChoice.everything("float32"), num_threads=1))

    def committed(commit: Commit) -> None:
        members = sorted(member.peer for member in commit.members if member.weight)
        told = {"epoch": commit.epoch, "digest": commit.digest, "parent": commit.parent, "members": members}
        tell(commit=group.name, coordinator=commit.coordinator, **told)
        fuse.made(group.name, len(members), is_ours=commit.coordinator == group.session.peer_id)

    averager.listen(committed)
    await averager.start()
    try:
        while os.getppid() == parent:
            try:
                values = {"w": torch.full((ELEMENTS,), value)}
                await averager.average(values, weight=1.0, timeout_seconds=30.0)
            except RoundFailedError as error:
                tell(failed=group.name, why=str(error))
            await asyncio.sleep(0.1)
    finally:
        await averager.close()


async def main(arguments: dict[str, Any]) -> None:
    address = HubAddress(servers=tuple(arguments["servers"]), ca_pem=arguments["ca_pem"])
    config = PeerConfig(invite=arguments["invite"], listen=("tcp://127.0.0.1:0",), groups=tuple(arguments["groups"]))
    peer = Peer(address, arguments["run"], Identity.open(Path(arguments["identity"])), config)
    await peer.start()
    fuse = Fuse(arguments)
    tell(peer=peer.peer_id)
    async with asyncio.TaskGroup() as work:
        for name in arguments["groups"]:
            group = Group(peer, name)
            await group.enter()
            work.create_task(take_part(group, arguments["value"], fuse, os.getppid()))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
