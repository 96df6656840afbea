"""`potluck fleet host` and `potluck fleet agent`: the hub of a fleet, and a machine of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.cli.options import AsJson, Link, Verbose

if TYPE_CHECKING:
    from potluck.run.host import Host

DEFAULT_RUN = "fleet"
MACHINES_FILE = "machines-invite"

Run = Annotated[str, typer.Option("--run", help="The fleet's name.")]
Engine = Annotated[str, typer.Option(help="Socket of the container engine, as in unix:///run/podman/podman.sock.")]


def host(
    run: Run = DEFAULT_RUN,
    folder: Annotated[
        Path | None, typer.Option(help="The hub's folder; a host started again on it goes on from there.")
    ] = None,
    listen: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port for members; 0 picks a free one and keeps it.")] = 0,
    websocket_port: Annotated[int, typer.Option(help="The same for WebSocket; 443 passes most firewalls.")] = 0,
    announce: Annotated[
        list[str] | None, typer.Option(help="Name or address by which machines reach this one; may be repeated.")
    ] = None,
    wheel: Annotated[bool, typer.Option(help="Serve this Potluck over HTTP, so that machines can install it.")] = True,
    dashboard: Annotated[bool, typer.Option(help="Serve the live dashboard, if it is installed.")] = True,
    dashboard_port: Annotated[
        int | None, typer.Option(help="Its port; 0 picks a free one. Unless given: 8484, if that is free.")
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Host a fleet: a hub with queues that machines dial out to. Prints the link for machines.

    Example: [bold]potluck fleet host --announce my-server.example.org[/bold]
    """
    from potluck.cli import console
    from potluck.cli.folders import run_folder
    from potluck.cli.hosting import Backing, Work, dashboard_options, serve
    from potluck.hub.guard.guard import GuardConfig
    from potluck.hub.server.configuration import HubConfig
    from potluck.hub.subjects import check_run_name
    from potluck.link.direct.addresses import announced_hosts
    from potluck.run.host import Host, HostConfig

    console.set_up_logging(verbose)
    config = HostConfig(
        hub=HubConfig(
            folder=run_folder(check_run_name(run), folder),
            run=run,
            host=listen,
            port=port,
            websocket_port=websocket_port,
            advertised_hosts=tuple(announce or announced_hosts(listen)),
        ),
        guard=GuardConfig(run=run),
        wheel_port=0 if wheel else None,
    )
    work = Work(
        run_file=None,
        backups=Backing(every_epochs=10, keep_last=3, keep_every=0, upload_to=""),
        dashboard=dashboard_options(config, dashboard, listen, dashboard_port, ()),
        announce=_announce,
    )
    console.run(console.until_interrupted(lambda stop: serve(Host(config), work, stop, as_json)))


async def _announce(host: Host, as_json: bool) -> None:
    """Say how machines come in."""
    from rich.markup import escape

    from potluck.cli import console

    link = await machines_link(host)
    if as_json:
        console.print_json({"event": "ready", "run": host.record.run, "link": link})
        return
    console.out.print(f"[green]The fleet [bold]{host.record.run}[/bold] is open.[/green] On each machine:\n")
    if host.link.wheel is not None:
        console.out.print(f"  {escape(host.link.pip_line)}", soft_wrap=True, highlight=False)
    console.out.print(f"  potluck fleet agent '{escape(link)}' --allow process\n", soft_wrap=True, highlight=False)
    console.out.print("Then, here: `potluck fleet machines`, and `potluck fleet up fleet.toml`. Ctrl-C ends the host.")


async def machines_link(host: Host) -> str:
    """The link for machines: made at the first start, the same at each later one."""
    from dataclasses import replace

    from potluck.hub.access.invite import invite_id
    from potluck.hub.access.member import Scopes
    from potluck.hub.access.organise import Organiser
    from potluck.hub.nats.connection import NatsConnection
    from potluck.hub.privatefiles import read_private, write_private
    from potluck.hub.subjects import Subjects

    path = host.config.hub.folder / MACHINES_FILE
    secret = (read_private(path) or "").strip()
    hub = await NatsConnection.connect(host.address, seed=host.keys.organiser_seed, run=host.record.run, name="main")
    try:
        organiser = Organiser(hub, Subjects(host.record.run), host.keys.organiser_public)
        valid = {invite.id for invite in await organiser.list_invites() if not invite.revoked}
        if not secret or invite_id(secret) not in valid:
            _, secret = await organiser.create_invite(
                scopes=Scopes(roles=("machine", "observer")), uses=None, note="machines of the fleet"
            )
            write_private(path, secret)
    finally:
        await hub.close()
    return str(replace(host.link, invite=secret))


