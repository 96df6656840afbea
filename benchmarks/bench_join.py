"""Seconds to load a state of 300 MB from two keepers: Potluck, and hivemind's load_state_from_peers.

    scripts/bench join [--json] [--repeats 5] [--role aux|trainer]

Both are up at the same time and take turns, so that whatever else the machine does hits both alike. Seconds are from
the joiner's question until it has the tensors; both travel uncompressed and encrypted. hivemind loads from one of its
two donors, as it always does. Keepers are aux peers here; trainers leave their lines to the training half of the time.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from typing import Any

import psutil

from bench_averaging import RUN, START_SECONDS, Contender, open_host
from harness import HIVEMIND, ROOT, environment_with, parser, report, say
from potluck.run.host import Host

NUM_TENSORS, ELEMENTS = 75, 1_000_000  # of 4 bytes: 300 MB
NUM_KEEPERS = 2
WARM_UP = 1
LOAD_SECONDS = 180.0


class Loading(Contender):
    """The processes of one way to load a state; the last one is the joiner."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.cpu_seconds: list[float] = []

    async def load(self) -> dict[str, Any]:
        """Load once; its time is kept, and what all processes together spent on it."""
        joiner, before = self.processes[-1], self._cpu_seconds()
        assert joiner.stdin is not None
        joiner.stdin.write(b"go\n")
        answer: dict[str, Any] = json.loads(await self.line(joiner, LOAD_SECONDS))
        assert answer["num_tensors"] == NUM_TENSORS, f"{self.name} did not load the state: {answer}"
        self.seconds.append(answer["seconds"])
        self.cpu_seconds.append(self._cpu_seconds() - before)
        return answer

    def _cpu_seconds(self) -> float:
        own = [psutil.Process(process.pid) for process in self.processes]
        times = [each.cpu_times() for one in own for each in [one, *one.children(recursive=True)]]
        return sum(time.user + time.system for time in times)

    def median_seconds(self) -> float:
        """Without what warmed up."""
        return statistics.median(self.seconds[WARM_UP:])

    def median_cpu_seconds(self) -> float:
        """The same, of processor time: this hardly depends on what else the machine does."""
        return statistics.median(self.cpu_seconds[WARM_UP:])


async def start_potluck(host: Host, invite: str, role: str) -> Loading:
    loading = Loading("potluck")
    arguments = {
        "servers": host.address.servers,
        "ca_pem": host.address.ca_pem,
        "run": RUN,
        "invite": invite,
        "role": role,
        "tensors": NUM_TENSORS,
        "elements": ELEMENTS,
        "keepers": NUM_KEEPERS,
    }
    program = ROOT / "benchmarks" / "join_member.py"
    for _ in range(NUM_KEEPERS):
        await loading.spawn(sys.executable, program, json.dumps({**arguments, "kind": "keeper"}))
    digests = {json.loads(await loading.line(keeper, START_SECONDS))["digest"] for keeper in loading.processes}
    assert len(digests) == 1, "the keepers do not keep the same state"
    joiner = await loading.spawn(
        sys.executable, program, json.dumps({**arguments, "kind": "joiner", "digest": digests.pop()})
    )
    await loading.line(joiner, START_SECONDS)
    return loading


async def start_hivemind() -> Loading:
    python = environment_with("hivemind", [HIVEMIND])
    loading = Loading("hivemind")
    program = ROOT / "benchmarks" / "baselines" / "hivemind_state.py"
    addresses: list[str] = []
    for kind in [*["donor"] * NUM_KEEPERS, "joiner"]:
        process = await loading.spawn(python, program, kind, NUM_TENSORS, ELEMENTS, *addresses)
        told = json.loads(await loading.line(process, START_SECONDS))["addresses"]
        addresses = addresses or told
    return loading


async def run(repeats: int, role: str) -> dict[str, Any]:
    async with open_host(roles=("trainer", "aux")) as (host, invite):
        contenders: list[Loading] = []
        try:
            contenders.append(await start_potluck(host, invite, role))
            contenders.append(await start_hivemind())
            for number in range(repeats + WARM_UP):
                answers = [await contender.load() for contender in contenders]
                checksums = [answer["checksum"] for answer in answers]
                assert max(checksums) - min(checksums) <= 1e-6 * max(map(abs, checksums)), f"{checksums} should be one"
                times = ", ".join(f"{contender.name} {contender.seconds[-1]:.3f} s" for contender in contenders)
                say(f"300 MB, load {number + 1}: {times}; chunks of each keeper {answers[0]['given']}")
        finally:
            for contender in contenders:
                await contender.stop()
    potluck, hivemind = (contender.median_seconds() for contender in contenders)
    return {
        "potluck_seconds": potluck,
        "hivemind_seconds": hivemind,
        "megabytes": 4 * NUM_TENSORS * ELEMENTS / 1e6,
        "keepers": NUM_KEEPERS,
        "keeper_role": role,
        "potluck_cpu_seconds": contenders[0].median_cpu_seconds(),
        "hivemind_cpu_seconds": contenders[1].median_cpu_seconds(),
        "potluck_megabytes_per_second": 4 * NUM_TENSORS * ELEMENTS / 1e6 / potluck,
        "ratio": hivemind / potluck,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--role", choices=("aux", "trainer"), default="aux", help="of the keepers")
    chosen = arguments.parse_args()
    figures = asyncio.run(run(chosen.repeats, chosen.role))
    report(figures, as_json=chosen.json, title="loading a state from two keepers")


if __name__ == "__main__":
    main()
