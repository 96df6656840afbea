"""A slow receiver in a process of its own: python relaychild.py URL SEED LEAST_BYTES MOST_BYTES TOTAL_BYTES SENDER…

It blocks its event loop for a moment with every megabyte, and for long at times, as a process does that is swapped out
or waits for the interpreter's lock. It says what it got, and whether it was cut off.
"""

from __future__ import annotations

import asyncio
import sys
import time

from relaynodes import DEADLINE_SECONDS, node

from potluck.hub.address import HubAddress
from potluck.hub.keys import public_key
from potluck.link.relay.carrier import RelayConfig
from potluck.link.relay.credit import CreditConfig
from potluck.testing.plainhub import PlainUser

PAUSE_EVERY_BYTES = 32 * 1024 * 1024
PAUSE_SECONDS = 1.5
SECONDS_PER_BYTE = 1 / 40e6


async def receive(url: str, seed: str, credit: CreditConfig, total_bytes: int, senders: list[str]) -> None:
    user = PlainUser(seed=seed.encode(), peer=public_key(seed.encode()))
    async with node(HubAddress(servers=(url,)), user, RelayConfig(credit=credit)) as slow:
        slow.meet(*senders)
        paused_at = 0

        def pause(peer: str, payload: memoryview | None) -> None:
            nonlocal paused_at
            time.sleep(len(payload or b"") * SECONDS_PER_BYTE)
            if slow.events.num_bytes - paused_at >= PAUSE_EVERY_BYTES:
                paused_at = slow.events.num_bytes
                time.sleep(PAUSE_SECONDS)

        slow.events.on_packet = pause
        print("ready")
        end = time.monotonic() + DEADLINE_SECONDS
        while slow.events.num_bytes < total_bytes and not slow.carrier.statistics()["wire_losses"]:
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.02)
        figures = slow.carrier.statistics()
        print(f"bytes={slow.events.num_bytes} losses={figures['wire_losses']} beyond={figures['beyond_credit']}")
        for peer, digest in slow.events.digests.items():
            print(f"digest {peer} {digest.hexdigest()}")
        print("done")
        await asyncio.sleep(1.0)  # the last words to the senders, before the end


if __name__ == "__main__":
    url, seed, least_bytes, most_bytes, total_bytes, *senders = sys.argv[1:]
    credit = CreditConfig(least_bytes=int(least_bytes), most_bytes=int(most_bytes))
    asyncio.run(receive(url, seed, credit, int(total_bytes), senders))
