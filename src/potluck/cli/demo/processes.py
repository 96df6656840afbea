"""The processes of a demo: each a real `potluck` command, whose JSON lines are read along."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from potluck.errors import DeadlineExceededError, FatalError
from potluck.peer import environment

PATIENCE_SECONDS = 180.0  # for whatever should happen soon: several processes start on few cores
ENDING_SECONDS = 90.0  # who leaves hands in its work first, which takes a round
TAIL_CHARACTERS = 2000
# Several processes that compute share this machine: with more threads each, they would only wait for one another.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "POTLUCK_LINK": "", "POTLUCK_NAME": "", "POTLUCK_IDENTITY": ""}


class Actor:
    """One command, and what it has said."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.events: list[dict[str, Any]] = []
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read(), name=f"reads {name}")

    async def until(self, event: str) -> dict[str, Any]:
        """The first event of that name."""

        def found() -> dict[str, Any] | None:
            return next((each for each in self.events if each.get("event") == event), None)

        try:
            async with asyncio.timeout(PATIENCE_SECONDS), self._news:
                await self._news.wait_for(lambda: found() is not None or self._reader.done())
        except TimeoutError:
            raise DeadlineExceededError(f"{self.name} did not say {event!r} in time: {self.tail()}") from None
        said = found()
        if said is None:
            raise FatalError(f"{self.name} ended without saying {event!r}: {self.tail()}")
        return said

    def tail(self) -> str:
        """The end of what it wrote for people."""
        return self.log.read_text(errors="replace")[-TAIL_CHARACTERS:].strip() or "it wrote nothing"

    async def ended(self) -> int:
        """Wait until it has ended, and all that it said is read; returns the exit code."""
        code = await self.process.wait()
        await self._reader
        return code

    async def kill(self) -> None:
        """As if its machine lost power."""
        self.process.kill()
        await self.ended()

    async def leave(self) -> int:
        """Press Ctrl-C and wait; returns the exit code. A process that does not leave in time is killed."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(ENDING_SECONDS):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
        return await self.ended()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            async with self._news:
                self.events.append(json.loads(line))
                self._news.notify_all()
        async with self._news:
            self._news.notify_all()


class Processes:
    """All processes of a demo, and the folder that they live in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.actors: dict[str, Actor] = {}
        self._hub = folder / "hub"

    async def host(self) -> Actor:
        """The host of the run that stands in the folder; started again, it goes on where it was."""
        place = ("--folder", str(self._hub), "--listen", "127.0.0.1", "--no-dashboard")
        return await self._start("host", "host", str(self.folder), *place)

    async def join(self, name: str, link: str, *options: str, niceness: int = 0) -> Actor:
        """Somebody who takes part; the nicer, the slower while others compute too."""
        identity = ("--identity-path", str(self.folder / "keys" / f"{name}.nkey"), "--name", name)
        return await self._start(name, "join", link, *identity, *options, niceness=niceness)

    async def invite_coordinator(self, run: str) -> str:
        """A link for an aux peer that may coordinate."""
        rights = ("--role", "aux", "--coordinates", "--trusted")
        actor = await self._start("invite", "members", "invite", "--run", run, "--folder", str(self._hub), *rights)
        code = await self.actors.pop("invite").ended()
        if code != 0 or not actor.events:
            raise FatalError(f"no invite was made: {actor.tail()}")
        return str(actor.events[0]["link"])

    @property
    def states(self) -> Path:
        """Where the host saves the run's state."""
        return self._hub / "states"

    async def kill(self, name: str) -> None:
        """End one of them at once."""
        await self.actors.pop(name).kill()

    async def leave(self) -> dict[str, int]:
        """All leave, the host last; returns their exit codes."""
        others = {name: actor for name, actor in self.actors.items() if name != "host"}
        codes = dict(zip(others, await asyncio.gather(*(actor.leave() for actor in others.values())), strict=True))
        if (host := self.actors.get("host")) is not None:
            codes["host"] = await host.leave()
        self.actors.clear()
        return codes

    async def _start(self, name: str, *arguments: str, niceness: int = 0) -> Actor:
        command = [sys.executable, "-m", "potluck.cli", *arguments, "--json"]
        if niceness and (nice := shutil.which("nice")):
            command = [nice, "-n", str(niceness), *command]
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{name}.log"
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=environment.for_child({**ENVIRONMENT, "XDG_DATA_HOME": str(self.folder / "data" / name)}),
                start_new_session=True,  # Ctrl-C is for the demo alone, which then asks each of them to leave
            )
        actor = self.actors[name] = Actor(name, process, log)
        return actor
