"""A host for bench_train.py, as `potluck host` is one, but that it averages nothing: prints a link for trainers.

python train_host.py FOLDER ADDRESS
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from potluck.hub.access.member import Scopes
from potluck.hub.access.organise import Organiser
from potluck.hub.guard.guard import GuardConfig
from potluck.hub.keys import HubKeys
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.server.configuration import HubConfig
from potluck.hub.subjects import Subjects
from potluck.optim.auxiliary import OTHERWISE
from potluck.optim.collaboration import Collaboration
from potluck.optim.methods.quorum import ByMost
from potluck.round.codecs import CodecChoice
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.run.host import Host, HostConfig
from potluck.run.peer import Peer, PeerConfig
from potluck.state.config import StateConfig
from potluck.state.keeper import StateKeeper

RUN = "bench"
TRAINERS = Scopes(roles=("trainer",), trusted=True)


async def main(folder: Path, address: str) -> None:
    parent = os.getppid()
    hub = HubConfig(folder=folder, run=RUN, advertised_hosts=(address,))
    peer = PeerConfig(role="aux", name="host", client_mode=True)
    host = Host(HostConfig(hub=hub, guard=GuardConfig(run=RUN), peer=peer))
    await host.start()
    coordinating = await coordinate(host.peer)
    try:
        keys = HubKeys.load_or_create(folder / "identity")
        connection = await NatsConnection.connect(host.address, seed=keys.organiser_seed, run=RUN, name="main")
        organiser = Organiser(connection, Subjects(RUN), keys.organiser_public)
        _, invite = await organiser.create_invite(scopes=TRAINERS, uses=None)
        await connection.close()
        print(json.dumps({"event": "ready", "link": str(replace(host.link, invite=invite))}), flush=True)
        while os.getppid() == parent:  # noqa: ASYNC110 - there is nobody who could set an event
            await asyncio.sleep(0.2)
    finally:
        await coordinating.aclose()
        await host.stop()


async def coordinate(peer: Peer | None) -> AsyncExitStack:
    """Plan and commit rounds without being in them, until that is closed."""
    assert peer is not None, "the host has a peer"
    config = CoordinatorConfig(trigger=ByMost(OTHERWISE))
    async with AsyncExitStack() as stack:
        collaboration = Collaboration(peer, target=None, codecs=CodecChoice(), coordinator=config, num_threads=1)
        stack.push_async_callback(collaboration.close)
        await collaboration.start()
        keeper = collaboration.keeper = StateKeeper(peer, collaboration.averager, StateConfig())
        stack.push_async_callback(keeper.close)
        await keeper.start()
        return stack.pop_all()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
