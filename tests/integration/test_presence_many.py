"""Some dozens of peers on one hub: whoever comes, leaves or is killed is seen by all, and nobody is doubted wrongly.

The benchmark does the work, so this also sees to it that the benchmark works: `scripts/bench presence` is the same with
200 peers and more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from potluck.testing.processes import Children

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_presence.py"
NUM_PEERS = 24
PATIENCE_SECONDS = 100.0


async def test_joins_leaves_and_deaths_are_seen_by_all(children: Children) -> None:
    command = [sys.executable, BENCHMARK, "--peers", str(NUM_PEERS), "--idle-seconds", "1", "--json"]
    benchmark = children.spawn(command, name="benchmark", fresh=True)
    figures = json.loads((await benchmark.until_line('"num_peers"', PATIENCE_SECONDS)).string)
    assert await benchmark.until_exit() == (1 if figures["false_doubts"] else 0)
    assert figures["num_peers"] == NUM_PEERS
    assert figures["num_left"] == figures["num_killed"] == 5
    assert figures["missed"] == 0
    assert figures["leaves_told_as_deaths"] == 0
    # Beacons come each second, and 3 s of silence make a suspect: a machine that stood still so long proves nothing.
    assert figures["false_doubts"] == 0 or figures["longest_lag_seconds"] > 2
    assert figures["death_seconds"] < 2 + figures["longest_lag_seconds"]
    assert figures["cores"] < 0.5
