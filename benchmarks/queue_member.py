"""A member of a fleet that puts or takes, for bench_queue.py: `queue_member.py putter|taker LINK KEY-FILE`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from potluck.fleet.queue import Item, Queue
from potluck.fleet.sync import AsyncFleet
from potluck.peer.identity import Identity

sys.path.insert(0, str(Path(__file__).with_name("baselines")))
from queueload import serve

QUEUE = "jobs"
WAIT_SECONDS = 5.0


class PotluckQueue:
    """The client; items are arrays, as fleets send them."""

    def __init__(self, queue: Queue[Any]) -> None:
        self._queue = queue

    async def put(self, data: bytes) -> None:
        await self._queue.put(np.frombuffer(data, np.uint8))

    async def take(self, most: int) -> list[tuple[Item[Any], bytes]]:
        while True:
            if items := await self._queue.take(most, WAIT_SECONDS):
                return [(item, item.value) for item in items]

    async def done(self, taken: list[Item[Any]]) -> None:
        await asyncio.gather(*(item.done() for item in taken))


async def main() -> None:
    role, link, key_file = sys.argv[1:4]
    fleet = await AsyncFleet.join(link, identity=Identity.open(Path(key_file)), websocket_only=True)
    async with fleet:
        await serve(PotluckQueue(fleet.queue(QUEUE)), role)


if __name__ == "__main__":
    uvloop.run(main())
