"""`potluck run`: an organiser steers a run of real processes, by the real commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commandline import Terminal, events
from organiser import LONG_SECONDS, Organiser, end, until_epoch

from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess


def until_progress(process: ManagedProcess, **wanted: Any) -> dict[str, Any]:
    def find() -> dict[str, Any] | None:
        found = [e for e in events(process) if e["event"] == "progress" and wanted.items() <= e.items()]
        assert found or process.exit_code is None, process.output()
        return found[-1] if found else None

    return poll_until_sync(find, LONG_SECONDS, lambda: f"{wanted} at {process.name}: {process.output()[-2000:]}")


@pytest.mark.timeout(400)
def test_pause_roll_back_change_and_resume(terminal: Terminal) -> None:
    organiser = Organiser(terminal)
    host, link = organiser.host()
    place = ("--run", "waves", "--folder", terminal.folder / "hub")
    ada = organiser.join(link, "Ada", "--batch-size", "64")
    until_epoch(ada, 12)
    hub = terminal.folder / "hub"
    poll_until_sync(lambda: list(hub.rglob("epoch-*.json")) or None, LONG_SECONDS, "the host to keep states")

    def steer(*arguments: str | Path) -> Any:
        return terminal.ask("run", *arguments, *place, patience_seconds=LONG_SECONDS)

    assert steer("pause", "--by", "Grace", "--reason", "to look at it")["paused"]
    assert until_progress(ada, paused=True)["samples_per_second"] == 0
    assert {"event": "paused", "by": "Grace", "reason": "to look at it"} in events(ada)

    def seen_resting() -> Any:
        seen = terminal.ask("monitor", link, "--once", patience_seconds=LONG_SECONDS)
        return seen if seen["samples_per_second"] == 0 else None

    seen = poll_until_sync(seen_resting, LONG_SECONDS, "the monitor to see that nobody computes")
    assert (seen["paused"], seen["due_in_seconds"]) == (True, None)
    assert (seen["paused_by"], seen["paused_because"]) == ("Grace", "to look at it")
    epochs = [int(path.stem.removeprefix("epoch-")) for path in hub.rglob("epoch-*.json")]
    newest = max(epochs)  # older ones make room for newer
    listed = {state["epoch"]: state for state in steer("rollback")}
    assert "this host" in listed[newest]["keepers"]
    holders = listed[max(listed)]["keepers"]  # of the newest: where the host has just saved it, its own backup counts
    assert "Ada" in holders or holders == ["this host"]
    done = steer("rollback", "--to", str(newest), "--by", "Grace")
    assert done["done"], host.output()
    assert f"goes back to the state of epoch {newest}" in host.output().replace("\n", " ")
    assert steer("set", "learning_rate=2e-3", "--by", "Grace")["from_epoch"] == done["epoch"] + 2
    assert steer("set", "learning_rate=2e-3")["from_epoch"] is None, "there is nothing to change any more"
    assert not steer("resume", "--by", "Grace")["paused"]
    until_epoch(ada, done["epoch"] + 3)
    assert {"event": "resumed", "by": "Grace", "reason": ""} in events(ada)
    terminal.fresh = True  # from here on as for a person, with the imports
    log = steer("log")
    told = ["paused", f"back to epoch {newest}", "optimizer.learning_rate = 2e-3", "resumed"]
    assert [row["what"] for row in log] == told
    assert (log[0]["by"], log[0]["reason"]) == ("Grace", "to look at it")
    assert log[2]["from_epoch"] == done["epoch"] + 2
    receipts = terminal.ask("receipts", "--link", link, patience_seconds=LONG_SECONDS)
    [row] = receipts["receipts"]
    assert row["signed by"] == "coordinators"
    ranked = terminal.ask("leaderboard", link, "--receipts", patience_seconds=LONG_SECONDS)["peers"]
    [given] = [each for each in ranked if each["peer"] == row["peer"]]
    assert given["samples"] > 0 < given["receipts"]
    assert (row["run"], row["name"], receipts["not_genuine"]) == ("waves", "Ada", 0)
    assert row["samples"] >= 256 * row["epochs"] > 0
    end(ada)
    end(host)
