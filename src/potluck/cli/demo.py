"""`potluck demo`: a whole collaboration on this machine, with the real commands in real processes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

DEADLINE_SECONDS = 60.0
VOLUNTEERS = ("Ada", "Grace", "Edsger")


def demo(as_json: Annotated[bool, typer.Option("--json", help="Tell the outcome in JSON.")] = False) -> None:
    """Show a whole collaboration on this machine: a host, three volunteers, a sudden death, a host that comes back.

    Everything runs in real processes with real sockets, on loopback only. Exit code 1 if a promise was broken.
    """
    from potluck.cli import console

    outcome = console.run(_perform(as_json))
    if as_json:
        console.print_json(outcome)
    raise typer.Exit(0 if outcome["ok"] else 1)


class _Actor:
    """One command of the demo, whose JSON lines we read along."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.events: list[dict[str, Any]] = []
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read(), name=f"reads {name}")

    @classmethod
    async def start(cls, folder: Path, name: str, *arguments: str) -> _Actor:
        command = [sys.executable, "-m", "potluck.cli", *arguments, "--json"]
        log = folder / f"{name}.log"
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=errors)
        return cls(name, process, log)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            async with self._news:
                self.events.append(json.loads(line))
                self._news.notify_all()
        async with self._news:
            self._news.notify_all()

    async def until(self, after: int = 0, **wanted: Any) -> dict[str, Any]:
        """The first event from number `after` on that has these values."""

        def found() -> dict[str, Any] | None:
            matches = (e for e in self.events[after:] if all(e.get(key) == value for key, value in wanted.items()))
            return next(matches, None)

        async with asyncio.timeout(DEADLINE_SECONDS), self._news:
            await self._news.wait_for(lambda: found() is not None or self._reader.done())
        event = found()
        if event is None:
            raise RuntimeError(f"{self.name} ended without saying {wanted}: {self.log.read_text()[-2000:]}")
        return event

    async def end(self, how: signal.Signals = signal.SIGINT) -> int:
        """Send a signal and wait for the process to end."""
        if self.process.returncode is None:
            self.process.send_signal(how)
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                return await self.process.wait()
        except TimeoutError:
            self.process.kill()
            return await self.process.wait()
        finally:
            await self._reader


class _Stage:
    """What the audience sees."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.figures: dict[str, float] = {}

    def say(self, text: str) -> None:
        """One line of the story."""
        from potluck.cli import console

        if not self.quiet:
            console.out.print(text, highlight=False)

    def timed(self, what: str, started: float) -> float:
        """Keep and return the seconds since `started`."""
        self.figures[what] = round(time.monotonic() - started, 3)
        return self.figures[what]


async def _perform(quiet: bool) -> dict[str, Any]:
    stage = _Stage(quiet)
    with tempfile.TemporaryDirectory(prefix="potluck-demo-") as folder:
        actors: dict[str, _Actor] = {}
        try:
            await _play(stage, Path(folder), actors)
            problem = ""
        except (TimeoutError, RuntimeError) as error:
            problem = str(error) or "something took longer than a minute"
            stage.say(f"[red]A promise was broken: {problem}[/red]")
        finally:
            codes = {name: await actor.end() for name, actor in actors.items()}
    if not problem and any(codes.values()):
        problem = f"not everybody left cleanly: {codes}"
    if not problem:
        stage.say("[green]All promises were kept.[/green] Now for real: [bold]potluck host[/bold]")
    return {"ok": not problem, "problem": problem, "seconds": stage.figures}


async def _play(stage: _Stage, folder: Path, actors: dict[str, _Actor]) -> None:
    host_arguments = ("host", "--run", "demo", "--folder", str(folder / "run"), "--listen", "127.0.0.1")
    started = time.monotonic()
    host = actors["host"] = await _Actor.start(folder, "host", *host_arguments)
    link = (await host.until(event="ready"))["link"]
    stage.say(f"The host is open after {stage.timed('host open', started):.1f} s.")

    started = time.monotonic()
    for name in VOLUNTEERS:
        identity = ("--identity-path", str(folder / f"{name}.nkey"), "--name", name)
        mode = ("--client-mode",) if name == VOLUNTEERS[-1] else ()
        actors[name] = await _Actor.start(folder, name, "join", link, *identity, *mode)
    for name in VOLUNTEERS:
        await host.until(event="joined", name=name)
    stage.say(f"{', '.join(VOLUNTEERS)} are in after {stage.timed('all joined', started):.1f} s.")

    victim = actors.pop("Grace")
    watcher = actors["Ada"]
    seen = len(watcher.events)
    started = time.monotonic()
    await victim.end(signal.SIGKILL)
    await watcher.until(seen, event="dead", name="Grace")
    stage.say(f"Grace's process was killed; Ada knows {stage.timed('death seen', started):.2f} s later.")

    seen_by = {name: len(actors[name].events) for name in ("Ada", "Edsger")}
    started = time.monotonic()
    await actors.pop("host").end(signal.SIGKILL)
    host = actors["host"] = await _Actor.start(folder, "host", *host_arguments)
    again = (await host.until(event="ready"))["link"]
    if again != link:
        raise RuntimeError("the host came back with another link")
    for name, seen in seen_by.items():
        await actors[name].until(seen, event="hub back")
    stage.say(f"The host was killed and started again; all are back {stage.timed('host back', started):.1f} s later.")

    started = time.monotonic()
    identity = ("--identity-path", str(folder / "Grace.nkey"), "--name", "Grace")
    actors["Grace"] = await _Actor.start(folder, "Grace", "join", link, *identity)
    await host.until(event="joined", name="Grace")
    stage.say(f"Grace joins again with her old key, {stage.timed('came back', started):.1f} s after she decided to.")
