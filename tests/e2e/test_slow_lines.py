"""Volunteers on thin lines, with the real commands: rounds end beside the host's load of the state, and Ctrl-C leaves.

A round takes about two seconds of each line here, and the state about twelve. Full sizes, as a soak that tells what it
measured (an hour, or 25 minutes with `-n 5 --dist load`: the lines are busy, and not the processors):

    scripts/test tests/e2e/test_slow_lines.py -m soak -rA
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

STEP_SECONDS = 0.4
LEAVE_SECONDS = 40.0  # on a machine that is busy; a round of the last test takes ten times as long


class ThinLines:
    """A host, and two volunteers whose lines carry little."""

    def __init__(
        self,
        terminal: Terminal,
        *,
        width: int,
        bandwidth: str,
        target_batch_size: int = 400,
        inner_steps: int = 0,
        overlap_steps: int = 0,
        step_seconds: float = STEP_SECONDS,
    ) -> None:
        organiser = Organiser(terminal, step_seconds=0.0)
        organiser.edit("width = 64", f"width = {width}")
        if inner_steps:
            organiser.edit('algorithm = "sync" ', 'algorithm = "diloco" ')
            steps = f"inner_steps = {inner_steps}\noverlap_steps = {overlap_steps} "
            organiser.edit("target_batch_size = 256 ", steps)
        else:
            organiser.edit("target_batch_size = 256 ", f"target_batch_size = {target_batch_size} ")
        # Else the first to come has made epochs before the other.
        slowed = f"        time.sleep({step_seconds})\n        x, y = batch\n"
        recipe = organiser.recipe.read_text().replace("        x, y = batch\n", slowed)
        organiser.recipe.write_text("import time\n" + recipe)
        organiser.edit("learning_rate = 1e-3", "learning_rate = 1e-4")
        self.host, link = organiser.host()
        options = ("--batch-size", "8", "--bandwidth", bandwidth)
        self.ada, self.bob = (organiser.join(link, name, *options) for name in ("Ada", "Bob"))
        self.link, self.organiser = link, organiser
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
    lines = ThinLines(terminal, width=350, bandwidth="1Mbit", target_batch_size=240)
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
@pytest.mark.timeout(480)
@pytest.mark.parametrize("bandwidth", ["2Mbit", "1Mbit"])
def test_ctrl_c_in_a_round_of_ten_million_parameters(terminal: Terminal, bandwidth: str) -> None:
    """A round takes 80 or 160 s; all three are told to leave in the middle of the first one."""
    lines = ThinLines(terminal, width=3162, bandwidth=bandwidth, target_batch_size=80)
    # Together they have the batch then, and begin to exchange it.
    poll_until_sync(lambda: computed(lines.ada) + computed(lines.bob) >= 80, 300.0, lines.describe)
    time.sleep(10.0)
    for process in (lines.ada, lines.bob):
        assert max(each["epoch"] for each in events(process) if each["event"] == "progress") == 0, "it is over"
    seconds = [leave(process) for process in (lines.ada, lines.bob, lines.host)]
    assert "samples are lost" in lines.ada.output(), lines.describe()
    print(f"{bandwidth}: left within {seconds[0]:.1f}, {seconds[1]:.1f} and (host) {seconds[2]:.1f} s")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bandwidth", ["2Mbit", "1Mbit"])
def test_ten_million_parameters_in_sync(terminal: Terminal, bandwidth: str) -> None:
    lines = ThinLines(terminal, width=3162, bandwidth=bandwidth)
    lines.until_epoch(1, 600.0)
    began = time.monotonic()
    lines.until_epoch(4, 1200.0)
    print(f"{bandwidth}: {(time.monotonic() - began) / 3:.0f} s for each of three epochs")
    assert "given up" not in lines.host.output(), lines.describe()
    seconds = [leave(process) for process in (lines.ada, lines.bob, lines.host)]
    print(f"{bandwidth}: left within {seconds[0]:.1f}, {seconds[1]:.1f} and (host) {seconds[2]:.1f} s")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_million_parameters_with_diloco_on_1_mbit(terminal: Terminal) -> None:
    lines = ThinLines(terminal, width=3162, bandwidth="1Mbit", inner_steps=200, overlap_steps=190, step_seconds=1.0)
    lines.until_epoch(1, 900.0)
    began, before = time.monotonic(), computed(lines.ada)
    lines.until_epoch(3, 900.0)
    seconds = time.monotonic() - began
    share = (computed(lines.ada) - before) / 8 * 1.0 / seconds
    print(f"{seconds / 2:.0f} s for each of two epochs, computing for {share:.0%} of it")
    assert "given up" not in lines.host.output(), lines.describe()
    assert share > 0.7, "exchanges are made in the background"
    for process in (lines.ada, lines.bob, lines.host):
        leave(process)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("width", [3530, 11180], ids=["150 MB", "1500 MB"])
def test_a_large_state_comes_over_10_mbit_and_goes_on_where_it_was(terminal: Terminal, width: int) -> None:
    """12.5 and 125 M parameters with AdamW. The one who has it has a good line; the newcomer is killed half-way."""
    organiser = Organiser(terminal)
    organiser.edit("width = 64", f"width = {width}")
    organiser.edit("target_batch_size = 256 ", "target_batch_size = 80 ")
    is_slow = terminal.folder / "slow"  # from then on an epoch lasts longer than the load
    recipe = organiser.recipe.read_text()
    slowed = f"        time.sleep(120 * pathlib.Path({str(is_slow)!r}).exists())\n        x, y = batch\n"
    recipe = recipe.replace("        x, y = batch\n", slowed)
    organiser.recipe.write_text("import pathlib\nimport time\n" + recipe)
    host, link = organiser.host()
    ada = organiser.join(link, "Ada", "--batch-size", "8")
    progress = "an epoch: else there are no statistics yet"
    poll_until_sync(lambda: any(e.get("epoch", 0) >= 1 for e in events(ada)), 600.0, progress)
    is_slow.touch()
    options = ("--batch-size", "8", "--bandwidth", "10Mbit")

    bob, began = organiser.join(link, "Bob", *options), time.monotonic()
    poll_until_sync(lambda: loaded(bob)[0] > 0.4 * loaded(bob)[1], 1200.0, lambda: bob.output()[-2000:])
    bob.kill()
    had, of = loaded(bob)
    again = organiser.join(link, "Bob", *options)
    until_event(again, "loading")
    first = next(each["bytes"] for each in events(again) if each["event"] == "loading")
    until_event_within(again, "training", 1200.0)
    seconds = time.monotonic() - began
    print(
        f"{of / 1e6:.0f} MB in {seconds:.0f} s, killed after {had / 1e6:.0f} MB and gone on from {first / 1e6:.0f} MB"
    )
    assert first > 0.9 * had, "it went on where it was"
    for process in (again, ada):  # each is in the middle of a long step
        process.kill()
    leave(host)


def computed(process: ManagedProcess) -> int:
    """Samples, so far."""
    return max((each["samples"] for each in events(process) if each["event"] == "progress"), default=0)


def loaded(process: ManagedProcess) -> tuple[int, int]:
    """Bytes of the state that it says to have, and of how many."""
    told = [(each["bytes"], each["of"]) for each in events(process) if each["event"] == "loading"]
    return max(told, default=(0, 1))


def until_event_within(process: ManagedProcess, event: str, seconds: float) -> None:
    def is_told() -> bool:
        return any(each["event"] == event for each in events(process))

    poll_until_sync(is_told, seconds, lambda: process.output()[-2000:])
