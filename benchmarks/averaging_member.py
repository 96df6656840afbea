"""One Potluck peer for bench_averaging.py: joins a run, and averages once for each line on standard input."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
import uvloop

from potluck.hub.address import HubAddress
from potluck.peer.identity import Identity
from potluck.round.averager import Averager, AveragerConfig
from potluck.round.codecs import CodecChoice
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.polling import poll_until

START_SECONDS = 120.0
ROUND_SECONDS = 120.0


def memory_bytes(name: str) -> int:
    """A line of /proc/self/status: VmRSS now, VmHWM the peak since it was last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name} in /proc/self/status")


async def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    peer = Peer(
        HubAddress(servers=tuple(arguments["servers"]), ca_pem=arguments["ca_pem"]),
        arguments["run"],
        Identity.temporary(),
        PeerConfig(
            invite=arguments["invite"], listen=("tcp://127.0.0.1:0",), trusted_lan=arguments["plain"], name="bench"
        ),
    )
    await peer.start()
    averager = Averager(peer, AveragerConfig(codecs=CodecChoice.everything("float16")))
    await averager.start()
    values = torch.randn(arguments["elements"], generator=torch.Generator().manual_seed(arguments["index"]))
    await poll_until(lambda: all_there(peer, arguments["members"]), START_SECONDS, "the other members")
    print("ready", flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    before = memory_bytes("VmRSS")
    while await lines.readline():
        result = await averager.average({"w": values}, weight=1.0, timeout_seconds=ROUND_SECONDS)
        answer = {
            "holds": result.holds,
            "checksum": values[::1000].double().sum().item(),
            "extra_bytes": memory_bytes("VmHWM") - before,
            "exchanging": result.seconds.exchanging,
        }
        print(json.dumps(answer), flush=True)
        values += arguments["index"]  # so that the next round has something to average
    await averager.close()
    await peer.close()


def all_there(peer: Peer, members: int) -> bool:
    """Whether everybody is known and can be dialled, and linked to us."""
    full = [presence.peer for presence in peer.session.roster if presence.state == "alive" and presence.card.addresses]
    linked = [other for other, link in peer.links.statistics().peers.items() if link.path == "direct"]
    return len(full) == members and len(linked) == members - 1


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
