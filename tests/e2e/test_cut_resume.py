"""A run with two groups whose processes are all killed at once: hub, host and trainers. It goes on from one cut."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import PATIENCE_SECONDS, RUN, Party, Terminal, events, until_event

from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess

PROGRAM = (sys.executable, str(Path(__file__).with_name("groupsloop.py")))
NAMES = ("ann", "bob")
GROUPS = ("main", "critic")
LATER_EPOCHS = 6
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def start(terminal: Terminal) -> tuple[Party, list[ManagedProcess]]:
    party = Party(terminal, "--listen", "127.0.0.1", "--group", "critic", "--no-dashboard", "--backup-every", "2")
    environments = [{"POTLUCK_IDENTITY": str(terminal.folder / f"{name}.nkey"), **ONE_THREAD} for name in NAMES]
    return party, [
        terminal.start(str(party.link), name, name=name, program=PROGRAM, **environment)
        for name, environment in zip(NAMES, environments, strict=True)
    ]


def states(trainer: ManagedProcess, group: str) -> dict[int, str]:
    """The digest of each epoch of a group that a trainer has told."""
    return {each["epoch"]: each["digest"] for each in events(trainer) if each.get("group") == group}


def until_later(trainers: list[ManagedProcess], epochs: dict[str, int]) -> None:
    def is_later() -> bool:
        for trainer in trainers:
            assert trainer.exit_code is None, trainer.output()
        return all(max(states(one, group), default=0) >= epochs[group] for one in trainers for group in GROUPS)

    poll_until_sync(is_later, PATIENCE_SECONDS, lambda: f"epochs {epochs}: {[each.tail() for each in trainers]}")


@pytest.mark.timeout(400)
def test_a_run_whose_processes_are_all_killed_goes_on_from_one_cut(terminal: Terminal) -> None:
    party, trainers = start(terminal)
    until_later(trainers, dict.fromkeys(GROUPS, 3))
    trainers[0].send_line("cut")
    cut: dict[str, Any] = until_event(trainers[0], "cut")
    heads = {group: epoch + LATER_EPOCHS for group, epoch in cut["epochs"].items()}
    until_later(trainers, heads)
    for process in (party.host, *trainers):
        process.kill(group=True)

    known = {group: {epoch: d for one in trainers for epoch, d in states(one, group).items()} for group in GROUPS}
    at_cut = {group: known[group][epoch] for group, epoch in cut["epochs"].items()}
    listed = terminal.ask("checkpoint", "list", "--path", terminal.folder / "run" / "states")
    parts = {row["group"]: row["epoch"] for row in listed if row["cut"] == cut["number"]}
    assert parts == cut["epochs"]
    assert all(
        max(row["epoch"] for row in listed if row["group"] == group) > cut["epochs"][group] for group in GROUPS
    ), "each group has a newer backup too"

    _, again = start(terminal)
    for group in GROUPS:
        first = min((until_event(trainer, "begun", group=group) for trainer in again), key=lambda each: each["epoch"])
        assert first["epoch"] >= heads[group], "no epoch is made twice"
        if first["epoch"] == max(known[group]):
            assert first["digest"] == at_cut[group], f"{group} goes on from its part of the cut"
    until_later(again, {group: max(known[group]) + 2 for group in GROUPS})
    for trainer in again:
        for group in GROUPS:
            assert not states(trainer, group).keys() & {e for e in known[group] if e <= heads[group]}
    assert RUN
