"""The spot runner through a trace of preemptions: workers alive against wanted, real processes of the local provider.

    scripts/bench spot --trace g4dn-spot.csv --compress 600 --picture docs/images/spot-trace.svg

Each machine is a process that carries its slot's line in its arguments. At every turn all processes are looked at: each
must belong to a slot, and carry that slot's line. In the end `down`, by a new provider as after a crash, ends all.
Without a trace, a generated one is used (seeded).
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

import harness
from potluck.spot.local import LocalProvider
from potluck.spot.preemption import Change, PreemptionConfig, compressed, generate, parse_trace
from potluck.spot.runner import Runner
from potluck.spot.supervision import Supervision, SupervisionConfig
from potluck.spot.tiers import Slot, slots

BANDWIDTH, NUM_WORKERS, NUM_AUX, AUX_MBIT = "4x200,8x100,4x50", 16, 4, 500.0
INTERVAL_SECONDS = 0.4
SVG_WIDTH, SVG_HEIGHT, MARGIN = 960, 320, 48


def machine(slot: Slot, place: Path) -> Sequence[str]:
    """A process that lives until it is ended, and says in its arguments which slot and line it has."""
    return [
        "/bin/sh",
        "-c",
        "while :; do sleep 1000; done",
        f"potluck-bench-{os.getpid()}",
        slot.name,
        f"{slot.bandwidth_mbit:g}",
    ]


def alive() -> list[tuple[str, str]]:
    """Slot and line of each such process, whoever knows of it."""
    found = []
    for process in psutil.process_iter(["cmdline", "status", "ppid"]):
        words = process.info["cmdline"] or []
        is_ours = f"potluck-bench-{os.getpid()}" in words and process.info["ppid"] == os.getpid()  # not a child of it
        if is_ours and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append((words[-2], words[-1]))
    return found


@dataclass
class Seen:
    """What came of it."""

    turns: list[dict[str, Any]] = field(default_factory=list)
    orphans: int = 0
    wrong_tiers: int = 0
    twice: int = 0


async def replay(trace: list[Change], compress: float, folder: Path) -> tuple[Seen, LocalProvider]:
    """Supervise through all of the trace, and some seconds more."""
    wanted = slots(num_workers=NUM_WORKERS, num_aux=NUM_AUX, bandwidth=BANDWIDTH, aux_bandwidth_mbit=AUX_MBIT)
    lines = {slot.name: f"{slot.bandwidth_mbit:g}" for slot in wanted}
    changes = compressed(trace, compress)
    provider = LocalProvider(folder, machine, trace=changes)
    config = SupervisionConfig(
        kinds=("process",),
        settle_seconds=0.0,
        first_wait_seconds=INTERVAL_SECONDS,
        longest_wait_seconds=2.0,
        short_life_seconds=0.0,
    )
    runner = Runner(provider, Supervision(wanted, config), say=lambda _text: None)
    seen, began = Seen(), time.monotonic()
    while (passed := time.monotonic() - began) < changes[-1].seconds + 5.0:
        standing = await runner.turn()
        nodes: set[str] = set()
        for change in changes:
            if change.seconds <= passed:
                nodes ^= {change.node}
        known = {each.slot for each in provider.machines()}  # first: looking takes the trace to the present
        there = alive()
        seen.orphans += sum(slot not in known for slot, _ in there)
        seen.wrong_tiers += sum(lines.get(slot) != line for slot, line in there)
        seen.twice += len(there) - len({slot for slot, _ in there})
        seen.turns.append(
            {
                "hours": passed * compress / 3600,
                "workers": standing.num_workers,
                "aux": standing.num_aux,
                "room": len(nodes),
            }
        )
        await asyncio.sleep(INTERVAL_SECONDS)
    return seen, provider


def picture(turns: Sequence[dict[str, Any]]) -> str:
    """Workers alive, those wanted, and what the trace has room for, over time, as SVG."""
    hours, most = turns[-1]["hours"], max(NUM_WORKERS, *(turn["room"] for turn in turns))

    def at(x: float, y: float) -> str:
        left = MARGIN + x / hours * (SVG_WIDTH - 2 * MARGIN)
        return f"{left:.1f},{SVG_HEIGHT - MARGIN - y / most * (SVG_HEIGHT - 2 * MARGIN):.1f}"

    def steps(key: str, colour: str) -> str:
        points = [at(turns[0]["hours"], turns[0][key])]
        for before, after in pairwise(turns):
            points += [at(after["hours"], before[key]), at(after["hours"], after[key])]
        return f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(points)}"/>'

    def text(x: float, y: float, words: str, colour: str, anchor: str = "start") -> str:
        return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'

    labels = [
        text(MARGIN, 24, "workers alive", "#2563eb"),
        text(MARGIN + 130, 24, f"wanted: {NUM_WORKERS}", "#dc2626"),
        text(MARGIN + 240, 24, "machines that the trace has", "#9ca3af"),
        text(SVG_WIDTH - MARGIN, SVG_HEIGHT - 12, f"{hours:.1f} hours", "#6b7280", "end"),
        *(text(MARGIN - 8, float(at(0, y).split(",")[1]) + 5, str(y), "#6b7280", "end") for y in (0, 8, 16, most)),
    ]
    line = f"{at(0, NUM_WORKERS)} {at(hours, NUM_WORKERS)}"
    wanted = f'<polyline fill="none" stroke="#dc2626" stroke-dasharray="6 4" points="{line}"/>'
    body = [steps("room", "#d1d5db"), wanted, steps("workers", "#2563eb"), *labels]
    size = f'viewBox="0 0 {SVG_WIDTH} {SVG_HEIGHT}"'
    frame = f'xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14"'
    return f'<svg {frame}><rect width="100%" height="100%" fill="white"/>' + "".join(body) + "</svg>\n"


def main() -> None:
    """Replay it once."""
    parser = harness.parser(__doc__, repeats=None)
    parser.add_argument("--trace", type=Path, help="a log of preemptions; else one is generated")
    parser.add_argument("--compress", type=float, default=600.0, help="so many times as fast")
    parser.add_argument("--picture", type=Path, help="write it as SVG")
    arguments = parser.parse_args()
    if arguments.trace is not None:
        trace = parse_trace(arguments.trace.read_text())
    else:
        trace = generate(PreemptionConfig(num_machines=20, bursts_per_hour=5.0), hours=9.0, seed=7)
    with tempfile.TemporaryDirectory(prefix="potluck-spot-") as scratch:
        seen, provider = asyncio.run(replay(trace, arguments.compress, Path(scratch) / "machines"))
        left_running = len(alive())
        removed = LocalProvider(Path(scratch) / "machines", machine).remove_everything()
        after = len(alive())
        provider.machines()
    could = [min(NUM_WORKERS, turn["room"]) for turn in seen.turns]
    answer = {
        "events": len(trace),
        "hours": round(trace[-1].seconds / 3600, 2),
        "compressed_by": arguments.compress,
        "turns": len(seen.turns),
        "preempted": provider.num_preempted,
        "started": provider.num_started,
        "orphans": seen.orphans,
        "wrong_tiers": seen.wrong_tiers,
        "slots_filled_twice": seen.twice,
        "share_of_possible_worker_time": round(sum(turn["workers"] for turn in seen.turns) / max(1, sum(could)), 4),
        "turns_with_fewer_aux": sum(turn["aux"] != NUM_AUX for turn in seen.turns),
        "removed_by_down": len(removed),
        "alive_before_and_after_down": [left_running, after],
    }
    if arguments.picture is not None:
        arguments.picture.write_text(picture(seen.turns))
    print(json.dumps(answer) if arguments.json else "\n".join(f"{key}: {value}" for key, value in answer.items()))


if __name__ == "__main__":
    main()
