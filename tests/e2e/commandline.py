"""The `potluck` command in real processes: what its end-to-end tests stand on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from potluck.hub.joinlink import JoinLink
from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import Children, ManagedProcess

PATIENCE_SECONDS = 100.0  # a command that imports little still takes seconds on a machine that is busy
POTLUCK = (sys.executable, "-m", "potluck.cli")
SLOW_POTLUCK = (sys.executable, str(Path(__file__).with_name("slowpeer.py")))
RUN = "bakery"
OWN_ENVIRONMENT = ("POTLUCK_LINK", "POTLUCK_NAME", "POTLUCK_IDENTITY", "HF_TOKEN")


class Terminal:
    """Where commands are typed; its user's data is in a folder of its own.

    With `fresh` each command starts an interpreter of its own, as in earnest; else it may be forked from one that has
    its imports done.
    """

    def __init__(self, folder: Path, children: Children, *, fresh: bool = False) -> None:
        self.folder = folder
        self.fresh = fresh
        self._children = children
        self._environment = {
            **dict.fromkeys(OWN_ENVIRONMENT, ""),
            "XDG_DATA_HOME": str(folder / "data"),
            "COLUMNS": "200",  # so that what we look for is not broken into lines
            "NO_COLOR": "1",
        }

    def start(
        self,
        *arguments: str | Path,
        name: str | None = None,
        program: tuple[str, ...] = POTLUCK,
        **environment: str,
    ) -> ManagedProcess:
        return self._children.spawn(
            [*program, *map(str, arguments)],
            name=name or (str(arguments[0]).strip("-") if arguments else "potluck"),
            env={**self._environment, **environment},
            fresh=self.fresh,
        )

    def run(
        self, *arguments: str | Path, code: int = 0, patience_seconds: float = PATIENCE_SECONDS, **environment: str
    ) -> str:
        """What a command says, once it has ended with this exit code."""
        process = self.start(*arguments, **environment)
        ended_with = process.wait(patience_seconds)
        output = process.output()
        assert ended_with == code, f"exit code {ended_with} instead of {code}: {output}"
        assert "Traceback" not in output
        return output

    def refuse(self, *arguments: str | Path, code: int, **environment: str) -> str:
        """What a command says in one sentence that fails."""
        output = self.run(*arguments, code=code, **environment)
        [line] = [line for line in output.splitlines() if line.startswith("potluck: ")]
        return line.removeprefix("potluck: ")

    def ask(self, *arguments: str | Path, patience_seconds: float = PATIENCE_SECONDS, **environment: str) -> Any:
        """A command's answer in JSON."""
        return json.loads(self.run(*arguments, "--json", patience_seconds=patience_seconds, **environment))


class Party:
    """A run with its host."""

    def __init__(self, terminal: Terminal, *options: str | Path) -> None:
        self.terminal = terminal
        self.folder = terminal.folder / "run"
        self.place = ("--run", RUN, "--folder", self.folder)
        self.host = terminal.start("host", *self.place, "--json", *(options or ("--listen", "127.0.0.1")))
        self.link = JoinLink.parse(until_event(self.host, "ready")["link"])

    def members(self, command: str, *arguments: str | Path) -> str:
        return self.terminal.run("members", command, *arguments, *self.place)

    def ask(self, command: str, *arguments: str | Path) -> Any:
        return self.terminal.ask("members", command, *arguments, *self.place)

    def key(self, name: str) -> tuple[str | Path, ...]:
        return ("--identity-path", self.terminal.folder / f"{name}.nkey", "--name", name)

    def join(self, name: str, link: str | JoinLink | None = None, *options: str | Path) -> ManagedProcess:
        return self.terminal.start("join", str(link or self.link), "--json", *self.key(name), *options, name=name)

    def joined(self, name: str, link: str | JoinLink | None = None) -> tuple[ManagedProcess, str]:
        """Somebody who is in, and its peer id."""
        process = self.join(name, link)
        return process, until_event(process, "joined")["peer"]

    def member(self, peer: str) -> dict[str, Any]:
        [found] = [row for row in self.ask("list") if row["peer"] == peer]
        return dict(found)


def events(process: ManagedProcess) -> list[dict[str, Any]]:
    """The JSON lines that a command has written."""
    complete, _, _ = process.output().rpartition("\n")
    return [json.loads(line) for line in complete.splitlines() if line.startswith("{")]


def until_event(process: ManagedProcess, event: str, **wanted: Any) -> dict[str, Any]:
    """Wait for an event with these values."""

    def find() -> dict[str, Any] | None:
        ended = process.exit_code is not None
        for each in events(process):
            if each["event"] == event and all(each.get(key) == value for key, value in wanted.items()):
                return each
        assert not ended, f"{process.name} has ended: {process.output()}"
        return None

    return poll_until_sync(find, PATIENCE_SECONDS, lambda: f"{event} {wanted} from {process.name}: {process.output()}")
