"""The host of bench_groups.py and others: hub and guard, and a link by which peers may coordinate.

python group_host.py FOLDER [ADDRESS]   says {"link": …, "volunteers": …, "hub": PID}, then serves until its input ends

Peers that come by the link for volunteers train, and do not coordinate.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

from potluck.hub.access.member import Scopes
from potluck.hub.access.organise import Organiser
from potluck.hub.guard.guard import GuardConfig
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.server.configuration import HubConfig
from potluck.hub.subjects import Subjects
from potluck.run.host import Host, HostConfig

RUN = "groups"
SCOPES = Scopes(roles=("trainer", "aux"), coordinates=True, trusted=True)
VOLUNTEERS = Scopes(roles=("trainer",))


async def invite(host: Host, scopes: Scopes) -> str:
    assert host._hub is not None
    keys = host._hub.keys
    connection = await NatsConnection.connect(host.address, seed=keys.organiser_seed, run=RUN, name="main")
    try:
        _, secret = await Organiser(connection, Subjects(RUN), keys.organiser_public).create_invite(
            scopes=scopes, uses=None
        )
        return str(replace(host.link, invite=secret))
    finally:
        await connection.close()


async def main(folder: Path, address: str = "127.0.0.1") -> None:
    hub = HubConfig(folder=folder, run=RUN, host=address, advertised_hosts=(address,))
    host = Host(HostConfig(hub=hub, guard=GuardConfig(run=RUN), peer=None))
    await host.start()
    try:
        links = {"link": await invite(host, SCOPES), "volunteers": await invite(host, VOLUNTEERS)}
        print(json.dumps({**links, "hub": int((folder / "server.pid").read_text())}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await host.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
