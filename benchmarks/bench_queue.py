"""A fleet's queue over WebSocket with TLS: messages/s, MB/s and p99 latency, and what 20 kills of the hub cost.

    scripts/bench queue [--json] [--repeats 3] [--sizes 4096,65536,1048576] [--kills 20] [--only potluck,redis]

One process puts (32 puts at a time), another takes (up to 64 at once) and says done. All contenders are up at the same
time and take turns. Each has TLS. Contenders:

    potluck        durable against a kill, with the ids of done items remembered
    potluck-sync   the same, each write synced to the disk
    websockets     a bare `websockets` server with an asyncio.Queue: keeps nothing
    redis          Redis Streams with redis-py, `appendfsync everysec`: what was answered survives a kill
    redis-sync     the same with `appendfsync always`: it also survives a power failure
    jetstream      nats-py on JetStream, a work queue with confirmed acknowledgements
    jetstream-sync the same, each write synced

Ratios are Potluck's throughput over the other's, with as much durability where the other has any.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_averaging import START_SECONDS, Contender
from harness import ROOT, environment_with, parser, report, say
from potluck.fleet.member import FleetConfig, FleetMember
from potluck.fleet.sync import AsyncFleet
from potluck.hub.access.member import Scopes
from potluck.hub.access.organise import Done, Organiser
from potluck.hub.access.queueing import CreateQueue
from potluck.hub.guard.guard import GuardConfig
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.queues import QueueDefinition, Rights
from potluck.hub.server import restarts
from potluck.hub.server.certificate import prepare_certificates
from potluck.hub.server.configuration import HubConfig
from potluck.hub.server.process import find_binary
from potluck.hub.subjects import Subjects
from potluck.peer.identity import Identity
from potluck.run.host import Host, HostConfig
from potluck.testing.ports import unused_tcp_port
from potluck.testing.queuework import QueueWork

RUN = "bench"
QUEUE = "jobs"
REQUIREMENTS = ("websockets==17.4", "redis==8.1.0", "nats-py[aiohttp]>=2.12")
BASELINES = ROOT / "benchmarks" / "baselines"
JOB_SECONDS = 150.0
NUMBERS = {4096: 3000, 65_536: 1200, 1 << 20: 120}
SYNCED_SHARE = 0.3  # so many of them where each is synced
NUM_LATENCIES = 200
RIVALS = {
    "potluck": ("websockets", "redis", "jetstream"),
    "potluck-sync": ("redis-sync", "jetstream-sync"),
}


class Queueing(Contender):
    """The processes of one queue: maybe a server, then a putter and a taker."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.rates: dict[int, list[float]] = {}
        self.latencies: dict[int, list[float]] = {}

    async def clients(self, *command: object) -> None:
        """Start the putter and the taker: `{role}` in the command is filled in."""
        for role in ("putter", "taker"):
            process = await self.spawn(*(str(part).replace("{role}", role) for part in command))
            await self.line(process, START_SECONDS)

    async def measure(self, kind: str, number: int, size: int) -> None:
        """One measurement; its figure is kept."""
        job = json.dumps({"kind": kind, "number": number, "size": size}).encode() + b"\n"
        pair = self.processes[-2:]
        for process in reversed(pair):
            assert process.stdin is not None
            process.stdin.write(job)
        putter, taker = [json.loads(await self.line(process, JOB_SECONDS)) for process in pair]
        if kind == "latency":
            self.latencies.setdefault(size, []).extend(taker["latencies"])
        else:
            self.rates.setdefault(size, []).append(number / (taker["ended"] - putter["began"]))

    def figures(self, size: int) -> dict[str, float]:
        """Medians, and the 99th percentile."""
        rate = statistics.median(self.rates[size])
        ordered = sorted(self.latencies[size])
        return {
            "messages_per_second": round(rate, 1),
            "megabytes_per_second": round(rate * size / 1e6, 2),
            "p50_milliseconds": round(1e3 * statistics.median(ordered), 2),
            "p99_milliseconds": round(1e3 * ordered[int(0.99 * (len(ordered) - 1))], 2),
        }


