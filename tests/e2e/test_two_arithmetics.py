"""Trainers whose machines compute differently, as a CPU and a GPU do: the real commands, in real processes.

`ATEN_CPU_CAPABILITY=default` has torch do without vector instructions: AdamW and clipping then give other last bits.
"""

from __future__ import annotations

import re
import time

import pytest
from commandline import PATIENCE_SECONDS, Terminal, events, until_event
from organiser import Organiser, until_epoch

from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess

EVERY_EPOCHS = 10  # how often a host saves
SCALAR = {"ATEN_CPU_CAPABILITY": "default"}


def saved_epochs(organiser: Organiser) -> list[int]:
    """The backups that the host has."""
    folder = organiser.terminal.folder / "hub" / "states" / "backups"
    return sorted(int(path.stem.removeprefix("epoch-")) for path in folder.glob("epoch-*.json"))


def until_saved(
    organiser: Organiser, host: ManagedProcess, least: int, within_seconds: float = PATIENCE_SECONDS
) -> int:
    """Wait for a backup of this epoch or a later one; the epoch of the newest."""
    poll_until_sync(
        lambda: max(saved_epochs(organiser), default=0) >= least,
        within_seconds,
        lambda: f"a backup of epoch {least}, of {saved_epochs(organiser)}: {host.output()}",
    )
    return max(saved_epochs(organiser))


def newest_epoch(*processes: ManagedProcess) -> int:
    """The epoch that one of them has told of."""
    told = [each["epoch"] for process in processes for each in events(process) if each["event"] == "progress"]
    return max(told, default=0)


def trainer(organiser: Organiser, link: str, name: str, **environment: str) -> ManagedProcess:
    process = organiser.join(link, name, "--batch-size", "4", "--verbose", **environment)
    until_event(process, "training")
    return process


@pytest.mark.timeout(400)
def test_backups_advance_a_newcomer_gets_in_and_little_is_lost_when_all_trainers_die(terminal: Terminal) -> None:
    organiser = Organiser(terminal)
    organiser.edit("target_batch_size = 256", "target_batch_size = 64")
    host, link = organiser.host()
    ada = trainer(organiser, link, "Ada")
    grace = trainer(organiser, link, "Grace", **SCALAR)

    until_saved(organiser, host, 2 * EVERY_EPOCHS)  # the first is made while one trains alone
    late = trainer(organiser, link, "Lin")
    until_epoch(late, 1)
    for process in (ada, grace, late):
        assert "repaired" not in process.output(), process.output()
    late.kill()

    saved = until_saved(organiser, host, newest_epoch(ada, grace))
    until_epoch(ada, saved + 3)
    reached = newest_epoch(ada, grace)
    ada.kill()
    grace.kill()
    again = trainer(organiser, link, "Ada")
    until_epoch(again, reached + 1)
    output = host.output() + again.output()
    assert "Traceback" not in output
    assert "differ by more than rounding" not in output
    lost = re.search(r"updates of epochs? (\d+)(?: to (\d+))? are lost", " ".join(output.split()))
    num_lost = int(lost[2] or lost[1]) - int(lost[1]) + 1 if lost else 0
    assert num_lost <= EVERY_EPOCHS, f"{num_lost} epochs of {reached} are lost"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_language_model_as_it_comes_in_two_homes(terminal: Terminal) -> None:
    """`stdlib-lm` with plain join links, each volunteer at home elsewhere. Tells what it measured.

    scripts/test tests/e2e/test_two_arithmetics.py -m soak -rA
    """
    organiser = Organiser(terminal, "--recipe", "stdlib-lm")
    host, link = organiser.host()

    def join(name: str, **environment: str) -> ManagedProcess:
        home = terminal.folder / f"home-{name}"
        process = organiser.join(link, name, "--verbose", XDG_DATA_HOME=str(home), HOME=str(home), **environment)
        until_event(process, "training")
        return process

    ada, grace = join("Ada"), join("Grace", **SCALAR)
    until_epoch(ada, 1)
    saved = 0
    while saved < 4 * EVERY_EPOCHS:
        saved = until_saved(organiser, host, saved + 1, 4 * PATIENCE_SECONDS)
        print(f"saved epoch {saved}, trainers at {newest_epoch(ada, grace)}")
        assert newest_epoch(ada, grace) - saved <= 3 * EVERY_EPOCHS
    began = time.monotonic()
    late = join("Lin")
    print(f"a newcomer trains after {time.monotonic() - began:.1f} s")
    until_epoch(late, 1)
    for process in (ada, grace, late):
        assert "repaired" not in process.output(), process.output()[-3000:]
    reached = newest_epoch(ada, grace, late)
    for process in (ada, grace, late):
        process.kill()
    again = join("Ada")
    until_epoch(again, reached + 1)
    output = " ".join((host.output() + again.output()).split())
    lost = re.search(r"updates of epochs? (\d+)(?: to (\d+))? are lost", output)
    num_lost = int(lost[2] or lost[1]) - int(lost[1]) + 1 if lost else 0
    print(f"all were killed at epoch {reached}: {num_lost} epochs are lost")
    assert num_lost <= EVERY_EPOCHS
