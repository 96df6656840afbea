"""Volunteers on thin lines, with the real commands: rounds end beside the host's load of the state, and Ctrl-C leaves.

A round takes about four seconds of each line here, and the state about 25. Full sizes, as a soak:

    scripts/test tests/e2e/test_slow_lines.py -m soak
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from commandline import Terminal, events, until_event
from organiser import Organiser

from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess

LEAVE_SECONDS = 40.0  # on a machine that is busy; a round of the last test takes ten times as long


class ThinLines:
    """A host, and two volunteers whose lines carry little."""

    def __init__(self, terminal: Terminal, *, width: int, bandwidth: str) -> None:
        organiser = Organiser(terminal)
        organiser.edit("width = 64", f"width = {width}")
        organiser.edit("target_batch_size = 256 ", "target_batch_size = 400 ")
        slowed = (
            "        time.sleep(0.4)\n        x, y = batch\n"  # else the first to come has made epochs before the other
        )
        recipe = organiser.recipe.read_text().replace("        x, y = batch\n", slowed)
        organiser.recipe.write_text("import time\n" + recipe)
        organiser.edit("learning_rate = 1e-3", "learning_rate = 1e-4")
        self.host, link = organiser.host()
        options = ("--batch-size", "8", "--bandwidth", bandwidth)
        self.ada, self.bob = (organiser.join(link, name, *options) for name in ("Ada", "Bob"))
        self.folder = terminal.folder / "hub"

    def until_epoch(self, epoch: int, within_seconds: float) -> None:
        def is_there() -> bool:
            for process in (self.ada, self.bob):
                assert process.exit_code is None, process.output()
            told = [events(process) for process in (self.ada, self.bob)]
            return all(any(e["event"] == "progress" and e["epoch"] >= epoch for e in one) for one in told)

        poll_until_sync(is_there, within_seconds, lambda: f"epoch {epoch}: {self.describe()}")

    def until_saved(self, within_seconds: float) -> None:
        """Until the host has the state of an epoch that was trained."""
        poll_until_sync(lambda: bool(self._saved()), within_seconds, lambda: f"a backup: {self.describe()}")

    def _saved(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file() and "backups" in path.parts]

    def describe(self) -> str:
        return "\n".join(process.output()[-3000:] for process in (self.host, self.ada, self.bob))


def leave(process: ManagedProcess) -> float:
    """Ctrl-C, and how long it takes."""
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(LEAVE_SECONDS) == 0, process.output()
    assert "Traceback" not in process.output()
    return time.monotonic() - began


@pytest.mark.timeout(600)
def test_rounds_end_on_thin_lines_while_the_host_loads_the_state(terminal: Terminal) -> None:
    lines = ThinLines(terminal, width=500, bandwidth="1Mbit")
    lines.until_epoch(3, 400.0)
    lines.until_saved(150.0)
    assert "given up" not in lines.host.output(), lines.describe()
    for process in (lines.ada, lines.bob, lines.host):
        leave(process)


@pytest.mark.timeout(300)
def test_ctrl_c_waits_for_no_round_and_names_what_is_lost(terminal: Terminal) -> None:
    lines = ThinLines(terminal, width=2000, bandwidth="160Kbit")  # a round takes 400 s
    until_event(lines.ada, "slow line")
    poll_until_sync(
        lambda: all(any(e["event"] == "progress" for e in events(p)) for p in (lines.ada, lines.bob)),
        150.0,
        lines.describe,
    )
    leave(lines.ada)
    told = lines.ada.output()
    assert "samples are lost" in told or "handed_in" in told
    for process in (lines.bob, lines.host):
        leave(process)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_million_parameters_on_2_mbit(terminal: Terminal) -> None:
    lines = ThinLines(terminal, width=3162, bandwidth="2Mbit")
    lines.until_epoch(5, 900.0)
    assert "given up" not in lines.host.output(), lines.describe()
    for process in (lines.ada, lines.bob, lines.host):
        leave(process)