@asynccontextmanager
async def open_host(folder: Path, *, sync: bool) -> AsyncIterator[tuple[Host, AsyncFleet]]:
    """A host with one queue, and the fleet in its organiser's name."""
    hub = HubConfig(folder=folder, run=RUN, host="127.0.0.1", sync_always=sync)
    host = Host(HostConfig(hub=hub, guard=GuardConfig(run=RUN), peer=None))
    await host.start()
    try:
        assert host._hub is not None
        member = FleetMember(host.address, RUN, Identity(host._hub.keys.organiser_seed), FleetConfig())
        await member.open(is_member=True)
        async with AsyncFleet(member) as fleet:
            definition = QueueDefinition(name=QUEUE, max_bytes=1 << 30, lease_seconds=5, tries=1000)
            await member.ask("create", CreateQueue(definition=definition), Done)
            yield host, fleet
    finally:
        await host.stop()


async def start_potluck(name: str, folder: Path, stack: AsyncExitStack) -> Queueing:
    host, _ = await stack.enter_async_context(open_host(folder, sync=name.endswith("-sync")))
    assert host._hub is not None
    keys = host._hub.keys
    connection = await NatsConnection.connect(host.address, seed=keys.organiser_seed, run=RUN, name="main")
    organiser = Organiser(connection, Subjects(RUN), keys.organiser_public)
    rights: Rights = {QUEUE: ("put", "take")}
    _, secret = await organiser.create_invite(scopes=Scopes(roles=("worker",), queues=rights), uses=None)
    await connection.close()
    queueing = Queueing(name)
    link = str(replace(host.link, invite=secret))
    program = ROOT / "benchmarks" / "queue_member.py"
    await queueing.clients(sys.executable, program, "{role}", link, f"{folder}-{{role}}.nkey")
    return queueing


async def start_websockets(name: str, folder: Path, python: Path) -> Queueing:
    certificates = prepare_certificates(folder / "identity", folder / "tls", ["localhost"])
    queueing, port = Queueing(name), unused_tcp_port()
    program = BASELINES / "queue_websockets.py"
    server = await queueing.spawn(python, program, "server", port, certificates.chain_file)
    await queueing.line(server, START_SECONDS)
    await queueing.clients(python, program, "{role}", port, certificates.ca_file)
    return queueing


async def start_redis(name: str, folder: Path, python: Path) -> Queueing:
    binary = shutil.which("redis-server")
    if binary is None:
        raise SystemExit("redis-server is missing: apt-get install redis-server")
    certificates = prepare_certificates(folder / "identity", folder / "tls", ["localhost"])
    queueing, port = Queueing(name), unused_tcp_port()
    flush = "always" if name.endswith("-sync") else "everysec"
    tls = ["--tls-cert-file", certificates.chain_file, "--tls-key-file", certificates.chain_file]
    tls += [
        "--tls-ca-cert-file",
        certificates.ca_file,
        "--tls-auth-clients",
        "no",
        "--tls-port",
        str(port),
        "--port",
        "0",
    ]
    kept = ["--dir", folder, "--appendonly", "yes", "--appendfsync", flush, "--save", ""]
    await queueing.spawn(binary, "--bind", "127.0.0.1", *tls, *kept, "--logfile", folder / "redis.log")
    await _until_open(port)
    await queueing.clients(python, BASELINES / "queue_redis.py", "{role}", port, certificates.ca_file)
    return queueing


async def start_jetstream(name: str, folder: Path, python: Path) -> Queueing:
    certificates = prepare_certificates(folder / "identity", folder / "tls", ["localhost"])
    queueing, port = Queueing(name), unused_tcp_port()
    chain = json.dumps(str(certificates.chain_file))
    configuration = folder / "server.conf"
    configuration.write_text(
        f"""listen: "127.0.0.1:{unused_tcp_port()}"
max_payload: 2097152
jetstream {{ store_dir: {json.dumps(str(folder))}, sync_interval: {"always" if name.endswith("-sync") else '"2m"'} }}
websocket {{ listen: "127.0.0.1:{port}", compression: false, tls {{ cert_file: {chain}, key_file: {chain} }} }}
"""
    )
    await queueing.spawn(find_binary(), "-c", configuration, "-l", folder / "server.log")
    await _until_open(port)
    await queueing.clients(python, BASELINES / "queue_jetstream.py", "{role}", port, certificates.ca_file)
    return queueing


