"""What volunteers may say about their machine, and how they leave: the real commands, in real processes."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

import pytest
import setclock
from commandline import PATIENCE_SECONDS, Terminal, events, until_event
from organiser import LONG_SECONDS, ONE_THREAD, Organiser, end, until_epoch

from potluck.hub.joinlink import JoinLink
from potluck.testing.processes import ManagedProcess

SET_CLOCK = (sys.executable, setclock.__file__)
CAP_BYTES_PER_SECOND = 1e6  # 8 Mbit


class Volunteer:
    """Somebody whose hours are 22:00 to 07:00, by a clock that the test sets."""

    def __init__(self, terminal: Terminal, organiser: Organiser, name: str, clock: str) -> None:
        self._terminal = terminal
        self._recipe = organiser.recipe
        self._name = name
        self._clock = terminal.folder / f"{name}.clock"
        self.set_clock(clock)

    def set_clock(self, clock: str) -> None:
        """`clock` is read while it is written: the new one takes the place of the old as a whole."""
        written = self._clock.with_suffix(".new")
        written.write_text(clock)
        written.replace(self._clock)

    def start(self, command: str, link: str, *options: str) -> ManagedProcess:
        who = ("--name", self._name, "--identity-path", self._terminal.folder / f"{self._name}.nkey")
        what = ("--schedule", "22:00-07:00", "--batch-size", "32", "--recipe", self._recipe)
        return self._terminal.start(
            command, link, "--json", *who, *what, *options,
            name=self._name, program=SET_CLOCK, **ONE_THREAD, **{setclock.VARIABLE: str(self._clock)},
        )  # fmt: skip


@pytest.mark.timeout(400)
def test_hours_caps_and_ways_to_leave(terminal: Terminal) -> None:
    organiser = Organiser(terminal)
    host, link = organiser.host()
    night_owl = Volunteer(terminal, organiser, "Grace", "21:59:59.900")
    grace = night_owl.start("join", link, "--bandwidth", "8Mbit/80Mbit")
    states = terminal.folder / "aux"
    place = ("--state-path", states, "--backup-every-step", "1")
    alan = terminal.start("aux", link, "--json", "--name", "Alan", "--not-as-active-peer", *place, **ONE_THREAD)
    assert until_event(grace, "resting")["until"] == "22:00"
    assert not [each for each in events(grace) if each["event"] == "joined"]
    night_owl.set_clock("22:00:00")
    until_event(grace, "joined")
    until_epoch(grace, 2)
    early_bird = Volunteer(terminal, organiser, "Ada", "06:59:59.900")
    ada = early_bird.start("train", link, "--n-workers", "2")

    seen = terminal.ask("monitor", link, "--once", patience_seconds=LONG_SECONDS)
    rows = {row["name"]: row for row in seen["peers"]}
    assert 0 < rows["Grace"]["upload_bytes_per_second"] <= CAP_BYTES_PER_SECOND
    assert rows["Alan"]["role"] == "aux"
    refused = terminal.refuse("train", link, "--max-memory", "1MB", "--recipe", organiser.recipe, code=2, **ONE_THREAD)
    assert "--max-memory 1MB is less than" in refused
    posing = replace(JoinLink.parse(link), organiser_hash="a" * 26)
    assert "somebody may be posing" in terminal.refuse("aux", str(posing), code=2, **ONE_THREAD)

    until_event(ada, "progress")
    early_bird.set_clock("07:00:00")
    assert until_event(ada, "resting")["until"] == "22:00"
    told = [each["event"] for each in events(ada)]
    assert "trained" in told, "her time was up: she handed in what she did"
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
