"""One Potluck peer for bench_join.py: keeps a state, or fetches it once for each line on standard input."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import torch
import uvloop

from potluck.hub.address import HubAddress
from potluck.peer.identity import Identity
from potluck.round.averager import Averager, AveragerConfig
from potluck.run.peer import Peer, PeerConfig
from potluck.state.keeper import StateConfig, StateKeeper
from potluck.testing.polling import poll_until

START_SECONDS = 120.0
FETCH_SECONDS = 120.0


async def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    is_keeper = arguments["kind"] == "keeper"
    config = PeerConfig(
        invite=arguments["invite"],
        listen=("tcp://127.0.0.1:0",),
        role=arguments["role"] if is_keeper else "trainer",
        name=arguments["kind"],
    )
    address = HubAddress(servers=tuple(arguments["servers"]), ca_pem=arguments["ca_pem"])
    peer = Peer(address, arguments["run"], Identity.temporary(), config)
    await peer.start()
    averager = Averager(peer, AveragerConfig(num_threads=1))
    await averager.start()
    keeper = StateKeeper(peer, averager, StateConfig(keep="always" if is_keeper else "never"))
    await keeper.start()
    try:
        await (keep if is_keeper else join)(keeper, peer, arguments)
    finally:
        await keeper.close()
        await averager.close()
        await peer.close()


async def keep(keeper: StateKeeper, peer: Peer, arguments: dict[str, Any]) -> None:
    """Hold the state until standard input ends."""
    generator = torch.Generator().manual_seed(1)
    number, elements = arguments["tensors"], arguments["elements"]
    state = {f"layer.{n}": torch.randn(elements, generator=generator) for n in range(number)}
    digest = await asyncio.wrap_future(keeper.publish(state, {}, 0))
    print(json.dumps({"digest": digest}), flush=True)
    await (await standard_input()).read()


async def join(keeper: StateKeeper, peer: Peer, arguments: dict[str, Any]) -> None:
    """Fetch the state as often as asked; what was fetched before is not used again."""
    await poll_until(
        lambda: len(keeper.directory.keepers(0, arguments["digest"])) == arguments["keepers"],
        START_SECONDS,
        "the keepers",
    )
    await poll_until(lambda: num_direct(peer) >= arguments["keepers"], START_SECONDS, "direct links to the keepers")
    own = {f"layer.{n}": torch.zeros(arguments["elements"]) for n in range(arguments["tensors"])}  # a joiner's model
    print("ready", flush=True)
    lines = await standard_input()
    while await lines.readline():
        started = time.perf_counter()
        with await keeper.fetch(epoch=0, timeout_seconds=FETCH_SECONDS) as fetched:
            await asyncio.to_thread(fetched.write_into, own)
            seconds = time.perf_counter() - started
            given = sorted(fetched.report.given.values())
        checksum = sum(tensor[::1000].double().sum().item() for tensor in own.values())
        answer = {"seconds": seconds, "num_tensors": len(own), "checksum": checksum, "given": given}
        print(json.dumps(answer), flush=True)


def num_direct(peer: Peer) -> int:
    """How many peers are linked to this one directly."""
    return sum(link.path == "direct" for link in peer.links.statistics().peers.values())


async def standard_input() -> asyncio.StreamReader:
    """Standard input, without blocking."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    return lines


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
