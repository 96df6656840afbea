"""MB/s of hivemind's P2P stream between two processes on loopback, each with its own daemon.

    python hivemind_stream.py MEGABYTES MESSAGE_BYTES REPEATS

One client sends a stream of protobuf messages; the server counts the bytes and answers once at the end.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2

HANDLER = "sink"


async def serve(pipe: Any) -> None:
    p2p = await P2P.create()

    async def sink(
        requests: AsyncIterator[averaging_pb2.AveragingData], _context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        total = 0
        async for request in requests:
            total += len(request.tensor_part.buffer)
        yield averaging_pb2.AveragingData(weight=total)

    await p2p.add_protobuf_handler(HANDLER, sink, averaging_pb2.AveragingData, stream_input=True, stream_output=True)
    pipe.send(([str(address) for address in await p2p.get_visible_maddrs()], p2p.peer_id.to_base58()))
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)  # until told to stop
    await p2p.shutdown()


def server(pipe: Any) -> None:
    asyncio.run(serve(pipe))


async def measure(addresses: list[str], peer: str, total_bytes: int, message_bytes: int, repeats: int) -> float:
    p2p = await P2P.create(initial_peers=addresses)
    target = PeerID.from_base58(peer)
    payload = bytes(message_bytes)
    count = total_bytes // message_bytes

    async def send() -> AsyncIterator[averaging_pb2.AveragingData]:
        for _ in range(count):
            yield averaging_pb2.AveragingData(tensor_part=runtime_pb2.Tensor(buffer=payload))

    speeds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        answers = await p2p.iterate_protobuf_handler(target, HANDLER, send(), averaging_pb2.AveragingData)
        received = [answer.weight async for answer in answers]
        speeds.append(total_bytes / (time.perf_counter() - start) / 1e6)
        assert abs(received[0] - count * message_bytes) < 1e-6 * total_bytes, received
    await p2p.shutdown()
    return statistics.median(speeds[1:])  # the first one warms up


def main() -> None:
    megabytes, message_bytes, repeats = map(int, sys.argv[1:4])
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=server, args=(there,))
    process.start()
    try:
        if not here.poll(60):
            raise SystemExit("the hivemind server did not start within 60 s")
        addresses, peer = here.recv()
        speed = asyncio.run(measure(addresses, peer, megabytes * 1_000_000, message_bytes, repeats))
        print(json.dumps({"mb_per_second": speed, "message_bytes": message_bytes}))
    finally:
        here.send("stop")
        process.join(20)
        if process.is_alive():
            process.kill()


if __name__ == "__main__":
    main()
