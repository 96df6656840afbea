"""`potluck host`: start a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from potluck.training.manifest.runfile import RunFile


def host(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN.TOML", help="What to train: a run.toml, or the folder that has one.")
    ] = None,
    run: Annotated[
        str, typer.Option("--run", help="The run's name, without a run.toml: an empty hub for tests.")
    ] = "my-first-run",
    folder: Annotated[
        Path | None, typer.Option(help="The run's folder; a host started again on it goes on from there.")
    ] = None,
    listen: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port for members; 0 picks a free one and keeps it.")] = 0,
    websocket_port: Annotated[int, typer.Option(help="The same for WebSocket; 443 passes most firewalls.")] = 0,
    wheel: Annotated[
        bool, typer.Option(help="Serve this Potluck over HTTP, so that newcomers and notebooks can install it.")
    ] = True,
    wheel_port: Annotated[int, typer.Option(help="Port for that; 0 picks a free one and keeps it.")] = 0,
    announce: Annotated[
        list[str] | None, typer.Option(help="Name or address by which members reach this machine; may be repeated.")
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            help="All hubs of a cluster, as HOST:PORT,HOST:PORT,…: the same list on each. See docs/cluster.md."
        ),
    ] = "",
    place: Annotated[int, typer.Option(help="Which of the cluster's hubs this machine is: 1, 2, 3 …")] = 1,
    make_identity: Annotated[
        bool,
        typer.Option("--make-identity", help="Make the run's keys and authority, for all hubs of a cluster, and end."),
    ] = False,
    hub: Annotated[
        str, typer.Option(help="Use this NATS server or cluster instead, as tls://HOST:PORT,HOST:PORT.")
    ] = "",
    hub_ca: Annotated[Path | None, typer.Option(help="File with the authority of that server's certificate.")] = None,
    print_hub_config: Annotated[
        bool,
        typer.Option(
            "--print-hub-config",
            help="Print what an administrator adds to an existing server's configuration, and end.",
        ),
    ] = False,
    token_holders: Annotated[
        Literal["refused", "listed", "anyone"],
        typer.Option(help="Who may join with a Hugging Face token; listed: by --user, --organisation."),
    ] = "refused",
    users: Annotated[list[str] | None, typer.Option("--user", help="Hugging Face user to let in; repeatable.")] = None,
    organisations: Annotated[
        list[str] | None,
        typer.Option("--organisation", help="Hugging Face organisation to let in; may be repeated."),
    ] = None,
    backup_every: Annotated[int, typer.Option(min=1, help="Save the run's state every so many epochs.")] = 10,
    keep_last: Annotated[int, typer.Option(min=1, help="How many of the newest backups to keep.")] = 3,
    keep_every: Annotated[
        int,
        typer.Option(min=0, help="Keep older backups for good if their epoch is a multiple of this; 0: none."),
    ] = 0,
    groups: Annotated[
        list[str] | None,
        typer.Option(
            "--group",
            help="Coordinate, keep and save this group too; may be repeated. Groups of run.toml are included.",
        ),
    ] = None,
    backup_space: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Disk space for all backups; older ones are kept at growing distances."),
    ] = "10GB",
    upload_to: Annotated[
        str,
        typer.Option(metavar="TARGET", help="Upload each backup: hf://USER/REPOSITORY, or what fsspec knows (s3://…)."),
    ] = "",
    dashboard: Annotated[bool, typer.Option(help="Serve the live dashboard, if it is installed.")] = True,
    dashboard_port: Annotated[
        int | None,
        typer.Option(help="Its port; 0 picks a free one. Unless given: 8484, if that is free."),
    ] = None,
    dashboard_listen: Annotated[
        str, typer.Option(help="Its address, if not the hub's. With 127.0.0.1 only this machine can open it.")
    ] = "",
    dashboard_trust_proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address or network of a trusted proxy in front of it, for its X-Forwarded headers."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Tell in JSON, one object a line.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")] = False,
) -> None:
    """Start a run: a hub that everybody can reach, its guard, an aux peer, a dashboard. Prints the join link.

    Example: [bold]potluck init my-run && potluck host my-run --announce my-server.example.org[/bold]
    """
    from potluck.cli import console
    from potluck.cli.folders import run_folder
    from potluck.cli.hosting import Backing, Work, dashboard_options, serve
    from potluck.cli.options import bytes_of
    from potluck.hub.access.member import Policy
    from potluck.hub.guard.guard import GuardConfig
    from potluck.hub.keys import HubKeys
    from potluck.hub.server.certificate import prepare_certificates
    from potluck.hub.server.configuration import MAX_PAYLOAD_BYTES, ClusterConfig, HubConfig, render_accounts
    from potluck.hub.subjects import check_run_name
    from potluck.link.direct.addresses import announced_hosts
    from potluck.peer import environment
    from potluck.run.host import Host, HostConfig
    from potluck.run.peer import PeerConfig
    from potluck.training.manifest.runfile import read_run_file

    console.set_up_logging(verbose)
    file = _run_file(run_file)
    found = read_run_file(file) if file is not None else None
    run = found.name if found is not None else run
    where = run_folder(check_run_name(run), folder)
    if print_hub_config:
        accounts = render_accounts(HubKeys.load_or_create(where / "identity"))
        typer.echo("# For the configuration of a nats-server that has JetStream; restart it afterwards.")
        typer.echo(f"max_payload: {MAX_PAYLOAD_BYTES}")
        typer.echo(accounts)
        return
    if make_identity:
        HubKeys.load_or_create(where / "identity")
        prepare_certificates(where / "identity", where / "tls", ())
        typer.echo(f"Copy {where / 'identity'} to every hub of the cluster, by an encrypted way.")
        return
    config = HostConfig(
        hub=HubConfig(
            folder=where,
            run=run,
            host=listen,
            port=port,
            websocket_port=websocket_port,
            advertised_hosts=tuple(announce or (() if hub else announced_hosts(listen))),
            cluster=ClusterConfig.of_list(run, cluster, place) if cluster else None,
        ),
        guard=GuardConfig(
            run=run,
            replicas=3 if cluster else 1,
            policy=Policy(
                token_holders=token_holders, users=tuple(users or ()), organisations=tuple(organisations or ())
            ),
            groups=found.declared_groups() if found is not None else None,
            huggingface_url=environment.huggingface_endpoint(),
        ),
        hub_url=hub,
        hub_ca=hub_ca,
        peer=PeerConfig(role="aux", name="host", groups=_groups(found, groups or [])),
        wheel_port=wheel_port if wheel else None,
    )
    work = Work(
        run_file=file,
        backups=Backing(
            every_epochs=backup_every,
            keep_last=keep_last,
            keep_every=keep_every,
            upload_to=upload_to,
            most_bytes=int(bytes_of(backup_space, "--backup-space") or 0),
        ),
        dashboard=dashboard_options(
            config, dashboard, dashboard_listen or listen, dashboard_port, tuple(dashboard_trust_proxy or ())
        ),
    )
    console.run(console.until_interrupted(lambda stop: serve(Host(config), work, stop, as_json)))


def _groups(found: RunFile | None, named: list[str]) -> tuple[str, ...]:
    """The host's groups: all that run.toml declares, and those that the command names."""
    from potluck.hub.access.member import Policy
    from potluck.hub.subjects import MAIN

    if found is not None:
        Policy(groups=found.declared_groups()).check_groups(named)
    return tuple(dict.fromkeys([MAIN, *(found.groups if found is not None else ()), *named]))


def _run_file(given: Path | None) -> Path | None:
    """The run.toml that was named, or the one in this folder; None where there is none, and so nothing to train."""
    path = given or Path("run.toml")
    if given is None and not path.exists():
        return None
    return path / "run.toml" if path.is_dir() else path
