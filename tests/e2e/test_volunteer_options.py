"""What volunteers may say about their machine, and how they leave: the real commands, in real processes."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import PATIENCE_SECONDS, Terminal, events, until_event
from organiser import LONG_SECONDS, ONE_THREAD, Organiser, end, until_epoch

from potluck.hub.joinlink import JoinLink

CAP_BYTES_PER_SECOND = 1e6  # 8 Mbit


def zone_where_it_is(clock: str) -> str:
    """A time zone, as TZ has it, by whose clocks it is that time of the day right now."""
    hours, minutes, seconds = map(int, clock.split(":"))
    wanted = hours * 3600 + minutes * 60 + seconds
    behind = int(time.time() - wanted) % 86400
    return f"XXX+{behind // 3600}:{behind // 60 % 60:02}:{behind % 60:02}"


@pytest.mark.timeout(400)
def test_hours_caps_and_ways_to_leave(terminal: Terminal) -> None:
    organiser = Organiser(terminal)
    host, link = organiser.host()
    hours = ("--schedule", "22:00-07:00", "--batch-size", "32", "--recipe", organiser.recipe)
    grace = terminal.start(
        "join", link, "--json", "--name", "Grace", *_key(terminal, "grace"), *hours, "--bandwidth", "8Mbit/80Mbit",
        name="Grace", TZ=zone_where_it_is("21:59:45"), **ONE_THREAD,
    )  # fmt: skip
    states = terminal.folder / "aux"
    place = ("--state-path", states, "--backup-every-step", "1")
    alan = terminal.start("aux", link, "--json", "--name", "Alan", "--not-as-active-peer", *place, **ONE_THREAD)
    assert until_event(grace, "resting")["until"] == "22:00"
    until_event(grace, "joined")  # her hours have begun
    until_epoch(grace, 2)
    ada = terminal.start(
        "train", link, "--json", "--name", "Ada", *_key(terminal, "ada"), *hours, "--n-workers", "2",
        name="Ada", TZ=zone_where_it_is("06:59:35"), **ONE_THREAD,
    )  # fmt: skip

    seen = terminal.ask("monitor", link, "--once", patience_seconds=LONG_SECONDS)
    rows = {row["name"]: row for row in seen["peers"]}
    assert 0 < rows["Grace"]["upload_bytes_per_second"] <= CAP_BYTES_PER_SECOND
    assert rows["Alan"]["role"] == "aux"
    refused = terminal.refuse("train", link, "--max-memory", "1MB", "--recipe", organiser.recipe, code=2, **ONE_THREAD)
    assert "--max-memory 1MB is less than" in refused
    posing = replace(JoinLink.parse(link), organiser_hash="a" * 26)
    assert "somebody may be posing" in terminal.refuse("aux", str(posing), code=2, **ONE_THREAD)

    assert until_event(ada, "resting")["until"] == "22:00"
    told = [each["event"] for each in events(ada)]
    assert "joined" in told
    assert ("trained" in told) == ("training" in told), "her time was up: she handed in what she did"
    end(ada)

    who_keeps = terminal.ask("run", "rollback", "--run", "waves", "--folder", terminal.folder / "hub")
    keepers = {name for state in who_keeps for name in state["keepers"]}
    assert "Grace" in keepers
    assert "Alan" not in keepers
    assert not states.exists()
    end(alan)

    # A hub that does not answer makes leaving slow; a second Ctrl-C does not wait for it.
    hub_pid = int((terminal.folder / "hub" / "server.pid").read_text().split()[0])
    os.kill(hub_pid, signal.SIGSTOP)
    try:
        grace.interrupt()
        grace.wait_for_line("leaving cleanly", PATIENCE_SECONDS)
        assert grace.exit_code is None
        grace.interrupt()
        assert grace.wait(PATIENCE_SECONDS) == -signal.SIGINT
    finally:
        os.kill(hub_pid, signal.SIGCONT)
    end(host)


def _key(terminal: Terminal, name: str) -> tuple[str, Path]:
    return ("--identity-path", terminal.folder / f"{name}.nkey")
