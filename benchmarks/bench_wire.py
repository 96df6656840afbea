"""The two NATS clients on the relay's connection: MB/s and processor time of `hub/bulk` against nats-py.

One nats-server with TLS, a sender and a receiver in processes of their own, messages of the size that relayed packets
have, over TCP and over WebSocket. The receiver acknowledges every few megabytes and the sender keeps within a window,
since the server cuts off a receiver that falls behind; both do so alike with either client. Each figure is the median
over the repeats; processor time is that of both processes together.

    scripts/bench wire --json
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from harness import parser, report, say
from potluck.cli.console import run
from potluck.hub.address import HubAddress
from potluck.hub.bulk.protocol import Buffer
from potluck.hub.bulk.wire import BulkWire
from potluck.hub.connection import Delivery
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.server.certificate import prepare_certificates
from potluck.testing.plainhub import PlainHub, PlainUser, TlsFiles

MIB = 1024 * 1024
HEADER_BYTES = 64  # a packet's header and seal, which travel before its payload
WINDOW_BYTES = 16 * MIB
ACKNOWLEDGED_BYTES = 4 * MIB
ENGINES = ("bulk", "nats-py")
TO_SINK, TO_SOURCE = "bench.sink", "bench.source"


class Engine(Protocol):
    """What the measurement needs of a client."""

    async def send(self, subject: str, header: bytes, payload: memoryview) -> None:
        """Publish a packet, as soon as there is room."""
        ...

    async def close(self) -> None:
        """Hang up."""
        ...


class Bulk:
    """The relay's own client. Parts are written as they are."""

    def __init__(self, address: HubAddress, seed: bytes, subject: str, came: Callable[[Buffer], None]) -> None:
        self._came = came
        self._changed = asyncio.Event()
        self._wire = BulkWire(address, seed=seed)
        self._wire.open([subject], self)

    async def until_connected(self) -> Bulk:
        while not self._wire.is_connected:
            await self._until_changed()
        return self

    async def send(self, subject: str, header: bytes, payload: memoryview) -> None:
        while not self._wire.publish(subject, [header, payload]):
            await self._until_changed()

    async def close(self) -> None:
        await self._wire.close()

    async def _until_changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def wire_connected(self) -> None:
        self._changed.set()

    def wire_writable(self) -> None:
        self._changed.set()

    def wire_lost(self, reason: str) -> None:
        raise SystemExit(f"the connection was lost: {reason}")

    def message_arrived(self, _subject: str, payload: memoryview) -> None:
        self._came(payload)

    def message_skipped(self, _subject: str, num_bytes: int) -> None:
        raise SystemExit(f"a message of {num_bytes} bytes was passed over")