async def _until_open(port: int) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)


async def compare(names: list[str], sizes: list[int], repeats: int, folder: Path) -> dict[str, Queueing]:
    """All contenders, taking turns."""
    python = environment_with("queue", REQUIREMENTS, torch=False)
    starters = {"websockets": start_websockets, "redis": start_redis, "jetstream": start_jetstream}
    async with AsyncExitStack() as stack:
        contenders = {}
        for name in names:
            own = folder / name
            own.mkdir()
            if name.startswith("potluck"):
                contenders[name] = await start_potluck(name, own, stack)
            else:
                contenders[name] = await starters[name.removesuffix("-sync")](name, own, python)
            stack.push_async_callback(_end, contenders[name])
        for size in sizes:
            for turn in range(repeats + 1):
                for name, contender in contenders.items():
                    number = int(NUMBERS[size] * (SYNCED_SHARE if name.endswith("-sync") else 1))
                    await contender.measure("throughput", number if turn else number // 10, size)
                    if turn:
                        await contender.measure("latency", NUM_LATENCIES // repeats, size)
                    else:
                        del contender.rates[size]  # it warmed up
                say(f"{size} bytes, turn {turn} of {repeats}")
        return contenders


async def _end(contender: Queueing) -> None:
    """Clients leave by themselves; servers are told."""
    for process in contender.processes[:-2]:
        process.terminate()
    await contender.stop()


async def kill_often(folder: Path, kills: int) -> dict[str, int]:
    """Put, take and finish items without a pause while the hub's server is killed again and again."""
    # A host gives up a server that dies six times in two minutes. Here that is on purpose.
    restarts.WITHIN_SECONDS = 0.0
    async with open_host(folder, sync=False) as (host, fleet):
        work = QueueWork(fleet.queue(QUEUE), fleet.queue(QUEUE))
        for number in range(kills):
            await work.until_more(100)
            await kill_server(host)
            say(f"kill {number + 1} of {kills}: {len(work.put)} put, {len(work.done)} done")
        await work.until_more(100)
        await work.finish()
        return {
            "kills": kills,
            "put": len(work.put),
            "lost": len(work.lost),
            "delivered_again_after_done": len(work.again_after_done),
            "handed_out_again_before_done": work.num_handed_again,
        }


async def kill_server(host: Host) -> None:
    """SIGKILL; the host starts another one by itself."""
    assert host._hub is not None
    assert host._hub._process is not None
    os.kill(host._hub._process.pid, signal.SIGKILL)


def main() -> None:
    arguments = parser(__doc__, repeats=3)
    arguments.add_argument("--sizes", default=",".join(map(str, NUMBERS)), help="bytes of an item, with commas")
    arguments.add_argument("--kills", type=int, default=20, help="how often the hub's server is killed; 0: not at all")
    everyone = [name for ours, others in RIVALS.items() for name in (ours, *others)]
    arguments.add_argument("--only", default=",".join(everyone), help="contenders, with commas")
    options = arguments.parse_args()
    sizes, names = [int(size) for size in options.sizes.split(",")], options.only.split(",")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        if names != [""]:
            contenders = asyncio.run(compare(names, sizes, options.repeats, Path(folder)))
            for size in sizes:
                figures[str(size)] = {name: contender.figures(size) for name, contender in contenders.items()}
                rates = {name: each["messages_per_second"] for name, each in figures[str(size)].items()}
                for ours, others in RIVALS.items():
                    for other in others:
                        if ours in rates and other in rates:
                            figures[f"{ours}_over_{other}_{size}"] = round(rates[ours] / rates[other], 2)
        if options.kills:
            figures["kills"] = asyncio.run(kill_often(Path(folder) / "kills", options.kills))
    report(figures, as_json=options.json, title="queue")


if __name__ == "__main__":
    main()
