"""The frame of the `potluck` command: help, version, exit codes, and errors without tracebacks.

Exit codes: 0 fine, 1 it failed, 2 your input is wrong, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import potluck
from potluck.cli.checkpoint import app as checkpoint
from potluck.cli.dashboard import dashboard
from potluck.cli.demo.command import demo
from potluck.cli.doctor import doctor
from potluck.cli.download import app as download
from potluck.cli.elsewhere import KnownElsewhere, group_of
from potluck.cli.fleet import app as fleet
from potluck.cli.host import host
from potluck.cli.init import init
from potluck.cli.join import aux, join, train
from potluck.cli.leaderboard import leaderboard
from potluck.cli.members import app as members
from potluck.cli.monitor import monitor
from potluck.cli.paths import app as paths
from potluck.cli.pipeline import pipeline
from potluck.cli.plan import plan
from potluck.cli.queue import app as queue
from potluck.cli.receipts import receipts
from potluck.cli.run import app as run
from potluck.cli.spot import app as spot
from potluck.cli.tokenize import tokenize
from potluck.cli.tune import tune
from potluck.cli.visualize import visualize
from potluck.cli.vote import vote
from potluck.errors import ConfigurationError, PotluckError

app = typer.Typer(
    name="potluck",
    help="Train a model together, on whatever everyone brings.",
    epilog="Start here: `potluck demo` shows a whole collaboration on this machine.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo)
app.command("init")(init)
app.command("host")(host)
app.command("join", cls=KnownElsewhere)(join)
app.command("train", cls=KnownElsewhere)(train)
app.command("aux", cls=KnownElsewhere)(aux)
app.command("monitor", cls=KnownElsewhere)(monitor)
app.command("dashboard")(dashboard)
app.command("visualize", cls=KnownElsewhere)(visualize)
app.command("leaderboard")(leaderboard)
app.command("receipts")(receipts)
app.command("vote")(vote)
app.command("doctor")(doctor)
app.command("plan")(plan)
app.command("pipeline")(pipeline)
app.command("tune", cls=KnownElsewhere)(tune)
app.command("tokenize")(tokenize)
app.add_typer(members, name="members")
app.add_typer(fleet, name="fleet")
app.add_typer(paths, name="paths")
app.add_typer(queue, name="queue")
app.add_typer(run, name="run")
app.add_typer(spot, name="spot")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(download, name="download")
_collab = {"train": train, "aux": aux, "monitor": monitor, "visualize": visualize, "tune": tune}
app.add_typer(group_of(_collab), name="collab", hidden=True)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"potluck {potluck.__version__}")
        raise typer.Exit


@app.callback()
def _frame(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; an error that we foresaw becomes a sentence and an exit code."""
    try:
        app()
    except PotluckError as error:
        typer.secho(f"potluck: {error}", fg=typer.colors.RED, err=True)
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
