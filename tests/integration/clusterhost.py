"""One machine of a cluster: a hub and its guard in a process of their own, so that both can die at once.

    python clusterhost.py FOLDER NUMBER ROUTE_PORT ROUTE_PORT ROUTE_PORT

Says {"servers": […], "ca_pem": …, "pid": …} once the hub answers. After a line of input, when enough hubs are there to
keep stores, it starts the guard and says "guard". It serves until it is killed, or until its input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from potluck.hub.guard.guard import Guard, GuardConfig
from potluck.hub.server.configuration import ClusterConfig, HubConfig
from potluck.hub.server.embedded import EmbeddedHub

RUN = "bakery"


async def main(folder: Path, number: int, route_ports: list[int]) -> None:
    cluster = ClusterConfig(
        name="trio",
        server_name=f"hub-{number}",
        port=route_ports[number],
        routes=tuple(f"127.0.0.1:{port}" for port in route_ports),
    )
    hub = EmbeddedHub(HubConfig(folder=folder, run=RUN, host="127.0.0.1", sync_always=False, cluster=cluster))
    await hub.start()
    try:
        print(json.dumps({"servers": hub.address().servers, "ca_pem": hub.ca_pem, "pid": hub.pid}), flush=True)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, sys.stdin.readline)
        guard = Guard(GuardConfig(run=RUN, replicas=3), hub.keys, hub.address())
        await guard.start()
        try:
            print("guard", flush=True)
            await loop.run_in_executor(None, sys.stdin.readline)
        finally:
            await guard.stop()
    finally:
        await hub.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), [int(port) for port in sys.argv[3:]]))
