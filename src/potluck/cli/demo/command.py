"""`potluck demo`: what a person types, and the answer."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from potluck.cli.demo.summary import DemoResult

EPOCHS = 80

T = TypeVar("T")


def demo(
    epochs: Annotated[int, typer.Option(help="How many epochs to train in all.")] = EPOCHS,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for run, checkpoint, logs and plot. Default: a new folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Tell the outcome in JSON.")] = False,
) -> None:
    """Show a whole collaboration on this machine: five peers train a language model; three are killed, one comes late.

    Everything runs in real processes with real sockets, on loopback only. Exit code 1 if a promise was broken.

    Example: [bold]potluck demo --folder my-demo[/bold]
    """
    from potluck.cli import console
    from potluck.cli.demo import summary
    from potluck.cli.demo.scenario import FEWEST_EPOCHS, prepare
    from potluck.errors import ConfigurationError

    console.set_up_logging(verbose=False)
    if epochs < FEWEST_EPOCHS:
        raise ConfigurationError(f"--epochs {epochs}: the play needs at least {FEWEST_EPOCHS}")
    where = new_folder(folder, prepare)
    outcome = run_play(_perform(where, epochs, quiet=as_json))
    if as_json:
        console.print_json(summary.as_json(outcome))
    else:
        summary.show(outcome)
    raise typer.Exit(0 if outcome.ok else 1)


def new_folder(folder: Path | None, prepare: Callable[[Path], None]) -> Path:
    """The folder of a demo, with what the play needs in it; one of its own unless given."""
    import tempfile

    from potluck.errors import ConfigurationError

    where = (folder or Path(tempfile.mkdtemp(prefix="potluck-demo-"))).absolute()
    if (where / "hub").exists():
        raise ConfigurationError(f"{where} has a demo already: choose another folder, or remove it")
    try:
        prepare(where)
    except OSError as error:
        raise ConfigurationError(f"{where} cannot be written ({error}): choose another --folder") from error
    return where


def run_play(play: Coroutine[Any, Any, T]) -> T:
    """Play it. SIGTERM ends it as Ctrl-C does: nobody is left behind."""
    from potluck.cli import console

    async def perform() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await play

    try:
        return console.run(perform())
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None


async def _perform(folder: Path, epochs: int, *, quiet: bool) -> DemoResult:
    from potluck.cli import console
    from potluck.cli.demo import summary
    from potluck.cli.demo.display import Display
    from potluck.cli.demo.record import DemoRecord
    from potluck.cli.demo.scenario import Script, play
    from potluck.errors import PotluckError

    record, display = DemoRecord(), Display(quiet)
    began = time.monotonic()
    try:
        await play(folder, Script(epochs=epochs), display, record)
    except PotluckError as error:
        record.problem = str(error)
    module = await console.import_slowly("potluck.training.trainer.resultpreview")
    try:
        preview = module.examine(folder, folder / "hub" / "states")
    except PotluckError as error:
        record.problem = record.problem or str(error)
        preview = None
    else:
        record.checkpoint_epoch = preview.epoch
        record.loss_before, record.loss_after = preview.loss_before, preview.loss_after
    return summary.conclude(record, preview, folder, time.monotonic() - began)
