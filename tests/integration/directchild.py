"""Carriers in a process of their own, for tests of direct links.

peer NAME    one peer: reads `NAME SESSION KEY ADDRESS` of another from standard input, writes its own, and stays
many COUNT   that many carriers, each linked with the next two; writes what they cost, and ends
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import psutil
from directpeers import direct_config, entry, introduce, open_peer


async def be_peer(name: str) -> None:
    config = direct_config(sockets={"heartbeat_seconds": 0.2, "silence_seconds": 1.0})
    async with open_peer(name, config) as peer:
        other, session, key, address = sys.stdin.readline().split()
        print("peer", name, peer.session, peer.carrier.link_key, peer.carrier.bound[0])
        peer.carrier.update_peer(peer.presence())
        peer.carrier.update_peer(entry(other, session, key, address))
        await asyncio.Event().wait()


async def be_many(count: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(open_peer(f"p{number:03d}")) for number in range(count)]
        for number, peer in enumerate(peers):
            introduce(peer, peers[(number + 1) % count])
            introduce(peer, peers[(number + 2) % count])
        for number, peer in enumerate(peers):
            for step in (1, 2):
                await peer.until_open(peers[(number + step) % count].name)
        process = psutil.Process()
        rss_mib = process.memory_info().rss // 2**20
        print(f"threads={process.num_threads()} rss_mib={rss_mib} descriptors={process.num_fds()}")


if __name__ == "__main__":
    work = be_peer(sys.argv[2]) if sys.argv[1] == "peer" else be_many(int(sys.argv[2]))
    asyncio.run(work)
