"""The load that all queues of the benchmark carry: one process puts, another takes, both by the same client.

A client has `put(data)`, which returns when the item is kept, `take(most)`, which waits for at least one, and
`done(taken)`. For each measurement the parent writes a line of JSON to each process, and reads one from it.

    throughput   so many puts at a time; messages a second from the first put to the last done
    latency      one item at a time, at a distance; from before its put until it is taken
"""

from __future__ import annotations

import asyncio
import json
import ssl
import struct
import sys
import time
from typing import Any, Protocol

PUTS_AT_A_TIME = 32
TAKEN_AT_ONCE = 64
DISTANCE_SECONDS = 0.01
PATIENCE_SECONDS = 120.0


class Client(Protocol):
    """One connection to a queue."""

    async def put(self, data: bytes) -> None: ...

    async def take(self, most: int) -> list[tuple[Any, bytes]]:
        """What `done` wants to see again, and the data."""
        ...

    async def done(self, taken: list[Any]) -> None: ...


async def serve(client: Client, role: str) -> None:
    """Do what the parent says until it has no more to say."""
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        job = json.loads(line)
        async with asyncio.timeout(PATIENCE_SECONDS):
            answer = await (_put(client, **job) if role == "putter" else _take(client, **job))
        print(json.dumps(answer), flush=True)


async def _put(client: Client, kind: str, number: int, size: int) -> dict[str, float]:
    filling = bytes(size - 8)
    began = time.monotonic()
    if kind == "latency":
        for _ in range(number):
            await client.put(struct.pack("<d", time.monotonic()) + filling)
            await asyncio.sleep(DISTANCE_SECONDS)
    else:
        left = iter(range(number))

        async def putter() -> None:
            for _ in left:
                await client.put(struct.pack("<d", time.monotonic()) + filling)

        await asyncio.gather(*(putter() for _ in range(PUTS_AT_A_TIME)))
    return {"began": began, "ended": time.monotonic()}


async def _take(client: Client, kind: str, number: int, size: int) -> dict[str, Any]:
    latencies: list[float] = []
    while len(latencies) < number:
        taken = await client.take(TAKEN_AT_ONCE)
        now = time.monotonic()
        for _, data in taken:
            assert len(data) == size, f"{len(data)} bytes came instead of {size}"
            latencies.append(now - struct.unpack_from("<d", data)[0])
        await client.done([handle for handle, _ in taken])
    return {"ended": time.monotonic(), "latencies": latencies if kind == "latency" else []}


def tls(ca_file: str) -> ssl.SSLContext:
    """Trust this authority."""
    return ssl.create_default_context(cafile=ca_file)
