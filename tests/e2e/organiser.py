"""Somebody with a run of their own, and those who train in it: all by the real commands."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from commandline import PATIENCE_SECONDS, POTLUCK, Terminal, events, until_event

from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess

LONG_SECONDS = 120.0  # several processes import torch at once
# A step takes as long as a larger model's would. Else each trainer of a test computes without end, at many epochs a
# second, and whoever starts beside it waits for a core.
STEP, STEP_SECONDS = "        x, y = batch\n", 0.04
# Reading costs nothing here, and a process of its own imports torch first; test_own_recipe.py has one.
SHARDS, LIGHT = "    num_shards = 64", "    is_light = True\n"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # each peer has a machine of its own in earnest; here they share one


class Organiser:
    """Somebody with a run of their own."""

    def __init__(self, terminal: Terminal, *init: str, step_seconds: float = STEP_SECONDS) -> None:
        self.terminal = terminal
        self.folder = terminal.folder / "waves"
        terminal.run("init", self.folder, *init)
        self.recipe = self.folder / "recipe.py"
        if self.recipe.exists():
            text = self.recipe.read_text()
            assert STEP in text
            assert SHARDS in text
            slow = f"        __import__('time').sleep({step_seconds})\n"
            self.recipe.write_text(text.replace(STEP, slow + STEP).replace(SHARDS, LIGHT + SHARDS))

    def edit(self, before: str, after: str) -> None:
        path = self.folder / "run.toml"
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))

    def host(self) -> tuple[ManagedProcess, str]:
        place = ("--folder", self.terminal.folder / "hub", "--listen", "127.0.0.1", "--no-dashboard", "--json")
        process = self.terminal.start("host", self.folder, *place, **ONE_THREAD)
        return process, str(until_event(process, "ready")["link"])

    def join(
        self, link: str, name: str, *options: str | Path, program: tuple[str, ...] = POTLUCK, **environment: str
    ) -> ManagedProcess:
        key = ("--identity-path", self.terminal.folder / f"{name}.nkey", "--name", name)
        given = (*options, "--recipe", self.recipe) if self.recipe.exists() and "--recipe" not in options else options
        settings = {**ONE_THREAD, **environment}
        return self.terminal.start("join", link, "--json", *key, *given, name=name, program=program, **settings)


def until_epoch(process: ManagedProcess, epoch: int) -> dict[str, Any]:
    def find() -> dict[str, Any] | None:
        found = [each for each in events(process) if each["event"] == "progress" and each["epoch"] >= epoch]
        assert found or process.exit_code is None, process.output()
        return found[0] if found else None

    return poll_until_sync(find, LONG_SECONDS, lambda: f"epoch {epoch} at {process.name}: {process.output()[-2000:]}")


def end(process: ManagedProcess) -> None:
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE_SECONDS) == 0, process.output()
    assert "Traceback" not in process.output()
