"""The play from top to bottom: who comes, who is killed, who joins late.

    Ada      begins alone, which is what the others are compared with; then she is killed
    Grace    only dials out, as from behind a router; a little slower
    Edsger   reaches the hub by WebSocket and everybody else through it, as from behind a strict firewall; slower still
    Alan     computes nothing: an aux peer that reduces for others and may coordinate
    host     hub, guard and coordinator; killed, and started again
    Barbara  joins late

Speeds differ by `nice`: those who share a machine cannot differ by hardware.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from potluck.cli import console
from potluck.cli.demo.display import Display
from potluck.cli.demo.observer import DemoObserver, watching
from potluck.cli.demo.processes import Processes
from potluck.cli.demo.record import DemoRecord, samples_per_second

RUN = "demo"
HOST = "host"
ADA, GRACE, EDSGER, ALAN, BARBARA = "Ada", "Grace", "Edsger", "Alan", "Barbara"
BATCH = ("--batch-size", "16")
FEWEST_EPOCHS = 20  # fewer, and the parts of the play would overlap

# A model so small that two cores learn something in two minutes.
RUN_FILE = f"""\
name = "{RUN}"
recipe = "stdlib-lm"
[model]
layers = 2
width = 96
heads = 4
context = 64
[training]
algorithm = "sync"
target_batch_size = 384
matchmaking_seconds = 1.0
[optimizer]
learning_rate = 4e-3
[schedule]
kind = "constant"
warmup_epochs = 5
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """By which epoch what happens; derived from how many there are in all."""

    epochs: int

    def part(self, share: float) -> int:
        """The epoch at which so much of the play is over."""
        return max(1, round(self.epochs * share))


def prepare(folder: Path) -> None:
    """Write what the play needs; OSError where that cannot be."""
    (folder / "keys").mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(RUN_FILE, encoding="utf-8")


async def play(folder: Path, script: Script, display: Display, record: DemoRecord) -> None:
    """Play it. What goes wrong is raised; those that are left are asked to leave in any case."""
    processes = Processes(folder)
    began_at = time.time()
    try:
        link = str((await (await processes.host()).until("ready"))["link"])
        display.say(f"The host is open after {time.time() - began_at:.1f} s.")
        async with watching(link, record, began_at) as observer, display.table_of(observer):
            await _come(processes, observer, display, script, link)
            await _bear(processes, observer, display, script)
            await _late(processes, observer, display, link)
            await observer.until_epoch(script.epochs)
            await observer.until("a checkpoint", lambda: any(processes.states.rglob("*.safetensors")))
            display.say(f"Epoch {record.epoch} is committed. All are asked to leave.")
    finally:
        record.exit_codes = await _all_leave(processes)


async def _all_leave(processes: Processes) -> dict[str, int]:
    """Have everybody leave, though somebody presses Ctrl-C meanwhile: no process is left behind."""
    leaving = asyncio.create_task(processes.leave())
    try:
        await console.import_slowly("potluck.training.trainer.resultpreview")  # needed next
        return await asyncio.shield(leaving)
    except asyncio.CancelledError:
        await leaving
        raise


async def _come(processes: Processes, observer: DemoObserver, display: Display, script: Script, link: str) -> None:
    """One peer alone, then all together."""
    record = observer.record
    record.trainers = [ADA]
    await processes.join(ADA, link, *BATCH)
    link_of_alan = await processes.invite_coordinator(RUN)  # while she imports torch
    await observer.until_epoch(1)
    display.say(f"[bold]{ADA}[/bold] trains alone.")
    await observer.until_epoch(script.part(0.15))
    record.alone_until_seconds = observer.now
    record.trainers += [GRACE, EDSGER]
    await processes.join(GRACE, link, *BATCH, "--client-mode", niceness=2)
    await processes.join(EDSGER, link, *BATCH, "--websocket", "--relay-only", niceness=4)
    await processes.join(ALAN, link_of_alan, "--role", "aux")
    display.say(
        f"[bold]{GRACE}[/bold] (a client), [bold]{EDSGER}[/bold] (through the hub alone) and [bold]{ALAN}[/bold] "
        "(an aux peer) join."
    )
    await observer.until("an epoch of all", lambda: record.has_epoch_of(record.trainers))
    await observer.until_epoch(record.epoch + 2)  # the last newcomer has settled down
    record.together_from_seconds = observer.now
    await observer.until_epoch(record.epoch + script.part(0.15))
    alone, together = samples_per_second(record.alone()), samples_per_second(record.together())
    if alone and together:
        display.say(f"Together: {together:.0f} samples/s, {together / alone:.1f} times what {ADA} did alone.")


async def _bear(processes: Processes, observer: DemoObserver, display: Display, script: Script) -> None:
    """A trainer is killed; then the coordinator, twice: first that is the host, hub and all."""
    record = observer.record
    incident = observer.note("trainer killed", ADA)
    await processes.kill(ADA)
    seconds = await observer.until_over(incident)
    display.say(f"[bold]{ADA}[/bold] was killed; the first epoch without her came {seconds:.1f} s later.")
    for _ in range(2):
        await observer.until_epoch(record.epoch + script.part(0.08))
        await observer.until("a coordinator", lambda: observer.coordinator in processes.actors)
        await _kill_coordinator(processes, observer, display, observer.coordinator)


async def _kill_coordinator(processes: Processes, observer: DemoObserver, display: Display, who: str) -> None:
    incident = observer.note("coordinator killed", who)
    await processes.kill(who)
    if who == HOST:
        await (await processes.host()).until("ready")
    seconds = await observer.until_over(incident)
    what = "the hub with it; the host was started again" if who == HOST else "the hub stayed"
    display.say(f"[bold]{who}[/bold], who coordinated, was killed ({what}). The next epoch came {seconds:.1f} s later.")


async def _late(processes: Processes, observer: DemoObserver, display: Display, link: str) -> None:
    """Somebody new."""
    observer.record.trainers.append(BARBARA)
    incident = observer.note("newcomer", BARBARA)
    await processes.join(BARBARA, link, *BATCH)
    seconds = await observer.until_over(incident)
    display.say(
        f"[bold]{BARBARA}[/bold] joined; her first samples are in an epoch {seconds:.1f} s after she decided to."
    )
