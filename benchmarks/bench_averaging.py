"""Seconds per averaging round: Potluck encrypted and plain, hivemind's averager, gloo's all-reduce.

    scripts/bench averaging [--json] [--repeats 9] [--only large|small]

All contenders are up at the same time and take turns round by round, so that whatever else the machine does hits all
of them alike. A round's time is from telling all members to start until the last one has its averages. Members have
different values before each round and the same after it, or the measurement ends.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from harness import HIVEMIND, ROOT, environment_with, parser, report, say
from potluck.hub.access.member import Scopes
from potluck.hub.access.organise import Organiser
from potluck.hub.guard.guard import GuardConfig
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.presence import Role
from potluck.hub.server.configuration import HubConfig
from potluck.hub.subjects import Subjects
from potluck.run.host import Host, HostConfig
from potluck.testing.ports import unused_tcp_port

RUN = "bench"
START_SECONDS = 180.0
ROUND_SECONDS = 180.0
WARM_UP_ROUNDS = 2
SETTLE_SECONDS = 1.0
MOST_INCOMPLETE = 3  # of hivemind's, which loses parts now and then
FLOAT32_BYTES = 4
SIZES = {"large": (4, 25_000_000), "small": (8, 1_000_000)}


class Contender:
    """The processes of one way to average."""

    def __init__(self, name: str, *, most_incomplete: int = 0) -> None:
        """A round in which somebody does not get all averages is taken again, so often at most."""
        self.name = name
        self.num_incomplete = 0
        self._most_incomplete = most_incomplete
        self.processes: list[asyncio.subprocess.Process] = []
        self.seconds: list[float] = []
        self.answers: list[dict[str, Any]] = []

    async def spawn(self, *command: object) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*map(str, command), stdin=pipe, stdout=pipe)
        self.processes.append(process)
        return process

    async def line(self, process: asyncio.subprocess.Process, timeout_seconds: float) -> str:
        assert process.stdout is not None
        async with asyncio.timeout(timeout_seconds):
            line = (await process.stdout.readline()).decode().strip()
        if not line:
            raise SystemExit(f"a process of {self.name} ended before its time, see above")
        return line

    async def round(self) -> None:
        """One round; its time is kept. One that was incomplete does not count."""
        for _ in range(1 + self._most_incomplete):
            if await self._is_complete_round():
                return
            self.num_incomplete += 1
            await asyncio.sleep(SETTLE_SECONDS)
        raise AssertionError(f"{self.name} does not do what is measured: not everybody gets all averages")

    async def _is_complete_round(self) -> bool:
        started = time.perf_counter()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
        lines = await asyncio.gather(*(self.line(process, ROUND_SECONDS) for process in self.processes))
        seconds = time.perf_counter() - started
        self.answers = [json.loads(line) for line in lines]
        checksums = [answer["checksum"] for answer in self.answers]
        is_same = max(checksums) - min(checksums) <= 1e-2 * max(1.0, *map(abs, checksums))
        if is_same and all(answer.get("holds", True) for answer in self.answers):
            self.seconds.append(seconds)
            return True
        say(f"{self.name}: after {seconds:.3f} s not everybody had all averages, {checksums}")
        return False

    def median_seconds(self) -> float:
        """Without the rounds that warmed up."""
        return statistics.median(self.seconds[WARM_UP_ROUNDS:])

    async def stop(self) -> None:
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self.processes:
            try:
                async with asyncio.timeout(30.0):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def start_potluck(host: Host, invite: str, members: int, elements: int, *, plain: bool) -> Contender:
    contender = Contender("potluck plain" if plain else "potluck")
    for index in range(members):
        arguments = {
            "index": index,
            "members": members,
            "elements": elements,
            "servers": host.address.servers,
            "ca_pem": host.address.ca_pem,
            "run": RUN,
            "invite": invite,
            "plain": plain,
        }
        program = ROOT / "benchmarks" / "averaging_member.py"
        await contender.spawn(sys.executable, program, json.dumps(arguments))
    for process in contender.processes:
        await contender.line(process, START_SECONDS)
    return contender


async def start_hivemind(members: int, elements: int) -> Contender:
    python = environment_with("hivemind", [HIVEMIND])
    contender = Contender("hivemind", most_incomplete=MOST_INCOMPLETE)
    addresses: list[str] = []
    for index in range(members):
        program = ROOT / "benchmarks" / "baselines" / "hivemind_averager.py"
        process = await contender.spawn(python, program, index, members, elements, *addresses)
        addresses = addresses or json.loads(await contender.line(process, START_SECONDS))["addresses"]
    for process in contender.processes[1:]:
        await contender.line(process, START_SECONDS)
    return contender


async def start_gloo(members: int, elements: int) -> Contender:
    contender = Contender("gloo")
    port = unused_tcp_port()
    for rank in range(members):
        program = ROOT / "benchmarks" / "baselines" / "gloo_allreduce.py"
        await contender.spawn(sys.executable, program, rank, members, elements, port)
    for process in contender.processes:
        await contender.line(process, START_SECONDS)
    return contender


@asynccontextmanager
async def open_host(roles: tuple[Role, ...] = ("trainer",)) -> AsyncIterator[tuple[Host, str]]:
    """A hub with a guard, and an invite."""
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        hub = HubConfig(folder=Path(folder), run=RUN, host="127.0.0.1", websocket_port=None)
        host = Host(HostConfig(hub=hub, guard=GuardConfig(run=RUN), peer=None))
        await host.start()
        try:
            assert host._hub is not None
            keys = host._hub.keys
            connection = await NatsConnection.connect(host.address, seed=keys.organiser_seed, run=RUN, name="main")
            organiser = Organiser(connection, Subjects(RUN), keys.organiser_public)
            _, invite = await organiser.create_invite(
                scopes=Scopes(roles=roles, coordinates=True, trusted=True), uses=None
            )
            await connection.close()
            yield host, invite
        finally:
            await host.stop()


async def measure(members: int, elements: int, repeats: int) -> dict[str, Contender]:
    """All contenders, taking turns. Potluck's two kinds need a hub each: their members must not meet."""
    async with open_host() as (host, invite), open_host() as (plain_host, plain_invite):
        contenders: list[Contender] = []
        try:
            contenders.append(await start_potluck(host, invite, members, elements, plain=False))
            contenders.append(await start_potluck(plain_host, plain_invite, members, elements, plain=True))
            contenders.append(await start_gloo(members, elements))
            contenders.append(await start_hivemind(members, elements))
            for number in range(repeats + WARM_UP_ROUNDS):
                for contender in contenders:
                    await asyncio.sleep(SETTLE_SECONDS)  # what the one before still has to do is not ours to pay
                    await contender.round()
                times = ", ".join(f"{contender.name} {contender.seconds[-1]:.3f} s" for contender in contenders)
                say(f"{members} peers, {elements / 1e6:g} M each, round {number + 1}: {times}")
        finally:
            for contender in contenders:
                await contender.stop()
        return {contender.name: contender for contender in contenders}


