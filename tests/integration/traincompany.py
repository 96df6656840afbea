"""Trainers in processes of their own, around a real hub: what the tests of training stand on."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundhouse import ANYTHING
from runhouse import RunHouse, open_run

from potluck.hub.joinlink import JoinLink
from potluck.testing.processes import Children, ManagedProcess

PROGRAM = Path(__file__).with_name("trainchild.py")
PATIENCE_SECONDS = 100.0


@asynccontextmanager
async def house_with_link(folder: Path) -> AsyncIterator[tuple[RunHouse, JoinLink]]:
    """A host without a peer of its own, and a link for trainers who may coordinate."""
    async with open_run(folder, peer=None) as house:
        organiser = await house.organiser()
        _, secret = await organiser.create_invite(scopes=ANYTHING, uses=None)
        yield house, replace(house.host.link, invite=secret)


class Company:
    """Trainers in processes."""

    def __init__(self, children: Children, link: JoinLink, folder: Path, num_epochs: int, kind: str) -> None:
        self.processes: list[ManagedProcess] = []
        self._children = children
        self._arguments = (link, folder, num_epochs, kind)

    async def start(
        self, num_trainers: int, *, environment: Callable[[int], dict[str, str]] | None = None, **options: Any
    ) -> None:
        """Some more trainers, who begin when all of them are there; the options are those of trainchild.Options.

        An option may be a function of the trainer's number; `environment` is one.
        """
        there = len(self.processes)
        for number in range(there, there + num_trainers):
            self.processes.append(self._spawn(number, options, environment(number) if environment else None))
        for process in self.processes[there:]:
            await process.until_line(r'"joined"', PATIENCE_SECONDS)
        for process in self.processes[there:]:
            process.send_line("go")

    def _spawn(self, number: int, options: dict[str, Any], environment: dict[str, str] | None = None) -> ManagedProcess:
        link, folder, num_epochs, kind = self._arguments
        argv = [sys.executable, str(PROGRAM), str(number), str(link), str(folder / f"{number}.nkey")]
        chosen = json.dumps({name: value(number) if callable(value) else value for name, value in options.items()})
        arguments = [*argv, str(num_epochs), kind, chosen]
        return self._children.spawn(arguments, name=f"trainer-{number}", stdin=True, env=environment)

    def restart(self, number: int, **options: Any) -> None:
        """The same trainer, killed at once and started anew; it does not wait for anybody."""
        if self.processes[number].exit_code is None:
            self.processes[number].kill()
        self.processes[number] = self._spawn(number, options)
        self.processes[number].send_line("go")

    def told(self, number: int, key: str) -> list[dict[str, Any]]:
        """What a trainer has said so far, of one kind."""
        lines = re.findall(rf'^\{{"{key}":.*\}}$', self.processes[number].output(), re.MULTILINE)
        return [json.loads(line) for line in lines]

    async def finish(self, numbers: list[int]) -> list[dict[str, Any]]:
        for number in numbers:
            await self.processes[number].until_line(r'"finished"', PATIENCE_SECONDS)
        results = [self.told(number, "finished")[0] for number in numbers]
        for number in numbers:
            self.processes[number].send_line("leave")
        for number in numbers:
            assert await self.processes[number].until_exit(PATIENCE_SECONDS) == 0
            assert self.told(number, "left")
        return results
