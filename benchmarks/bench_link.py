"""MB/s between two peers on this machine: direct, relayed, raw TCP, and hivemind's P2P stream.

Each figure is the median over the repeats of one stream of megabytes in one direction, between two processes, in one
run of this script. hivemind is measured with several message sizes, and its best counts.

    scripts/bench link --json
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import HIVEMIND, ROOT, environment_with, parser, report, run_baseline, say
from potluck.cli.console import run
from potluck.hub.guard.guard import GuardConfig
from potluck.hub.server.configuration import HubConfig
from potluck.run.host import Host, HostConfig

WAYS = {
    "direct_encrypted": (),
    "direct_plain": ("--plain",),
    "relay": ("--relay",),
    "relay_websocket": ("--relay", "--websocket"),
}
HIVEMIND_MESSAGE_BYTES = (128 * 1024, 512 * 1024, 2 * 1024 * 1024)


def measure(link: str, flags: tuple[str, ...], megabytes: int, repeats: int) -> float:
    """The median speed of one way."""
    command = [sys.executable, str(ROOT / "benchmarks" / "linkpeer.py"), link]
    with subprocess.Popen([*command, "sink", *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sink:
        assert sink.stdin is not None
        assert sink.stdout is not None
        try:
            peer = json.loads(sink.stdout.readline())["peer"]
            source = [*command, "source", peer, str(megabytes), str(repeats), *flags]
            done = subprocess.run(source, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode != 0:
                raise SystemExit(f"the source failed:\n{done.stderr[-4000:]}")
            return statistics.median(json.loads(line)["mb_per_second"] for line in done.stdout.splitlines())
        finally:
            sink.stdin.close()
            sink.wait(30)


async def measure_potluck(megabytes: int, repeats: int) -> dict[str, float]:
    """All of our ways, through one host with TLS."""
    with tempfile.TemporaryDirectory() as folder:
        hub = HubConfig(folder=Path(folder), run="bench", host="127.0.0.1", advertised_hosts=("127.0.0.1",))
        host = Host(HostConfig(hub=hub, guard=GuardConfig(run="bench"), peer=None))
        await host.start()
        try:
            figures = {}
            for name, flags in WAYS.items():
                figures[name] = await asyncio.to_thread(measure, str(host.link), flags, megabytes, repeats)
                say(f"{name:20} {figures[name]:8.0f} MB/s")
            return figures
        finally:
            await host.stop()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--megabytes", type=int, default=1000, help="how much each stream moves")
    arguments = options.parse_args()
    hivemind = environment_with("hivemind", [HIVEMIND])
    figures = run(measure_potluck(arguments.megabytes, arguments.repeats))
    figures["raw_tcp"] = run_baseline(sys.executable, "raw_tcp.py", arguments.megabytes, 512 * 1024, arguments.repeats)[
        "mb_per_second"
    ]
    for size in HIVEMIND_MESSAGE_BYTES:
        result = run_baseline(hivemind, "hivemind_stream.py", arguments.megabytes, size, arguments.repeats)
        figures[f"hivemind_{size // 1024}k"] = result["mb_per_second"]
        say(f"hivemind, {size // 1024} KiB    {result['mb_per_second']:8.0f} MB/s")
    best = figures["hivemind"] = max(value for name, value in figures.items() if name.startswith("hivemind_"))
    figures["ratio_direct"] = figures["direct_encrypted"] / best
    figures["ratio_plain"] = figures["direct_plain"] / best
    figures["ratio_relay"] = figures["relay"] / best
    figures["ratio_relay_ws"] = figures["relay_websocket"] / best
    report(figures, as_json=arguments.json, title="MB/s between two peers on this machine")


if __name__ == "__main__":
    main()
