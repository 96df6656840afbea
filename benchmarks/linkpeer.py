"""One end of the link benchmark: a peer that sends to, or counts what comes from, another.

    python linkpeer.py LINK sink                            says its id, then counts
    python linkpeer.py LINK source PEER MEGABYTES REPEATS   says one figure a line, in MB/s

Options: --relay (dial nobody and let nobody dial), --plain (trusted LAN), --websocket (no other way to the hub).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import replace

from potluck.cli.console import run
from potluck.hub.joinlink import JoinLink, fetch_address
from potluck.link.links import Incoming
from potluck.messages import Message
from potluck.peer.identity import Identity
from potluck.run.peer import Peer, PeerConfig

FRAME_BYTES = 512 * 1024
TIMEOUT_SECONDS = 120.0


class Blob(Message, frozen=True, kw_only=True, tag="bench.blob"):
    """Some bytes."""


class Sum(Message, frozen=True, kw_only=True, tag="bench.sum"):
    """How many bytes came?"""


class SumAnswer(Message, frozen=True, kw_only=True, tag="bench.sum.answer"):
    """So many since the last time."""

    total_bytes: int


async def start(arguments: argparse.Namespace) -> Peer:
    link = JoinLink.parse(arguments.link)
    address = await fetch_address(link)
    if arguments.websocket:
        address = replace(address, servers=tuple(s for s in address.servers if s.startswith("ws")))
    config = PeerConfig(
        role="trainer",
        invite=link.invite,
        client_mode=arguments.relay,
        listen=() if arguments.relay else ("tcp://127.0.0.1:0",),
        trusted_lan=arguments.plain,
    )
    peer = Peer(address, link.run, Identity.temporary(), config)
    await peer.start()
    return peer


async def sink(peer: Peer) -> None:
    total = 0

    def count(incoming: Incoming[Blob]) -> None:
        nonlocal total
        total += sum(map(len, incoming.frames))

    def answer(_incoming: Incoming[Sum]) -> SumAnswer:
        nonlocal total
        result, total = SumAnswer(total_bytes=total), 0
        return result

    peer.links.handle(Blob, count)
    peer.links.handle(Sum, answer)
    await peer.reachability.decided()
    print(json.dumps({"peer": peer.peer_id}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def source(peer: Peer, target: str, total_bytes: int, repeats: int, path: str) -> None:
    links = peer.links
    deadline = time.monotonic() + 30
    while target not in peer.session.roster or links.statistics().peers[target].path != path:
        if time.monotonic() > deadline:
            raise SystemExit(f"no {path} path to {target} within 30 s")
        await asyncio.sleep(0.05)
    frame = bytes(FRAME_BYTES)
    count = total_bytes // FRAME_BYTES
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        for _ in range(count):
            await links.send(target, Blob(), [frame], timeout_seconds=TIMEOUT_SECONDS, bulk=True)
        await links.flush(target, timeout_seconds=TIMEOUT_SECONDS)
        seconds = time.perf_counter() - started
        answer = await links.request(target, Sum(), reply=SumAnswer, timeout_seconds=TIMEOUT_SECONDS)
        assert answer.message.total_bytes == count * FRAME_BYTES, answer.message
        if repeat:  # the first one warms up
            print(json.dumps({"mb_per_second": count * FRAME_BYTES / seconds / 1e6}), flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("link")
    parser.add_argument("part", choices=["sink", "source"])
    parser.add_argument("peer", nargs="?")
    parser.add_argument("megabytes", nargs="?", type=int, default=500)
    parser.add_argument("repeats", nargs="?", type=int, default=3)
    for flag in ("--relay", "--plain", "--websocket"):
        parser.add_argument(flag, action="store_true")
    arguments = parser.parse_args()
    peer = await start(arguments)
    try:
        if arguments.part == "sink":
            await sink(peer)
        else:
            path = "relay" if arguments.relay else "direct"
            await source(peer, arguments.peer, arguments.megabytes * 1_000_000, arguments.repeats, path)
    finally:
        await peer.close()


if __name__ == "__main__":
    run(main())
