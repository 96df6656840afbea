"""`potluck dashboard`: the run in a browser."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from potluck.hub.keys import Signer
    from potluck.monitor.dashboard.server import ServerConfig
    from potluck.monitor.dashboard.state import Organising
    from potluck.peer.identity import Identity
    from potluck.run.peer import Peer

TAKING_OVER_SECONDS = 30.0  # after a host's sudden end its dashboard is still there for a moment, with key and port
TAKING_OVER_EVERY_SECONDS = 0.25
INVITE_SECONDS = 300.0  # for the dashboard's own peer, at its first start


def dashboard(
    link: Annotated[str, typer.Argument(help="The join link, in quotes; else POTLUCK_LINK.")] = "",
    run: Annotated[
        str, typer.Option("--run", help="A run that this machine hosts, instead of a link: with the organisers' pages.")
    ] = "",
    folder: Annotated[Path | None, typer.Option(help="The run's folder, if it is not the default one.")] = None,
    listen: Annotated[str, typer.Option(help="Address to serve on; 0.0.0.0 lets other machines look.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="Port to serve on; 0 picks a free one. Unless given: 8484, if that is free.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="PEM file, to serve by https; with --key.")] = None,
    key: Annotated[Path | None, typer.Option(help="The certificate's key.")] = None,
    trust_proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address or network of a trusted proxy, for its X-Forwarded headers; may be repeated."),
    ] = None,
    identity_path: Annotated[
        Path | None, typer.Option(help="File with the key of your peer, to vote with; else the usual one, if any.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="The organiser's own recipe, if any: for the previews.")] = None,
    while_read: Annotated[bool, typer.Option(hidden=True, help="End when standard input does.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Tell in JSON, one object a line.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")] = False,
) -> None:
    """Serve the live dashboard of a run to your browser. Ctrl-C ends it; the run goes on.

    Example: [bold]potluck dashboard 'potluck://hub.example.org:4222/my-run?ca=…#…'[/bold]
    """
    from potluck.cli import console
    from potluck.cli.joining import observe, parse_link

    console.set_up_logging(verbose)
    check_installed()
    hosted_here = bool(run) or folder is not None
    parsed = None if hosted_here else parse_link(link, "potluck dashboard")  # before nicegui, which takes seconds
    from potluck.monitor.dashboard.server import ServerConfig

    config = ServerConfig(
        host=listen, port=port, certificate=certificate, key=key, trusted_proxies=tuple(trust_proxy or ())
    )
    patience_seconds = TAKING_OVER_SECONDS if while_read else 0.0
    if parsed is None:

        async def hosted(stop: asyncio.Event) -> None:
            if while_read:
                _stop_at_end_of_input(stop)
            await _of_hosted_run(run, folder, recipe, config, stop, as_json, patience_seconds)

        console.run(console.until_interrupted(hosted))
        return
    voter = read_signer(identity_path)

    async def serve(peer: Peer, stop: asyncio.Event) -> None:
        await _serve(peer, None, voter, config, stop, as_json)

    observe(parsed, "dashboard", None, as_json, serve)


def check_installed() -> None:
    """ConfigurationError, with the remedy, where the dashboard's packages are missing."""
    from potluck.errors import ConfigurationError

    if not is_installed():
        raise ConfigurationError("the dashboard is not installed: pip install 'potluck-train[dashboard]'")


def is_installed() -> bool:
    """Whether the dashboard's packages are here."""
    from importlib.util import find_spec

    return all(find_spec(name) is not None for name in ("nicegui", "prometheus_client", "segno"))


def _stop_at_end_of_input(stop: asyncio.Event) -> None:
    """The host that started us holds our standard input open: when the host ends, in any way, we end too."""
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stop.set()

    loop.add_reader(0, readable)


async def open_identity(path: Path, patience_seconds: float) -> Identity:
    """The identity in `path`; waits at most this long while another process uses it."""
    from potluck.errors import ConfigurationError
    from potluck.peer.identity import Identity

    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return Identity.open(path)
        except ConfigurationError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(TAKING_OVER_EVERY_SECONDS)


