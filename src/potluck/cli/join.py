"""`potluck join`, `train`, `aux`: take part in a run."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from potluck.cli import options as o
from potluck.cli.optiongroups import (
    BackupOptions,
    KeeperBackupOptions,
    NetworkOptions,
    PersonOptions,
    TrainOptions,
    grouped,
)


@grouped
def join(
    link: o.Link = "",
    role: Annotated[
        Literal["auto", "trainer", "aux", "observer"],
        typer.Option(help="What this machine does in the run; auto: what it is fit for."),
    ] = "auto",
    *,
    person: PersonOptions,
    training: TrainOptions,
    backups: BackupOptions,
    network: NetworkOptions,
    as_json: o.AsJson = False,
    verbose: o.Verbose = False,
) -> None:
    """Take part in a run, by its join link: trains, unless this machine is not fit for that. Ctrl-C leaves cleanly.

    Example: [bold]potluck join 'potluck://hub.example.org:4222/my-first-run?ca=…#…' --name Ada[/bold]
    """
    from potluck.cli.takingpart import fitting_roles, run_participant

    fit = fitting_roles(as_json) if role == "auto" else (role,)
    run_participant("potluck join", link, fit, person, network, training, backups, as_json=as_json, verbose=verbose)


@grouped
def train(
    link: o.Link = "",
    *,
    person: PersonOptions,
    training: TrainOptions,
    backups: BackupOptions,
    network: NetworkOptions,
    as_json: o.AsJson = False,
    verbose: o.Verbose = False,
) -> None:
    """Train with the others, whatever this machine is. As `join`, without a choice of roles.

    Examples: [bold]potluck train 'potluck://…' --batch-size 32 --n-workers 2 --backup-every-step 100[/bold]

    [bold]potluck train 'potluck://…' --schedule 22:00-07:00 --bandwidth 20Mbit --max-memory 8GB[/bold]
    """
    from potluck.cli.takingpart import run_participant

    run_participant(
        "potluck train", link, ("trainer",), person, network, training, backups, as_json=as_json, verbose=verbose
    )


@grouped
def aux(
    link: o.Link = "",
    as_active_peer: Annotated[
        bool,
        typer.Option("--as-active-peer/--not-as-active-peer", help="Keep the run's state for others, and save it."),
    ] = True,
    *,
    person: PersonOptions,
    backups: KeeperBackupOptions,
    network: NetworkOptions,
    as_json: o.AsJson = False,
    verbose: o.Verbose = False,
) -> None:
    """Help without training: average for others, keep the run's state, coordinate if your invite allows it.

    A machine with a public address and no accelerator does most good so. The link's invite has to allow the role aux.

    Example: [bold]potluck aux 'potluck://hub.example.org:4222/my-run?ca=…#…' --listen tcp://0.0.0.0:7000[/bold]
    """
    from potluck.cli.takingpart import run_participant

    run_participant(
        "potluck aux",
        link,
        ("aux",),
        person,
        network,
        TrainOptions(),
        backups if as_active_peer else None,
        as_json=as_json,
        verbose=verbose,
    )
