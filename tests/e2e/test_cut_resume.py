"""A run with two groups whose processes are all killed at once: hub, host and trainers. It goes on from one cut."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import PATIENCE_SECONDS, Party, Terminal, events, until_event

from potluck.state.backups import Backups, backup_folder
from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess

PROGRAM = (sys.executable, str(Path(__file__).with_name("groupsloop.py")))
NAMES = ("ann", "bob")
GROUPS = ("main", "critic")
LATER_EPOCHS = 6
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def start(terminal: Terminal, *options: str) -> tuple[Party, list[ManagedProcess]]:
    """The host and the trainers; `options` are for the first of them."""
    party = Party(terminal, "--listen", "127.0.0.1", "--group", "critic", "--no-dashboard", "--backup-every", "2")
    environments = [{"POTLUCK_IDENTITY": str(terminal.folder / f"{name}.nkey"), **ONE_THREAD} for name in NAMES]
    return party, [
        terminal.start(str(party.link), name, *own, name=name, program=PROGRAM, **environment)
        for name, own, environment in zip(NAMES, (options, ()), environments, strict=True)
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


def newest_saved(terminal: Terminal, group: str) -> int:
    return max(Backups(backup_folder(terminal.folder / "run" / "states", group)).epochs(), default=0)


@pytest.mark.timeout(400)
def test_a_run_whose_processes_are_all_killed_goes_on_from_one_cut(terminal: Terminal) -> None:
    party, trainers = start(terminal, "--cut")
    cut: dict[str, Any] = until_event(trainers[0], "cut")
    until_later(trainers, {group: epoch + LATER_EPOCHS for group, epoch in cut["epochs"].items()})
    elsewhere = terminal.folder / "saved"
    saved = terminal.ask("checkpoint", "save", str(party.link), "--cut", "--to", elsewhere)
    assert [(row["run"], row["cut"] > cut["number"]) for row in saved] == [("bakery", True), ("bakery/critic", True)]
    assert [row["epoch"] for row in saved] == [
        row["epoch"] for row in terminal.ask("checkpoint", "list", "--path", elsewhere)
    ]
    poll_until_sync(
        lambda: all(newest_saved(terminal, group) > cut["epochs"][group] for group in GROUPS),
        PATIENCE_SECONDS,
        "newer backups of each group, of which none belongs to another",
    )
    for process in (party.host, *trainers):
        process.kill(group=True)

    known = {group: {epoch: d for one in trainers for epoch, d in states(one, group).items()} for group in GROUPS}
    listed = terminal.ask("checkpoint", "list", "--path", terminal.folder / "run" / "states")
    parts: dict[int, dict[str, int]] = {}
    for row in listed:
        parts.setdefault(row["cut"], {})[row["group"]] = row["epoch"]
    # An epoch that a later cut names too is listed by that cut's number.
    whole = [epochs for number, epochs in parts.items() if number >= cut["number"] and epochs.keys() == set(GROUPS)]
    assert all(epochs[group] >= cut["epochs"][group] for epochs in whole for group in GROUPS)

    _, again = start(terminal)
    began = {}
    for group in GROUPS:
        first = min((until_event(trainer, "begun", group=group) for trainer in again), key=lambda each: each["epoch"])
        assert first["epoch"] >= max(known[group]), "no epoch is made twice"
        began[group] = first["digest"]
    # The host may have made another cut since; in any case all groups go back to the same one.
    assert any(all(known[group].get(epochs[group]) == began[group] for group in GROUPS) for epochs in whole), (
        f"{began} is no cut: {whole}"
    )
    until_later(again, {group: max(known[group]) + 2 for group in GROUPS})
