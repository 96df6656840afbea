"""How a round's time grows: with members (2 to 16) and with values (1 M to 100 M).

    scripts/bench growth [--json] [--repeats 5] [--write]

`--write` puts the table and the plot into docs/. All members share this machine's cores, so its work in all, not a
line between peers, is what grows here: with members × values. The last column shows it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterable
from typing import Any

from bench_averaging import WARM_UP_ROUNDS, open_host, start_potluck
from harness import ROOT, circumstances, environment_with, parser, report, say

BY_MEMBERS = [(members, 5) for members in (2, 4, 8, 16)]
BY_VALUES = [(4, millions) for millions in (1, 5, 25, 100)]
MILLION = 1_000_000
TABLE = ROOT / "docs" / "growth.md"
PLOT = ROOT / "docs" / "growth.svg"

Key = tuple[int, int]  # members, and millions of values of each
Seconds = dict[Key, dict[str, float]]


async def measure(members: int, millions: int, repeats: int) -> dict[str, float]:
    """Seconds of a round, encrypted and plain; one after the other, since 16 peers are enough at once."""
    seconds: dict[str, float] = {}
    for kind, plain in (("encrypted", False), ("plain", True)):
        async with open_host() as (host, invite):
            contender = await start_potluck(host, invite, members, millions * MILLION, plain=plain)
            try:
                for _ in range(repeats + WARM_UP_ROUNDS):
                    await contender.round()
            finally:
                await contender.stop()
            seconds[kind] = contender.median_seconds()
    say(f"{members} members, {millions} M values: " + ", ".join(f"{k} {v:.3f} s" for k, v in seconds.items()))
    return seconds


async def run(repeats: int) -> Seconds:
    return {key: await measure(*key, repeats) for key in sorted({*BY_MEMBERS, *BY_VALUES})}


def rows(results: Seconds, keys: Iterable[Key]) -> str:
    lines = []
    for members, millions in keys:
        both = results[members, millions]
        nanoseconds = 1e9 * both["encrypted"] / (members * millions * MILLION)
        lines.append(
            f"| {members} | {millions} M | {both['encrypted']:.3f} | {both['plain']:.3f} | {nanoseconds:.1f} |"
        )
    return "\n".join(lines)


def page(results: Seconds, repeats: int) -> str:
    about = circumstances()
    head = "| members | values each | encrypted, s | plain, s | encrypted, ns per member and value |\n"
    head += "|---|---|---|---|---|\n"
    return f"""# How a round's time grows

`scripts/bench growth --write`, {about["date"]}, commit {about["commit"]}, {about["cores"]} cores, \
medians of {repeats} rounds, float16 on the wire.
All members share the cores of one machine. So the time of a round is the work of all members, which grows with members
times values.

{head}{rows(results, BY_MEMBERS)}

{head}{rows(results, BY_VALUES)}

![Seconds per round over members, and over values](growth.svg)
"""


PLOT_PROGRAM = """
import json, sys
import matplotlib
matplotlib.use("svg")
matplotlib.rcParams["svg.fonttype"] = "none"
matplotlib.rcParams["svg.hashsalt"] = "potluck"
import matplotlib.pyplot as plt
given = json.load(sys.stdin)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
for axis, side in zip(axes, given["sides"]):
    for kind, marker in (("encrypted", "o"), ("plain", "s")):
        axis.plot(side["x"], side[kind], marker=marker, label=kind)
    axis.set(xscale="log", yscale="log", xlabel=side["label"], title=side["title"])
    axis.set_xticks(side["x"], [str(x) for x in side["x"]])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
axes[0].set_ylabel("seconds per round")
axes[0].legend()
figure.savefig(given["path"], metadata={"Date": None})
"""


def plot(results: Seconds) -> None:
    """Draw it, in an environment that has matplotlib."""
    python = environment_with("plot", ["matplotlib"], torch=False)

    def side(keys: list[Key], which: int, label: str, title: str) -> dict[str, Any]:
        lines = {kind: [results[key][kind] for key in keys] for kind in ("encrypted", "plain")}
        return {"x": [key[which] for key in keys], "label": label, "title": title, **lines}

    sides = [
        side(BY_MEMBERS, 0, "members", "5 M values each"),
        side(BY_VALUES, 1, "million values each", "4 members"),
    ]
    given = json.dumps({"sides": sides, "path": str(PLOT)})
    subprocess.run([str(python), "-c", PLOT_PROGRAM], input=given, text=True, check=True)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--write", action="store_true", help="write docs/growth.md and docs/growth.svg")
    chosen = arguments.parse_args()
    results = asyncio.run(run(chosen.repeats))
    if chosen.write:
        TABLE.write_text(page(results, chosen.repeats))
        plot(results)
    figures = {
        f"{members}x{millions}M_{kind}_seconds": value
        for (members, millions), both in results.items()
        for kind, value in both.items()
    }
    report(figures, as_json=chosen.json, title="growth of a round's time")


if __name__ == "__main__":
    main()
