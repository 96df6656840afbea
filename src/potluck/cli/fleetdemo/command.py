"""`potluck fleet demo` and `potluck fleet init`: what a person types, and the answer."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.options import AsJson

if TYPE_CHECKING:
    from potluck.cli.fleetdemo.summary import FleetDemoResult


def demo(
    folder: Annotated[
        Path | None, typer.Option(help="Folder for hub, laptops, logs and plot. Default: a new folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a fleet on this machine: four laptops train four policies; a laptop, the learner and the hub are killed.

    Everything runs in real processes with real sockets, on loopback only; it takes about two minutes. Exit code 1 if a
    promise was broken.

    Example: [bold]potluck fleet demo --folder my-demo[/bold]
    """
    from potluck.cli import console
    from potluck.cli.demo.command import new_folder, run_play
    from potluck.cli.fleetdemo import summary
    from potluck.cli.fleetdemo.scenario import prepare

    console.set_up_logging(verbose=False)
    where = new_folder(folder, prepare)
    outcome = run_play(_perform(where, quiet=as_json))
    if as_json:
        console.print_json(summary.as_json(outcome))
    else:
        summary.show(outcome)
    raise typer.Exit(0 if outcome.ok else 1)


async def _perform(folder: Path, *, quiet: bool) -> FleetDemoResult:
    from potluck.cli.demo.display import Display
    from potluck.cli.fleetdemo import summary
    from potluck.cli.fleetdemo.record import Record
    from potluck.cli.fleetdemo.scenario import Play
    from potluck.errors import PotluckError

    record = Record()
    began = time.monotonic()
    try:
        await Play(folder, Display(quiet), record).perform()
    except PotluckError as error:
        record.problem = str(error)
    return summary.conclude(record, folder, time.monotonic() - began)


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the files.")],
    as_json: AsJson = False,
) -> None:
    """Write a fleet to begin with: four policies, their learner, a fleet.toml, and a README that says what to do.

    Example: [bold]potluck fleet init my-fleet[/bold]
    """
    from potluck.cli import console
    from potluck.cli.fleetdemo.scenario import example_folder
    from potluck.errors import ConfigurationError

    if folder.exists():
        raise ConfigurationError(f"{folder} exists already: choose another name")
    try:
        shutil.copytree(example_folder(), folder, ignore=shutil.ignore_patterns("__pycache__", "checkpoints"))
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be written: {error}") from error
    names = sorted(path.name for path in folder.iterdir())
    if as_json:
        console.print_json({"folder": str(folder), "files": names})
    else:
        console.out.print(f"Wrote {folder}: {', '.join(names)}. Begin with its README.md.", highlight=False)
