"""`potluck join`: take part in a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from potluck import tasks

if TYPE_CHECKING:
    from potluck.cli.training import TrainOptions
    from potluck.peer.session import HubChange
    from potluck.run.peer import Peer


def join(
    link: Annotated[str, typer.Argument(help="The join link, in quotes; else POTLUCK_LINK.")] = "",
    role: Annotated[
        Literal["trainer", "aux", "observer"], typer.Option(help="What this machine does in the run.")
    ] = "trainer",
    name: Annotated[str, typer.Option(help="What you want to be called; else POTLUCK_NAME.")] = "",
    message: Annotated[str, typer.Option(help="To the organisers, if they have to let you in first.")] = "",
    wait_minutes: Annotated[float, typer.Option(help="How long to wait for an organiser to let you in.")] = 60.0,
    identity_path: Annotated[
        Path | None, typer.Option(help="File with the key you are known by; else POTLUCK_IDENTITY, else one is made.")
    ] = None,
    client_mode: Annotated[bool, typer.Option(help="Only dial out; accept no connections.")] = False,
    websocket: Annotated[
        bool, typer.Option(help="Reach the hub by WebSocket alone, as networks need that let only web traffic out.")
    ] = False,
    relay_only: Annotated[
        bool, typer.Option(help="Send everything through the hub, also where a direct way exists.")
    ] = False,
    listen: Annotated[
        list[str] | None, typer.Option(help="Accept links here, as tcp://HOST:PORT; may be repeated.")
    ] = None,
    announce: Annotated[
        list[str] | None, typer.Option(help="Tell others this address without checking it, as tcp://HOST:PORT.")
    ] = None,
    trusted_lan: Annotated[
        bool, typer.Option(help="Send bulk bytes in the clear; only where you trust everybody on the network.")
    ] = False,
    recipe: Annotated[
        Path | None, typer.Option(help="Your copy of the run's recipe, where the organiser wrote one.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step; found by trial unless given.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute, as in cpu or cuda:1; the fastest unless given.")] = "",
    max_steps: Annotated[int | None, typer.Option(help="Leave after so many steps.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Tell in JSON, one object a line.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")] = False,
) -> None:
    """Take part in a run, by its join link. Ctrl-C leaves cleanly.

    Example: [bold]potluck join 'potluck://hub.example.org:4222/my-first-run?ca=…#…' --name Ada[/bold]
    """
    from potluck.cli import console
    from potluck.cli.joining import parse_link, seated
    from potluck.cli.preflight import check_this_machine
    from potluck.cli.training import TrainOptions
    from potluck.peer import environment
    from potluck.peer.identity import Identity
    from potluck.run.peer import PeerConfig

    console.set_up_logging(verbose)
    parsed = parse_link(link, "potluck join")
    config = PeerConfig(
        role=role,
        name=name or environment.person_name(),
        invite=parsed.invite,
        message=message,
        wait_seconds=wait_minutes * 60,
        client_mode=client_mode,
        websocket_only=websocket,
        relay_only=relay_only,
        listen=tuple(listen or ()),
        announce=tuple(announce or ()),
        trusted_lan=trusted_lan,
    )
    check_this_machine(as_json)
    path = identity_path or environment.identity_path()
    identity = Identity.open(path) if path is not None else Identity.open_default()
    options = TrainOptions(recipe=recipe, batch_size=batch_size, device=device, max_steps=max_steps)

    async def stay(peer: Peer, stop: asyncio.Event) -> None:
        await _stay(peer, options, stop, as_json)

    try:
        console.run(console.until_interrupted(lambda stop: seated(parsed, identity, config, stop, as_json, stay)))
    finally:
        identity.close()


async def _stay(peer: Peer, options: TrainOptions, stop: asyncio.Event, as_json: bool) -> None:
    """Do our part, and tell who comes and goes, until asked to stop, or until the hub throws us out."""
    from potluck.cli import console
    from potluck.cli.joining import until_ended
    from potluck.cli.preflight import check_the_way
    from potluck.cli.training import help_others, train

    roster = peer.session.roster
    if as_json:
        console.print_json({"event": "joined", "peer": peer.peer_id, "peers": len(roster)})
    else:
        others = sum(presence.peer != peer.peer_id for presence in roster)
        console.out.print(f"[green]You are in[/green], with {console.count(others, 'other')}. Ctrl-C leaves.")

    def hub_changed(change: HubChange) -> None:
        if as_json:
            console.print_json({"event": f"hub {change}"})
        else:
            console.out.print("The hub is back." if change == "back" else "The hub is away; waiting for it.")

    end_hub = peer.session.listen(hub_changed)
    end = roster.listen(lambda event: console.tell_roster_event(event, len(roster), as_json))
    preflight = asyncio.create_task(check_the_way(peer, as_json), name="preflight")
    try:
        if peer.session.card.role == "trainer":
            await train(peer, options, stop, as_json)
        elif peer.session.card.role == "aux":
            await help_others(peer, stop)
        else:
            await console.unless_stopped(until_ended(peer), stop)
    finally:
        await tasks.end(preflight)
        end()
        end_hub()