class NatsPy:
    """The client for control messages. Messages are whole bytes objects."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, address: HubAddress, seed: bytes, subject: str, came: Callable[[Buffer], None]) -> NatsPy:
        connection = await NatsConnection.connect(address, seed=seed, run="bench", name="bulk")

        def took(delivery: Delivery) -> None:
            came(delivery.payload)

        await connection.subscribe(subject, took)
        return cls(connection)

    async def send(self, subject: str, header: bytes, payload: memoryview) -> None:
        await self._connection.publish(subject, b"".join((header, payload)))

    async def close(self) -> None:
        await self._connection.close()


async def open_engine(given: dict[str, Any], subject: str, came: Callable[[Buffer], None]) -> Engine:
    """The client that was asked for, connected."""
    address = HubAddress(servers=(given["server"],), ca_pem=given["ca_pem"])
    if given["engine"] == "bulk":
        return await Bulk(address, given["seed"].encode(), subject, came).until_connected()
    return await NatsPy.open(address, given["seed"].encode(), subject, came)


async def play_sink(given: dict[str, Any]) -> None:
    """Take all that comes, and acknowledge it; end with standard input."""
    due = asyncio.Event()
    total = 0

    def came(payload: Buffer) -> None:
        nonlocal total
        before, total = total, total + len(payload)
        if before // ACKNOWLEDGED_BYTES < total // ACKNOWLEDGED_BYTES:
            due.set()

    engine = await open_engine(given, TO_SINK, came)
    print("ready", flush=True)

    async def acknowledge() -> None:
        while True:
            await due.wait()
            due.clear()
            await engine.send(TO_SOURCE, total.to_bytes(8), memoryview(b""))

    task = asyncio.create_task(acknowledge())
    await asyncio.to_thread(sys.stdin.read)
    task.cancel()
    await engine.close()
    print(json.dumps({"seconds": time.process_time()}), flush=True)


class Window:
    """Bytes on their way."""

    def __init__(self) -> None:
        self.sent = 0
        self.acknowledged = 0
        self._moved = asyncio.Event()

    def came(self, payload: Buffer) -> None:
        self.acknowledged = int.from_bytes(payload)
        self._moved.set()

    async def until(self, allowed_bytes: int) -> None:
        while self.sent - self.acknowledged > allowed_bytes:
            self._moved.clear()
            await self._moved.wait()


async def play_source(given: dict[str, Any]) -> None:
    """Send, several times; tell how long each took and how much of a processor."""
    window = Window()
    engine = await open_engine(given, TO_SOURCE, window.came)
    header, payload = bytes(HEADER_BYTES), memoryview(bytes(given["message_bytes"] - HEADER_BYTES))
    total = given["megabytes"] * MIB
    for _ in range(given["repeats"]):
        began, used = time.perf_counter(), time.process_time()
        until = window.sent + total
        while window.sent < until:
            await window.until(WINDOW_BYTES)
            await engine.send(TO_SINK, header, payload)
            window.sent += given["message_bytes"]
        await window.until(0)
        print(json.dumps([time.perf_counter() - began, time.process_time() - used]), flush=True)
    await engine.close()


def measure(hub: PlainHub, users: list[PlainUser], server: str, engine: str, options: Any) -> tuple[float, float]:
    """MB/s, and seconds of a processor for each GB at both ends."""
    common = {
        "server": server,
        "ca_pem": hub.address().ca_pem,
        "engine": engine,
        "message_bytes": options.kilobytes * 1024,
        "megabytes": options.megabytes,
        "repeats": options.repeats,
    }
    command = [sys.executable, __file__, "--play"]
    given = [json.dumps({**common, "seed": user.seed.decode()}) for user in users]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "sink", given[0]], **pipes) as sink:
        assert sink.stdin is not None
        assert sink.stdout is not None
        assert sink.stdout.readline() == "ready\n"
        done = subprocess.run([*command, "source", given[1]], capture_output=True, text=True, timeout=300, check=False)
        sink.stdin.close()
        if done.returncode != 0:
            raise SystemExit(f"the source failed:\n{done.stderr[-4000:]}")
        used = json.loads(sink.stdout.readline())["seconds"]
    taken = [json.loads(line) for line in done.stdout.splitlines()]
    megabytes = options.megabytes * MIB / 1e6
    speed = megabytes / statistics.median(seconds for seconds, _ in taken)
    total = used / len(taken) + statistics.median(seconds for _, seconds in taken)
    return speed, total / megabytes * 1000


def main() -> None:
    options = parser(__doc__, repeats=5)
    options.add_argument("--megabytes", type=int, default=256, help="how much each repeat moves; a multiple of 4")
    options.add_argument("--kilobytes", type=int, default=512, help="of a message")
    options.add_argument("--play", nargs=2, help="for the processes that this one starts")
    arguments = options.parse_args()
    if arguments.play is not None:
        role, given = arguments.play
        run((play_sink if role == "sink" else play_source)(json.loads(given)))
        return
    figures: dict[str, Any] = {}
    users = [PlainUser.make(), PlainUser.make()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = prepare_certificates(folder / "authority", folder / "tls", ["127.0.0.1"])
        tls = TlsFiles(certificate=made.chain_file, key=made.chain_file, ca_pem=made.ca_pem)
        with PlainHub(folder / "hub", users, tls=tls) as hub:
            hub.start()
            for way, server in (("tls", hub.url), ("wss", hub.websocket_url)):
                for engine in ENGINES:
                    speed, seconds = measure(hub, users, server, engine, arguments)
                    say(f"{way} {engine:8} {speed:6.0f} MB/s, {seconds:.2f} s of a processor for each GB")
                    figures[f"{way}_{engine}_mb_per_second"] = speed
                    figures[f"{way}_{engine}_processor_seconds_per_gb"] = seconds
                figures[f"{way}_ratio"] = figures[f"{way}_bulk_mb_per_second"] / figures[f"{way}_nats-py_mb_per_second"]
    report(figures, as_json=arguments.json, title="two clients on the relay's connection")


if __name__ == "__main__":
    main()
