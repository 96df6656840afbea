"""A volunteer that claims a billion samples: what counts of it, and who is told, by the real commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import Terminal, events
from organiser import LONG_SECONDS, Organiser, end, until_epoch

from potluck.testing.polling import poll_until_sync

LYING_PEER = (sys.executable, str(Path(__file__).with_name("lyingpeer.py")))
BILLION = 10**9


@pytest.mark.timeout(500)
def test_a_billion_samples_that_nobody_made_count_for_little(terminal: Terminal) -> None:
    organiser = Organiser(terminal)
    organiser.edit('aggregator = "mean"', 'aggregator = "median"')
    host, link = organiser.host()
    honest = [organiser.join(link, name, "--batch-size", "32") for name in ("Ada", "Grace")]
    began = max(until_epoch(process, 2)["epoch"] for process in honest)
    liar = organiser.join(link, "Mallory", "--batch-size", "32", program=LYING_PEER)
    until_epoch(liar, began + 8)

    def named() -> list[dict[str, Any]]:
        return [each for each in events(host) if each["event"] == "alarm" and "Mallory claims" in str(each)]

    poll_until_sync(named, LONG_SECONDS, lambda: f"Mallory is named: {host.output()[-3000:]}")
    assert "claims 1e+09 samples" in host.output(), "in the log"
    board = terminal.ask("leaderboard", link, patience_seconds=LONG_SECONDS)
    rows = {row["name"]: row for row in board["peers"]}
    assert rows["Mallory"]["epochs"] >= 5
    most = max(rows[name]["samples"] / rows[name]["epochs"] for name in ("Ada", "Grace"))
    # Sixteen times what they usually give, or give just now, if that is more: twice as much on average at most.
    assert rows["Mallory"]["samples"] / rows["Mallory"]["epochs"] <= 2 * 16 * most
    assert rows["Mallory"]["samples"] < BILLION / 100
    for process in (liar, *honest, host):
        end(process)