async def _of_hosted_run(
    run: str,
    folder: Path | None,
    recipe: Path | None,
    config: ServerConfig,
    stop: asyncio.Event,
    as_json: bool,
    patience_seconds: float,
) -> None:
    """With the keys in the run's folder: as a separate member, with the organisers' pages."""
    from potluck.cli import console
    from potluck.cli.folders import hosted_run
    from potluck.clock import SystemClock
    from potluck.hub.access.member import Scopes
    from potluck.hub.access.organise import Organiser
    from potluck.hub.address import HubAddress
    from potluck.hub.joinlink import JoinLink
    from potluck.hub.keys import HubKeys, Signer
    from potluck.hub.nats.connection import ConnectionConfig, NatsConnection
    from potluck.hub.subjects import Subjects
    from potluck.monitor.dashboard.actions import LOG_FILE, ActionLog
    from potluck.monitor.dashboard.login import Login, load_or_create_token
    from potluck.monitor.dashboard.state import Organising
    from potluck.run.peer import Peer, PeerConfig
    from potluck.training.manifest.steering import Steering

    where, record = hosted_run(run, folder)
    keys = HubKeys.load_or_create(where / "identity")
    address = HubAddress(servers=record.servers, ca_pem=record.ca_pem)
    hub = await NatsConnection.connect(
        address, seed=keys.organiser_seed, run=record.run, name="main", config=ConnectionConfig(stores="guard")
    )
    try:
        identity = await open_identity(where / "identity" / "dashboard.nkey", patience_seconds)
    except BaseException:
        await hub.close()
        raise
    try:
        organiser = Organiser(hub, Subjects(record.run), keys.organiser_public)
        invite = ""
        if identity.peer_id not in {state.member.peer for state in await organiser.list_members()}:
            _, invite = await organiser.create_invite(
                scopes=Scopes(roles=("observer",)), uses=1, lifetime_seconds=INVITE_SECONDS, note="the dashboard"
            )
        config_of_peer = PeerConfig(role="observer", name="dashboard", invite=invite, client_mode=True)
        peer = Peer(address, record.run, identity, config_of_peer)
        organising = Organising(
            organiser=organiser,
            gate=Login(load_or_create_token(where), SystemClock()),
            log=ActionLog(where / LOG_FILE),
            helm=Steering(hub, record.run, Signer(keys.organiser_seed)),
            link=JoinLink.parse(record.link),
            folder=where,
            record=record,
            history=hub.store("history"),
        )

        async def start() -> bool:
            await peer.start()
            return True

        try:
            if await console.unless_stopped(start(), stop):
                token = load_or_create_token(where)
                await _serve(peer, organising, None, config, stop, as_json, token=token, recipe=recipe)
        finally:
            await peer.close()
    finally:
        identity.close()
        await hub.close()


async def _serve(
    peer: Peer,
    organising: Organising | None,
    voter: Signer | None,
    config: ServerConfig,
    stop: asyncio.Event,
    as_json: bool,
    token: str = "",
    recipe: Path | None = None,
) -> None:
    from potluck.cli import console
    from potluck.cli.joining import until_ended
    from potluck.monitor.dashboard.state import Dashboard
    from potluck.monitor.follower import RunFollower

    module = await console.import_slowly("potluck.monitor.dashboard.server")
    follower = await RunFollower.start(peer.session)
    previewer = queues = None
    try:
        if organising is not None:
            from potluck.hub.address import HubAddress
            from potluck.hub.keys import HubKeys
            from potluck.monitor.fleetqueues import FleetQueues
            from potluck.monitor.previews import Previewer  # needs torch, which a visitor need not have

            previewer = Previewer(organising.folder, lambda: follower.manifest, organising.history, recipe)
            previewer.start()
            address = HubAddress(servers=organising.record.servers, ca_pem=organising.record.ca_pem)
            seed = HubKeys.load_or_create(organising.folder / "identity").organiser_seed
            queues = FleetQueues(address, organising.record.run, seed, peer.session.now)
            queues.start()
        dashboard = Dashboard(follower, organising, voter=voter, previewer=previewer, queues=queues)
        server = module.DashboardServer(dashboard, config)
        url = await server.start()
        try:
            if as_json:
                console.print_json({"event": "dashboard", "url": url, "token": token})
            else:
                console.out.print(f"The dashboard is at [bold]{url}[/bold]", highlight=False)
                if token:
                    console.out.print(f"Organisers: {url}/login#{token}", highlight=False, soft_wrap=True)
            await console.unless_stopped(until_ended(peer), stop)
        finally:
            await server.close()
    finally:
        if previewer is not None:
            await previewer.close()
        if queues is not None:
            await queues.close()
        await follower.close()


def read_signer(identity_path: Path | None) -> Signer | None:
    """The key of this machine's peer, which may be running: it is only read."""
    from potluck.errors import ConfigurationError
    from potluck.hub.keys import Signer
    from potluck.peer import environment
    from potluck.peer.identity import default_folder

    path = identity_path or environment.identity_path() or default_folder() / "identity-0.nkey"
    try:
        seed = path.read_bytes().strip()
    except FileNotFoundError:
        if identity_path is not None:
            raise ConfigurationError(f"there is no identity in {path}: join the run first") from None
        return None
    except OSError as error:
        raise ConfigurationError(f"the identity in {path} cannot be read: {error.strerror}") from error
    return Signer(seed)
