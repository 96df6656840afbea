"""Takes one item and dies of it: python poisonedtaker.py SERVER RUN SEED_FILE QUEUE."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from potluck.fleet.member import FleetMember
from potluck.fleet.sync import AsyncFleet
from potluck.hub.address import HubAddress
from potluck.peer.identity import Identity


async def main(server: str, run: str, seed: bytes, queue: str) -> None:
    member = FleetMember(HubAddress(servers=(server,)), run, Identity(seed))
    await member.open(is_member=True)
    while not (items := await AsyncFleet(member).queue(queue).take(1, wait_seconds=10)):
        pass
    print(f"took {items[0].value} at try {items[0].tries}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]).read_bytes(), sys.argv[4]))
