"""A peer in the lab, told by lines of JSON what to do, and answering in the same way.

    python labpeer.py LINK [--client-mode] [--listen tcp://…] [--announce tcp://…]

It says {"event": "joined", …} once it is in, and "reachability" when it knows whether others can dial it. Then:

    {"do": "send", "to": PEER, "transfer": NAME, "bytes": N}   says "sent" once the other side has everything
    {"do": "report"}                                           says "report": paths, speeds, bytes, who was suspected
    {"do": "leave"}                                            leaves the run and ends

What it receives it checks piece by piece: each must be the next one, and what came is told by its hash.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from potluck import tasks
from potluck.cli.console import run
from potluck.errors import PotluckError
from potluck.hub.joinlink import JoinLink, fetch_address
from potluck.link.links import Incoming
from potluck.messages import Message
from potluck.peer.identity import Identity
from potluck.peer.roster import RosterEvent
from potluck.run.peer import Peer, PeerConfig

PIECE_BYTES = 256 * 1024
TIMEOUT_SECONDS = 60.0


class Piece(Message, frozen=True, kw_only=True, tag="lab.piece"):
    """One piece of a transfer; the bytes are its only frame."""

    transfer: str
    number: int
    is_last: bool


class Arrivals:
    """What has come of one transfer."""

    def __init__(self) -> None:
        self.num_pieces = 0
        self.num_out_of_place = 0  # lost, repeated, or overtaken
        self.num_bytes = 0
        self.digest = hashlib.sha256()

    def take(self, incoming: Incoming[Piece]) -> None:
        self.num_out_of_place += incoming.message.number != self.num_pieces
        self.num_pieces += 1
        for frame in incoming.frames:
            self.num_bytes += len(frame)
            self.digest.update(frame)

    def told(self) -> dict[str, Any]:
        return {
            "pieces": self.num_pieces,
            "out_of_place": self.num_out_of_place,
            "bytes": self.num_bytes,
            "sha256": self.digest.hexdigest(),
        }


class LabPeer:
    """The peer, its transfers, and what it has seen of others."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._arrivals: dict[str, Arrivals] = {}
        self._doubted: Counter[str] = Counter()  # how often each peer was suspect or dead
        self._tasks: set[asyncio.Task[None]] = set()
        peer.links.handle(Piece, self._receive)
        peer.session.roster.listen(self._note)

    def do(self, order: dict[str, Any]) -> None:
        """Begin what one line asks for."""
        if order["do"] == "report":
            self._report()
            return
        self.begin(self._send(order["to"], order["transfer"], order["bytes"]))

    def begin(self, work: Coroutine[None, None, None]) -> None:
        """Do this beside everything else."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def tell_reachability(self) -> None:
        found = await self._peer.reachability.decided()
        say("reachability", mode=found.mode, reason=found.reason)

    async def close(self) -> None:
        await tasks.end(*self._tasks)

    async def _send(self, to: str, transfer: str, num_bytes: int) -> None:
        links, digest = self._peer.links, hashlib.sha256()
        began = time.monotonic()
        starts = range(0, num_bytes, PIECE_BYTES)
        try:
            for number, start in enumerate(starts):
                frame = random.Random(f"{transfer} {number}").randbytes(min(PIECE_BYTES, num_bytes - start))
                digest.update(frame)
                piece = Piece(transfer=transfer, number=number, is_last=number == len(starts) - 1)
                await links.send(to, piece, [frame], timeout_seconds=TIMEOUT_SECONDS, bulk=True)
            await links.flush(to, timeout_seconds=TIMEOUT_SECONDS)
        except PotluckError as error:
            say("failed", transfer=transfer, error=repr(error))
        else:
            say("sent", transfer=transfer, sha256=digest.hexdigest(), seconds=time.monotonic() - began)

    def _receive(self, incoming: Incoming[Piece]) -> None:
        message = incoming.message
        arrivals = self._arrivals.setdefault(message.transfer, Arrivals())
        arrivals.take(incoming)
        if message.number == 0:
            say("receiving", transfer=message.transfer)
        if message.is_last:
            say("received", transfer=message.transfer, **arrivals.told())

    def _note(self, event: RosterEvent) -> None:
        self._doubted[event.peer] += event.change in ("suspect", "dead")

    def _report(self) -> None:
        peer, links = self._peer, self._peer.links.statistics()
        direct, relay = peer.direct.statistics(), peer.relay.statistics()
        say(
            "report",
            paths={other: each.path for other, each in links.peers.items()},
            up={other: each.upload_bytes_per_second for other, each in links.peers.items()},
            down={other: each.download_bytes_per_second for other, each in links.peers.items()},
            up_in_all=links.upload_bytes_per_second,
            down_in_all=links.download_bytes_per_second,
            transfers={name: arrivals.told() for name, arrivals in self._arrivals.items()},
            direct_bytes=direct["bytes_sent"] + direct["bytes_received"],
            line=direct["line_bytes_per_second"],
            relay_bytes=relay["bytes_sent"] + relay["bytes_received"],
            messages_lost=links.total.messages_lost,
            packets_resent=links.total.packets_resent,
            path_changes=links.total.path_changes,
            resets=links.total.resets,
            beacons=peer.session.statistics()["beacons"],
            roster={
                presence.peer: {
                    "state": presence.state,
                    "role": presence.card.role,
                    "addresses": presence.card.addresses,
                }
                for presence in peer.session.roster
            },
            doubted=dict(self._doubted),
            addresses=peer.session.card.addresses,
            lan_addresses=peer.session.card.lan_addresses,
            no_direct_path={other: peer.direct.why_no_path(other) for other in links.peers if other != peer.peer_id},
        )


def say(event: str, **fields: Any) -> None:
    """One line for the test."""
    print(json.dumps({"event": event, **fields}), flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("link")
    parser.add_argument("--client-mode", action="store_true")
    parser.add_argument("--listen", action="append", default=[])
    parser.add_argument("--announce", action="append", default=[])
    arguments = parser.parse_args()
    link = JoinLink.parse(arguments.link)
    address = await fetch_address(link)
    config = PeerConfig(
        invite=link.invite,
        client_mode=arguments.client_mode,
        listen=tuple(arguments.listen),
        announce=tuple(arguments.announce),
    )
    peer = Peer(address, link.run, Identity.temporary(), config)
    worker = LabPeer(peer)
    await peer.start()
    try:
        say("joined", peer=peer.peer_id, server=address.servers[0])
        worker.begin(worker.tell_reachability())
        orders = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
        )
        while (line := await orders.readline()) and (order := json.loads(line))["do"] != "leave":
            worker.do(order)
        transport.close()
    finally:
        await worker.close()
        await peer.close()


if __name__ == "__main__":
    run(main())
