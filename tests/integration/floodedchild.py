"""The victim of a flood, in a process of its own: python floodedchild.py URL SEED TOLERATED_BYTES PEER…

It is slow, as relaychild.py is, and has links over the relay to the peers named. Whoever asks is told the digest of
what it sent. It prints its figures again and again.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time

from relaynodes import QUICK, SUBJECTS, Answer, Question, keys_of, presence

from potluck.clock import SystemClock
from potluck.hub.address import HubAddress
from potluck.hub.bulk.wire import BulkWire
from potluck.hub.keys import public_key
from potluck.link.links import Incoming, Links
from potluck.link.relay.carrier import RelayCarrier, RelayConfig
from potluck.link.relay.penalties import PenaltyConfig

SECONDS_PER_BYTE = 1 / 40e6


class SlowWire(BulkWire):
    """Takes its time for each message, and blocks everything else meanwhile."""

    def message_arrived(self, subject: str, payload: memoryview) -> None:
        time.sleep(len(payload) * SECONDS_PER_BYTE)
        super().message_arrived(subject, payload)


async def suffer(url: str, seed: bytes, tolerated_bytes: int, peers: list[str]) -> None:
    me = public_key(seed)
    links = Links(me, "s", SystemClock())
    config = RelayConfig(penalties=PenaltyConfig(tolerated_bytes=tolerated_bytes))
    relay = RelayCarrier(
        links, me, SUBJECTS, SlowWire(HubAddress(servers=(url,)), seed=seed, config=QUICK), keys_of(me), config=config
    )
    links.add_carrier(relay)

    async def answer(incoming: Incoming[Question]) -> tuple[Answer, list[memoryview]]:
        digest = hashlib.blake2b(b"".join(incoming.frames)).hexdigest()
        return Answer(text=digest), []

    links.handle(Question, answer)
    await relay.start()
    for peer in peers:
        links.update_peer(presence(peer))
    while True:
        figures = relay.statistics()
        print(f"losses={figures['wire_losses']} floods={figures['floods']} shut_out={figures['shut_out']}", flush=True)
        await asyncio.sleep(0.2)


if __name__ == "__main__":
    url, seed, tolerated_bytes, *peers = sys.argv[1:]
    asyncio.run(suffer(url, seed.encode(), int(tolerated_bytes), peers))
