"""`potluck join`, `train`, `aux`: take part in a run."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from potluck.cli import options as o


def join(
    link: o.Link = "",
    role: Annotated[
        Literal["auto", "trainer", "aux", "observer"],
        typer.Option(help="What this machine does in the run; auto: what it is fit for."),
    ] = "auto",
    name: o.Name = "",
    message: o.Message = "",
    wait_minutes: o.WaitMinutes = 60.0,
    identity_path: o.IdentityPath = None,
    client_mode: o.ClientMode = False,
    websocket: o.WebSocket = False,
    relay_only: o.RelayOnly = False,
    listen: o.Listen = None,
    announce: o.Announce = None,
    trusted_lan: o.TrustedLan = False,
    bandwidth: o.Bandwidth = "",
    recipe: o.RecipeFile = None,
    batch_size: o.BatchSize = None,
    n_workers: o.NumWorkers = 1,
    device: o.Device = "",
    threads: o.Threads = None,
    max_memory: o.MaxMemory = "",
    max_steps: o.MaxSteps = None,
    schedule: o.Schedule = "",
    backup_every_step: o.BackupEveryStep = 0,
    state_path: o.StatePath = None,
    hand_in_seconds: o.HandInSeconds = 60.0,
    as_json: o.AsJson = False,
    verbose: o.Verbose = False,
) -> None:
    """Take part in a run, by its join link: trains, unless this machine is not fit for that. Ctrl-C leaves cleanly.

    Example: [bold]potluck join 'potluck://hub.example.org:4222/my-first-run?ca=…#…' --name Ada[/bold]
    """
    from potluck.cli.takingpart import NetworkOptions, PersonOptions, TrainOptions, fitting_role, take_part

    take_part(
        "potluck join",
        link,
        fitting_role(as_json) if role == "auto" else role,
        PersonOptions(name=name, message=message, wait_seconds=wait_minutes * 60, identity_path=identity_path),
        NetworkOptions.of(client_mode, websocket, relay_only, listen, announce, trusted_lan, bandwidth),
        TrainOptions.of(
            recipe=recipe,
            batch_size=batch_size,
            num_readers=n_workers,
            device=device,
            threads=threads,
            max_memory=max_memory,
            max_steps=max_steps,
            schedule=schedule,
            backup_every=backup_every_step,
            state_path=state_path,
            hand_in_seconds=hand_in_seconds,
        ),
        as_json=as_json,
        verbose=verbose,
    )


def train(
    link: o.Link = "",
    name: o.Name = "",
    message: o.Message = "",
    wait_minutes: o.WaitMinutes = 60.0,
    identity_path: o.IdentityPath = None,
    client_mode: o.ClientMode = False,
    websocket: o.WebSocket = False,
    relay_only: o.RelayOnly = False,
    listen: o.Listen = None,
    announce: o.Announce = None,
    trusted_lan: o.TrustedLan = False,
    bandwidth: o.Bandwidth = "",
    recipe: o.RecipeFile = None,
    batch_size: o.BatchSize = None,
    n_workers: o.NumWorkers = 1,
    device: o.Device = "",
    threads: o.Threads = None,
    max_memory: o.MaxMemory = "",
    max_steps: o.MaxSteps = None,
    schedule: o.Schedule = "",
    backup_every_step: o.BackupEveryStep = 0,
    state_path: o.StatePath = None,
    hand_in_seconds: o.HandInSeconds = 60.0,
    as_json: o.AsJson = False,
    verbose: o.Verbose = False,
) -> None:
    """Train with the others, whatever this machine is. As `join`, without a choice of roles.

    Examples: [bold]potluck train 'potluck://…' --batch-size 32 --n-workers 2 --backup-every-step 100[/bold]

    [bold]potluck train 'potluck://…' --schedule 22:00-07:00 --bandwidth 20Mbit --max-memory 8GB[/bold]
    """
    join(
        link,
        "trainer",
        name,
        message,
        wait_minutes,
        identity_path,
        client_mode,
        websocket,
        relay_only,
        listen,
        announce,
        trusted_lan,
        bandwidth,
        recipe,
        batch_size,
        n_workers,
        device,
        threads,
        max_memory,
        max_steps,
        schedule,
        backup_every_step,
        state_path,
        hand_in_seconds,
        as_json,
        verbose,
    )


def aux(
    link: o.Link = "",
    as_active_peer: Annotated[
        bool,
        typer.Option("--as-active-peer/--not-as-active-peer", help="Keep the run's state for others, and save it."),
    ] = True,
    name: o.Name = "",
    message: o.Message = "",
    wait_minutes: o.WaitMinutes = 60.0,
    identity_path: o.IdentityPath = None,
    client_mode: o.ClientMode = False,
    websocket: o.WebSocket = False,
    relay_only: o.RelayOnly = False,
    listen: o.Listen = None,
    announce: o.Announce = None,
    trusted_lan: o.TrustedLan = False,
    bandwidth: o.Bandwidth = "",
    backup_every_step: o.BackupEveryStep = 10,
    state_path: o.StatePath = None,
    as_json: o.AsJson = False,
    verbose: o.Verbose = False,
) -> None:
    """Help without training: average for others, keep the run's state, coordinate if your invite allows it.

    A machine with a public address and no accelerator does most good so. The link's invite has to allow the role aux.

    Example: [bold]potluck aux 'potluck://hub.example.org:4222/my-run?ca=…#…' --listen tcp://0.0.0.0:7000[/bold]
    """
    from potluck.cli.takingpart import NetworkOptions, PersonOptions, TrainOptions, take_part

    take_part(
        "potluck aux",
        link,
        "aux",
        PersonOptions(name=name, message=message, wait_seconds=wait_minutes * 60, identity_path=identity_path),
        NetworkOptions.of(client_mode, websocket, relay_only, listen, announce, trusted_lan, bandwidth),
        TrainOptions.of(backup_every=backup_every_step if as_active_peer else 0, state_path=state_path),
        keeps_states=as_active_peer,
        as_json=as_json,
        verbose=verbose,
    )
