"""`potluck host`: start a run."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from potluck.optim.helper import Helper
    from potluck.run.host import Host


def host(
    run: Annotated[str, typer.Option("--run", help="The run's name.")] = "my-first-run",
    folder: Annotated[
        Path | None, typer.Option(help="Where the run lives; started again there, it goes on where it was.")
    ] = None,
    listen: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port for members; 0 picks a free one and keeps it.")] = 0,
    websocket_port: Annotated[int, typer.Option(help="Port for WebSocket; 443 passes most firewalls.")] = 0,
    announce: Annotated[
        list[str] | None, typer.Option(help="Name or address by which members reach this machine; may be repeated.")
    ] = None,
    hub: Annotated[
        str, typer.Option(help="Use this NATS server or cluster instead, as tls://HOST:PORT,HOST:PORT.")
    ] = "",
    hub_ca: Annotated[Path | None, typer.Option(help="File with the authority of that server's certificate.")] = None,
    print_hub_config: Annotated[
        bool, typer.Option(help="Print what an administrator adds to an existing server's configuration, and end.")
    ] = False,
    token_holders: Annotated[
        Literal["refused", "listed", "anyone"], typer.Option(help="Who gets in with a Hugging Face token.")
    ] = "refused",
    users: Annotated[list[str] | None, typer.Option("--user", help="Hugging Face user to let in.")] = None,
    organisations: Annotated[
        list[str] | None, typer.Option("--organisation", help="Hugging Face organisation whose members to let in.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Tell in JSON, one object a line.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")] = False,
) -> None:
    """Start a run: a hub that everybody can reach, its guard, and an aux peer. Prints the join link.

    Example: [bold]potluck host --run my-first-run --announce my-server.example.org[/bold]
    """
    from potluck.cli import console
    from potluck.cli.folders import run_folder
    from potluck.hub.guard.guard import GuardConfig
    from potluck.hub.guard.member import Policy
    from potluck.hub.keys import HubKeys
    from potluck.hub.server.configuration import MAX_PAYLOAD_BYTES, HubConfig, render_accounts
    from potluck.hub.subjects import check_run_name
    from potluck.peer import environment
    from potluck.run.host import Host, HostConfig

    console.set_up_logging(verbose)
    where = run_folder(check_run_name(run), folder)
    if print_hub_config:
        typer.echo("# For the configuration of a nats-server that has JetStream; restart it afterwards.")
        typer.echo(f"max_payload: {MAX_PAYLOAD_BYTES}")
        typer.echo(render_accounts(HubKeys.load_or_create(where / "identity")))
        return
    config = HostConfig(
        hub=HubConfig(
            folder=where,
            run=run,
            host=listen,
            port=port,
            websocket_port=websocket_port,
            advertised_hosts=tuple(announce or (() if hub else _own_addresses(listen))),
        ),
        guard=GuardConfig(
            run=run,
            policy=Policy(
                token_holders=token_holders, users=tuple(users or ()), organisations=tuple(organisations or ())
            ),
            huggingface_url=environment.huggingface_endpoint(),
        ),
        hub_url=hub,
        hub_ca=hub_ca,
    )
    console.run(console.until_interrupted(lambda stop: _serve(Host(config), stop, as_json)))


async def _serve(host: Host, stop: asyncio.Event, as_json: bool) -> None:
    from potluck.cli import console

    async def start() -> bool:
        await host.start()
        return True

    if not await console.unless_stopped(start(), stop):
        return
    try:
        _announce(host, as_json)
        await _watch(host, stop, as_json)
    finally:
        await host.stop()


async def _watch(host: Host, stop: asyncio.Event, as_json: bool) -> None:
    """Tell who comes and goes until asked to stop, or until the hub dies."""
    from potluck.cli import console

    assert host.peer is not None
    roster = host.peer.session.roster
    end = roster.listen(lambda event: console.tell_roster_event(event, len(roster), as_json))
    try:
        await console.unless_stopped(_help(host), stop)
    finally:
        end()


async def _help(host: Host) -> None:
    """Have the host's own peer reduce for the trainers, and coordinate; raises when the hub has died."""
    # Torch takes seconds to import: the run is open by now, and the event loop must go on meanwhile.
    module = await asyncio.to_thread(importlib.import_module, "potluck.optim.helper")
    assert host.peer is not None
    helper: Helper = await module.Helper.of(host.peer)
    try:
        await host.failed()
    finally:
        await helper.close()


def _announce(host: Host, as_json: bool) -> None:
    from rich.markup import escape

    from potluck.cli import console

    assert host.peer is not None
    others = len(host.peer.session.roster) - 1
    if as_json:
        console.print_json({"event": "ready", "run": host.record.run, "link": str(host.link), "others": others})
        return
    console.out.print(f"[green]The run [bold]{host.record.run}[/bold] is open.[/green] Others join it with:\n")
    console.out.print(f"  potluck join '{escape(str(host.link))}'\n", soft_wrap=True, highlight=False)
    if others > 0:
        console.out.print(f"In the run already: {console.count(others, 'other')}.")
    console.out.print("Who comes and goes is told below. Ctrl-C ends the host; started again, it goes on.")


def _own_addresses(listen: str) -> tuple[str, ...]:
    """What to put into the link when nobody says: the address this machine listens on, or its own on the network."""
    from potluck.link.direct.addresses import local_interfaces

    if listen not in ("0.0.0.0", "::"):
        return (listen,)
    addresses = [i.ip for i in local_interfaces() if not i.ip.is_loopback and not i.ip.is_link_local]
    ipv4 = [str(ip) for ip in addresses if ip.version == 4]
    return tuple(ipv4 or ["127.0.0.1"])
