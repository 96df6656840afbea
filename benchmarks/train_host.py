"""A hub for bench_train.py, without a peer of its own: prints a link for trainers that may coordinate.

python train_host.py FOLDER ADDRESS
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from potluck.hub.guard.guard import GuardConfig
from potluck.hub.guard.member import Scopes
from potluck.hub.guard.organise import Organiser
from potluck.hub.keys import HubKeys
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.server.configuration import HubConfig
from potluck.hub.subjects import Subjects
from potluck.run.host import Host, HostConfig

RUN = "bench"
TRAINERS = Scopes(roles=("trainer",), coordinates=True, trusted=True)


async def main(folder: Path, address: str) -> None:
    parent = os.getppid()
    hub = HubConfig(folder=folder, run=RUN, advertised_hosts=(address,))
    host = Host(HostConfig(hub=hub, guard=GuardConfig(run=RUN), peer=None))
    await host.start()
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
        await host.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
