"""nats-py on JetStream, over WebSocket with TLS: a work queue, a pull consumer, confirmed acknowledgements."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import nats
import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, RetentionPolicy, StreamConfig
from queueload import serve, tls

STREAM, SUBJECT, CONSUMER = "jobs", "jobs.put", "takers"
FETCH_SECONDS = 5.0


class JetStreamQueue:
    """The client."""

    def __init__(self, stream: JetStreamContext, subscription: Any) -> None:
        self._stream = stream
        self._subscription = subscription

    async def put(self, data: bytes) -> None:
        await self._stream.publish(SUBJECT, data, timeout=60)

    async def take(self, most: int) -> list[tuple[Any, bytes]]:
        while True:
            with contextlib.suppress(nats.errors.TimeoutError):
                return [(message, message.data) for message in await self._subscription.fetch(most, FETCH_SECONDS)]

    async def done(self, taken: list[Msg]) -> None:
        await asyncio.gather(*(message.ack_sync(timeout=60) for message in taken))


async def main() -> None:
    role, port, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    connection = await nats.connect(
        f"wss://localhost:{port}", tls=tls(file), pending_size=64 << 20, max_reconnect_attempts=0
    )
    stream = connection.jetstream(publish_async_max_pending=64)
    config = StreamConfig(name=STREAM, subjects=[SUBJECT], retention=RetentionPolicy.WORK_QUEUE)
    with contextlib.suppress(nats.js.errors.BadRequestError):
        await stream.add_stream(config)
    subscription = None
    if role == "taker":
        consumer = ConsumerConfig(max_ack_pending=65_536)
        subscription = await stream.pull_subscribe(SUBJECT, CONSUMER, stream=STREAM, config=consumer)
    await serve(JetStreamQueue(stream, subscription), role)
    await connection.close()


asyncio.run(main())
