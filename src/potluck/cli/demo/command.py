"""`potluck demo`: what a person types, and the answer."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from potluck.cli.demo.summary import DemoResult

EPOCHS = 80


def demo(
    epochs: Annotated[int, typer.Option(help="How many epochs to train in all.")] = EPOCHS,
    folder: Annotated[
        Path | None, typer.Option(help="Where run, checkpoint, logs and plot go; a new folder of its own unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Tell the outcome in JSON.")] = False,
) -> None:
    """Show a whole collaboration on this machine: five peers train a language model; three are killed, one comes late.

    Everything runs in real processes with real sockets, on loopback only. Exit code 1 if a promise was broken.

    Example: [bold]potluck demo --folder my-demo[/bold]
    """
    import tempfile

    from potluck.cli import console
    from potluck.cli.demo import summary
    from potluck.cli.demo.scenario import FEWEST_EPOCHS, prepare
    from potluck.errors import ConfigurationError

    console.set_up_logging(verbose=False)
    if epochs < FEWEST_EPOCHS:
        raise ConfigurationError(f"--epochs {epochs}: the play needs at least {FEWEST_EPOCHS}")
    where = folder or Path(tempfile.mkdtemp(prefix="potluck-demo-"))
    if (where / "hub").exists():
        raise ConfigurationError(f"{where} has a demo already: choose another folder, or remove it")
    try:
        prepare(where)
    except OSError as error:
        raise ConfigurationError(f"{where} cannot be written ({error.strerror}): choose another --folder") from error
    try:
        outcome = console.run(_perform(where.absolute(), epochs, quiet=as_json))
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    if as_json:
        console.print_json(summary.as_json(outcome))
    else:
        summary.show(outcome)
    raise typer.Exit(0 if outcome.ok else 1)


async def _perform(folder: Path, epochs: int, *, quiet: bool) -> DemoResult:
    from potluck.cli import console
    from potluck.cli.demo import summary
    from potluck.cli.demo.display import Display
    from potluck.cli.demo.record import DemoRecord
    from potluck.cli.demo.scenario import Script, play
    from potluck.errors import PotluckError

    record, display = DemoRecord(), Display(quiet)
    began = time.monotonic()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # as Ctrl-C: nobody is left behind
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