def figures_of(size: str, contenders: dict[str, Contender], elements: int) -> dict[str, Any]:
    seconds = {name: contender.median_seconds() for name, contender in contenders.items()}
    extra = max(answer["extra_bytes"] for answer in contenders["potluck"].answers)
    figures: dict[str, Any] = {f"{size}_{name.replace(' ', '_')}_seconds": value for name, value in seconds.items()}
    figures[f"{size}_hivemind_incomplete_rounds"] = contenders["hivemind"].num_incomplete
    figures[f"{size}_extra_memory_ratio"] = extra / (FLOAT32_BYTES * elements)
    return figures


async def run(sizes: list[str], repeats: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for size in sizes:
        members, elements = SIZES[size]
        contenders = await measure(members, elements, repeats)
        figures |= figures_of(size, contenders, elements)
    if "large" in sizes:
        figures["ratio_vs_hivemind"] = figures["large_hivemind_seconds"] / figures["large_potluck_seconds"]
        figures["ratio_plain_vs_gloo"] = figures["large_potluck_plain_seconds"] / figures["large_gloo_seconds"]
        figures["peak_extra_memory_ratio"] = figures["large_extra_memory_ratio"]
    if "small" in sizes:
        figures["ratio_small_vs_hivemind"] = figures["small_hivemind_seconds"] / figures["small_potluck_seconds"]
    return figures


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=sorted(SIZES), help="only one of the two sizes")
    chosen = arguments.parse_args()
    sizes = [chosen.only] if chosen.only else list(SIZES)
    figures = asyncio.run(run(sizes, chosen.repeats))
    report(figures, as_json=chosen.json, title="averaging, seconds per round")


if __name__ == "__main__":
    main()
