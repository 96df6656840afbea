"""Redis Streams with redis-py: XADD, XREADGROUP, XACK and XDEL, over TLS."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import redis.asyncio
from queueload import PUTS_AT_A_TIME, serve

STREAM, GROUP = "jobs", "takers"
BLOCK_MILLISECONDS = 5000


class RedisQueue:
    """The client. redis-py has one command on its way per connection, so puts at a time need as many connections."""

    def __init__(self, connection: redis.asyncio.Redis) -> None:
        self._redis = connection

    async def put(self, data: bytes) -> None:
        await self._redis.xadd(STREAM, {"data": data})

    async def take(self, most: int) -> list[tuple[Any, bytes]]:
        while True:
            answer = await self._redis.xreadgroup(GROUP, "one", {STREAM: ">"}, count=most, block=BLOCK_MILLISECONDS)
            if answer:
                streams = answer.items() if isinstance(answer, dict) else answer
                [(_, entries)] = streams
                if isinstance(answer, dict):
                    [entries] = entries
                return [(name, fields[b"data"]) for name, fields in entries]

    async def done(self, taken: list[Any]) -> None:
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.xack(STREAM, GROUP, *taken)
            pipeline.xdel(STREAM, *taken)
            await pipeline.execute()


async def main() -> None:
    role, port, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    pool = redis.asyncio.BlockingConnectionPool(
        host="localhost",
        port=port,
        connection_class=redis.asyncio.SSLConnection,
        ssl_ca_certs=file,
        max_connections=PUTS_AT_A_TIME + 1,
        timeout=60,
        socket_timeout=60,
        socket_connect_timeout=60,
    )
    connection = redis.asyncio.Redis(connection_pool=pool)
    try:
        await connection.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
    except redis.ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise
    await serve(RedisQueue(connection), role)
    await connection.aclose()


asyncio.run(main())
