"""`potluck paths`, and a run with paths: the real commands, in real processes, with kills and a restart."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commandline import PATIENCE_SECONDS, Terminal, events, until_event
from organiser import LONG_SECONDS, ONE_THREAD
from safetensors.torch import load_file

from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess

RUN_FILE = """\
name = "grove"
recipe = "stdlib-lm"

[model]
layers = 2
width = 16
heads = 2
context = 48

[paths]
levels = [2, 2]
inner_steps = 4
batch_size = 2

[training]
algorithm = "diloco"
grace_seconds = 10
"""


class Grove:
    """A run with paths."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.folder = terminal.folder / "grove"
        self.folder.mkdir()
        (self.folder / "run.toml").write_text(RUN_FILE)
        self.place = ("--run", "grove", "--folder", terminal.folder / "hub")
        self.link = ""

    def host(self) -> ManagedProcess:
        options = ("--listen", "127.0.0.1", "--no-dashboard", "--backup-every", "1", "--json")
        place = ("--folder", self.terminal.folder / "hub")
        host = self.terminal.start("host", self.folder, *place, *options, name="host", **ONE_THREAD)
        self.link = until_event(host, "ready")["link"]
        return host

    def join(self, name: str) -> ManagedProcess:
        key = ("--identity-path", self.terminal.folder / f"{name}.nkey", "--name", name)
        state = ("--state-path", self.terminal.folder / name, "--backup-every-step", "1")
        return self.terminal.start(
            "join", self.link, "--json", "--yes", *key, *state, "--threads", "1", name=name, **ONE_THREAD
        )

    def look(self) -> dict[str, Any]:
        shown: dict[str, Any] = self.terminal.ask("paths", self.link, patience_seconds=LONG_SECONDS)
        return shown


def phases_of(processes: list[ManagedProcess]) -> list[tuple[tuple[int, ...], int]]:
    """The phases that were begun, by path."""
    return [(tuple(e["path"]), e["phase"]) for process in processes for e in events(process) if e["event"] == "path"]


def until_phase(processes: list[ManagedProcess], phase: int) -> None:
    """Wait until each of the four paths has begun this phase."""

    def reached() -> bool:
        assert all(process.exit_code is None for process in processes), [p.output()[-2000:] for p in processes]
        newest: dict[tuple[int, ...], int] = {}
        for path, begun in phases_of(processes):
            newest[path] = max(newest.get(path, 0), begun)
        return len(newest) == 4 and min(newest.values()) >= phase

    told = lambda: f"phase {phase} of all paths, not {Counter(phases_of(processes))}"  # noqa: E731
    poll_until_sync(reached, 2 * PATIENCE_SECONDS, told)


@pytest.mark.timeout(600)
def test_four_paths_on_three_peers_with_kills_and_a_restart(terminal: Terminal) -> None:
    grove = Grove(terminal)
    refused = terminal.refuse("host", grove.folder, "--folder", terminal.folder / "hub", code=2)
    assert "potluck paths prepare" in refused, "there is no routing yet"
    prepared = terminal.ask("paths", "prepare", grove.folder, patience_seconds=LONG_SECONDS)
    assert [row["path"] for row in prepared["paths"]] == ["(0, 0)", "(0, 1)", "(1, 0)", "(1, 1)"]
    assert sum(row["tokens"] for row in prepared["paths"]) == prepared["tokens"]
    host = grove.host()
    peers = {name: grove.join(name) for name in ("ada", "ben", "cy")}
    until_phase(list(peers.values()), 1)

    shown = grove.look()
    holders = Counter(row["coordinator"] for row in shown["modules"] if row["coordinator"] in peers)
    victim = holders.most_common(1)[0][0] if holders else "ada"  # who coordinates most modules, if a trainer does
    begun = max(phase for _, phase in phases_of(list(peers.values())))
    peers.pop(victim).kill()
    until_phase(list(peers.values()), begun + 2)
    after = grove.look()
    assert all(row["phases"] > before["phases"] for row, before in zip(after["paths"], shown["paths"], strict=True))
    assert all(row["epoch"] > before["epoch"] for row, before in zip(after["modules"], shown["modules"], strict=True))

    for process in (*peers.values(), host):  # everything stops
        os.kill(process.pid, signal.SIGINT)
    for process in (*peers.values(), host):
        assert process.wait(PATIENCE_SECONDS) == 0, process.output()
    check_use(grove, terminal.folder)

    grove.host()
    again = grove.join("ada")
    until_phase([again], max(row["phases"] for row in after["paths"]))
    assert min(phase for _, phase in phases_of([again])) >= min(row["phases"] for row in after["paths"])


def check_use(grove: Grove, folder: Path) -> None:
    """What an organiser does with the model."""
    terminal = grove.terminal
    file = folder / "path.safetensors"
    terminal.ask("paths", "export", "--path", "1,0", "--to", file, *grove.place, patience_seconds=LONG_SECONDS)
    assert "bytes.weight" in load_file(file)
    terminal.ask("paths", "export", "--all", "--to", folder / "all", *grove.place, patience_seconds=LONG_SECONDS)
    assert json.loads((folder / "all" / "paths.json").read_text())["levels"] == [2, 2]
    found = terminal.ask(
        "paths", "evaluate", "--documents", "2", "--dense", file, *grove.place, patience_seconds=LONG_SECONDS
    )
    assert found["mixture"] > 0
    assert found["dense"] > 0
    assert len(found["paths"]) == 4
    missing = terminal.refuse("paths", "export", "--path", "5,0", *grove.place, code=2)
    assert "there is no path (5, 0)" in missing
    assert "export what?" in terminal.refuse("paths", "export", *grove.place, code=2)