def agent(
    link: Link = "",
    name: Annotated[str, typer.Option(help="What this machine is called; unless given, its host name.")] = "",
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="What jobs may do here: process, images=NAME, mounts=/FOLDER (or /FOLDER:rw), gpus, network=host. "
            "May be repeated; several with commas."
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder for the jobs' working folders.")] = None,
    websocket: Annotated[bool, typer.Option("--websocket", help="Reach the hub by WebSocket alone.")] = False,
    relay_only: Annotated[bool, typer.Option("--relay-only", help="Send everything through the hub.")] = False,
    keep_jobs: Annotated[
        bool, typer.Option("--keep-jobs", help="Leave jobs running when the agent is told to end.")
    ] = False,
    engine: Engine = "",
    install_service: Annotated[
        bool, typer.Option("--install-service", help="Have systemd start this agent with your session, and end.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Lend this machine to a fleet: runs the jobs that an organiser signed and that you allow. Dials out only.

    Ctrl-C ends its jobs, with notice. Jobs outlive an agent that is killed; started again, it takes them up.

    Example: [bold]potluck fleet agent 'potluck://…' --allow process --allow images=potluck-*[/bold]
    """
    import platform

    import platformdirs

    from potluck.cli import console
    from potluck.cli.joining import parse_link
    from potluck.errors import ConfigurationError
    from potluck.fleet.agent.agent import Agent, AgentConfig
    from potluck.fleet.agent.runners.process import ProcessRunner
    from potluck.fleet.agent.runners.runner import Runner
    from potluck.fleet.jobs.job import Allowance
    from potluck.hub.privatefiles import make_private_folder
    from potluck.peer.identity import Identity

    console.set_up_logging(verbose)
    parsed = parse_link(link, "potluck fleet agent")
    allowance = Allowance.parse(allow or [])
    if not allowance.process and not allowance.images:
        raise ConfigurationError(
            "what may jobs do on this machine? Say so with --allow: process (programs with your rights), or "
            "images=NAME (containers of these images)"
        )
    where = folder or Path(platformdirs.user_data_dir("potluck")) / "agents" / parsed.run
    make_private_folder(where)
    config = AgentConfig(
        name=name or platform.node(),
        folder=where,
        allow=allowance,
        websocket_only=websocket,
        relay_only=relay_only,
        keeps_jobs=keep_jobs,
    )
    if install_service:
        from potluck.fleet.agent.service import install

        unit = install(str(parsed), config, engine)
        typer.echo(f"Wrote {unit}. Start it with: systemctl --user enable --now {unit.name}")
        return
    identity = Identity.open(where / "identity.nkey", "--folder")
    runners: dict[str, Runner] = {}
    if allowance.process:
        runners["process"] = ProcessRunner(where / "jobs")

    async def work(stop: asyncio.Event) -> None:
        if allowance.images:
            await _add_engine(runners, engine, where, identity.peer_id, as_json)
        machine = Agent(parsed, identity, config, runners)

        def connected() -> None:
            if as_json:
                console.print_json({"event": "connected", "machine": config.name, "peer": machine.peer_id})
            else:
                console.out.print(f"The machine {config.name} is in the fleet {parsed.run}. Ctrl-C ends its jobs.")

        await machine.run(stop, connected)

    try:
        console.run(console.until_interrupted(work))
    finally:
        identity.close()


async def _add_engine(runners: dict[str, Any], engine: str, where: Path, peer: str, as_json: bool) -> None:
    """The runner for containers, if an engine answers; else say so."""
    from potluck.cli import console
    from potluck.errors import ConfigurationError
    from potluck.fleet.agent.runners.container import ContainerRunner

    try:
        runners["container"] = await asyncio.to_thread(ContainerRunner.open, where / "jobs", peer, engine)
    except ConfigurationError as error:
        if engine or not runners:
            raise
        if as_json:
            console.print_json({"event": "no engine", "message": str(error)})
        else:
            console.err.print(f"This machine runs no containers: {error}", markup=False)
