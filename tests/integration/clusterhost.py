"""One machine of a cluster: a hub and its guard in a process of their own, so that both can die at once.

    python clusterhost.py FOLDER NUMBER HOST:ROUTE_PORT HOST:ROUTE_PORT HOST:ROUTE_PORT

Says {"servers": […], "ca_pem": …, "pid": …} once the hub answers. After a line of input, when enough hubs are there to
keep stores, it starts the guard and says "guard". For each further line it says {"invite": …}, for as many trusted
coordinators as like. It serves until it is killed, or until its input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from potluck.hub.access.member import Scopes
from potluck.hub.access.organise import Organiser
from potluck.hub.guard.guard import Guard, GuardConfig
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.server.configuration import ClusterConfig, HubConfig
from potluck.hub.server.embedded import EmbeddedHub
from potluck.hub.subjects import Subjects

RUN = "bakery"
TRUSTED = Scopes(coordinates=True, trusted=True)


async def main(folder: Path, number: int, routes: list[str]) -> None:
    host, _, port = routes[number].partition(":")
    cluster = ClusterConfig(name="trio", server_name=f"hub-{number}", port=int(port), routes=tuple(routes))
    hub = EmbeddedHub(HubConfig(folder=folder, run=RUN, host=host, sync_always=False, cluster=cluster))
    await hub.start()
    try:
        print(json.dumps({"servers": hub.address().servers, "ca_pem": hub.ca_pem, "pid": hub.pid}), flush=True)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, sys.stdin.readline)
        guard = Guard(GuardConfig(run=RUN, replicas=3), hub.keys, hub.address())
        await guard.start()
        try:
            print("guard", flush=True)
            while await loop.run_in_executor(None, sys.stdin.readline):
                print(json.dumps({"invite": await invite(hub)}), flush=True)
        finally:
            await guard.stop()
    finally:
        await hub.stop()


async def invite(hub: EmbeddedHub) -> str:
    connection = await NatsConnection.connect(hub.address(), seed=hub.keys.organiser_seed, run=RUN, name="main")
    try:
        organiser = Organiser(connection, Subjects(RUN), hub.keys.organiser_public)
        _, secret = await organiser.create_invite(scopes=TRUSTED, uses=None)
        return secret
    finally:
        await connection.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
