"""`potluck spot`: a run on rented machines that may be taken away."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from potluck.spot.preemption import Change
    from potluck.spot.provider import Provider
    from potluck.spot.supervision import SupervisionConfig
    from potluck.spot.tiers import Slot
    from potluck.testing.slotlines import SlotLines

app = typer.Typer(
    help="A run on spot machines: so many workers and aux peers, kept at that number. On AWS, or as local processes.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

ProviderName = Literal["aws", "local"]
Experiment = Annotated[str, typer.Option(help="The experiment's name, and the tag of all its machines.")]
ProviderOption = Annotated[ProviderName, typer.Option(help="Where machines come from.")]
Region = Annotated[str, typer.Option(help="AWS: the region.")]
EndpointUrl = Annotated[str, typer.Option(help="AWS: another server with the same API, for tests.", hidden=True)]
AsJson = Annotated[bool, typer.Option("--json", help="Tell in JSON, one object a line.")]
HOST_START_SECONDS = 120.0
LOCAL_INTERVAL_SECONDS = 1.0
LOCAL_SHORT_LIFE_SECONDS = 20.0
HOST_FILE = "host.json"
SPOT_PRICES = "at the spot prices now; aux peers are bought at the full price, which is higher"


@app.command("up")
def up(
    run_file: Annotated[Path | None, typer.Argument(help="The run to host here, unless --link names one.")] = None,
    link: Annotated[str, typer.Option(help="The join link of a run that is hosted elsewhere.")] = "",
    provider: ProviderOption = "local",
    experiment: Experiment = "potluck",
    workers: Annotated[int, typer.Option(help="How many trainers.")] = 4,
    aux: Annotated[int, typer.Option(help="How many aux peers, besides the workers.")] = 0,
    bandwidth: Annotated[str, typer.Option(help="Workers' lines in Mbit/s, as in 4x200,8x100,4x50.")] = "",
    aux_bandwidth: Annotated[float, typer.Option(help="Aux peers' lines in Mbit/s; 0: as fast as they are.")] = 0.0,
    kinds: Annotated[
        str, typer.Option(help="AWS: kinds of machines, the preferred one first.")
    ] = "g4dn.xlarge,g4dn.2xlarge",
    aux_kinds: Annotated[str, typer.Option(help="AWS: the same for aux peers, at the full price.")] = "r5.large",
    region: Region = "us-east-1",
    image: Annotated[
        str, typer.Option(help="AWS: the machine image, a Linux with Python and the AWS command line.")
    ] = "",
    instance_profile: Annotated[str, typer.Option(help="AWS: may read the experiment's parameters.")] = "",
    subnet: Annotated[str, typer.Option(help="AWS: the subnet, unless the default one.")] = "",
    max_price: Annotated[float, typer.Option(help="Dollars an hour for one machine at most; 0: no limit.")] = 0.0,
    announce: Annotated[
        list[str] | None, typer.Option(help="The address by which machines reach the host here.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="local: a log of preemptions to replay.")] = None,
    compress: Annotated[float, typer.Option(help="local: replay the trace so many times as fast.")] = 60.0,
    churn: Annotated[float, typer.Option(help="local: without a trace, so many preemptions an hour.")] = 0.0,
    namespaces: Annotated[
        bool | None,
        typer.Option(
            help="local: each slot's line is a shaped network of its own, and not a limit of Potluck's. Needs root; "
            "unless given, where that is possible and --bandwidth names lines."
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="With --link: let that run's own code run on the machines.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be started and what it costs.")] = False,
    endpoint_url: EndpointUrl = "",
    as_json: AsJson = False,
) -> None:
    """Start machines and keep them at that number until Ctrl-C, which leaves them running: `down` removes them.

    Example: [bold]potluck spot up my-run --workers 16 --aux 4 --bandwidth 4x200,8x100,4x50 --provider local[/bold]
    """
    from potluck.cli import console
    from potluck.errors import ConfigurationError
    from potluck.spot.supervision import Supervision, SupervisionConfig
    from potluck.spot.tiers import slots

    wanted = slots(num_workers=workers, num_aux=aux, bandwidth=bandwidth, aux_bandwidth_mbit=aux_bandwidth or None)
    if not link and run_file is None and not dry_run:
        raise ConfigurationError("which run? Name its folder or run.toml, or --link of one that is hosted elsewhere")
    if provider == "aws" and not image and not dry_run:
        raise ConfigurationError("--image is missing: the AMI to start machines from, a Linux with Python")
    market = _market(trace, compress, churn, len(wanted)) if provider == "local" else []
    names = ("process",) if provider == "local" else tuple(kind.strip() for kind in kinds.split(",") if kind.strip())
    config = SupervisionConfig(
        kinds=names,
        aux_kinds=() if provider == "local" else (aux_kinds,),
        max_price=max_price or None,
        settle_seconds=0.0 if provider == "local" else 60.0,
        first_wait_seconds=2.0 if provider == "local" else 10.0,
        short_life_seconds=(0.0 if market else LOCAL_SHORT_LIFE_SECONDS) if provider == "local" else 300.0,
    )
    runs_its_code = yes or not link  # who hosts a run has chosen its code

    async def work(stop: asyncio.Event) -> None:
        lines = _lines(experiment, namespaces, bandwidth, link, as_json) if provider == "local" else None
        async with _hosted(run_file, link, announce or [], experiment, lines) as found:
            machines = (
                _local(experiment, lines, found, market, yes=runs_its_code)
                if provider == "local"
                else _aws(experiment, region, endpoint_url, image, instance_profile, subnet, max_price, runs_its_code)
            )
            if provider == "aws":
                await asyncio.to_thread(_keep_link, machines, found)
            if not link:
                _say_link(found, lines, as_json)
            await _supervise(machines, Supervision(wanted, config), provider, experiment, stop, as_json)

    if dry_run:
        _say_plan(wanted, config, _provider(provider, experiment, region, endpoint_url), as_json)
        return
    console.run(console.until_interrupted(work))
    _say(as_json, f"The machines go on. `potluck spot down --provider {provider} --experiment {experiment}` ends them.")


@app.command("status")
def status(
    provider: ProviderOption = "local",
    experiment: Experiment = "potluck",
    region: Region = "us-east-1",
    endpoint_url: EndpointUrl = "",
    as_json: AsJson = False,
) -> None:
    """Show the machines of an experiment, and what they cost now.

    Example: [bold]potluck spot status --provider aws --experiment albert[/bold]
    """
    import msgspec

    from potluck.cli import console

    there = _provider(provider, experiment, region, endpoint_url)
    machines = sorted(there.machines(), key=lambda each: each.slot)
    prices = there.prices(sorted({each.kind for each in machines})) if machines else {}
    if as_json:
        console.print_json(
            [msgspec.to_builtins(each) | {"dollars_per_hour": prices.get(each.kind)} for each in machines]
        )
        return
    console.show_table(
        [{"slot": each.slot, "machine": each.id, "kind": each.kind, "state": each.state} for each in machines],
        empty=f"{experiment} has no machine.",
    )
    if dollars := sum(prices.get(each.kind, 0.0) for each in machines if each.state != "ending"):
        _say(False, f"About {dollars:.2f} $/h {SPOT_PRICES}.")


@app.command("down")
def down(
    provider: ProviderOption = "local",
    experiment: Experiment = "potluck",
    region: Region = "us-east-1",
    endpoint_url: EndpointUrl = "",
    as_json: AsJson = False,
) -> None:
    """End all machines of an experiment, and remove all else that carries its tag. Also after a crash of `up`.

    Example: [bold]potluck spot down --provider aws --experiment albert[/bold]
    """
    from potluck.cli import console

    removed = _provider(provider, experiment, region, endpoint_url).remove_everything()
    removed += _end_left_host(experiment)
    if as_json:
        console.print_json({"removed": removed})
        return
    _say(
        False,
        f"Removed {console.count(len(removed), 'thing')}: {', '.join(removed)}" if removed else "Nothing was left.",
    )


@app.command("watch", context_settings={"ignore_unknown_options": True})
def watch(
    command: Annotated[list[str], typer.Argument(help="The command to run, after --.")],
    metadata_url: Annotated[str, typer.Option(help="The metadata service, for tests.", hidden=True)] = "",
    poll_seconds: Annotated[float, typer.Option(help="How often to ask.")] = 5.0,
) -> None:
    """Run a command on a spot machine, and ask it to leave when the machine is about to be taken away.

    Example: [bold]potluck spot watch -- potluck join 'potluck://…'[/bold]
    """
    from potluck.cli import console
    from potluck.spot import notice

    async def work(stop: asyncio.Event) -> int:
        asked = notice.MetadataNotice(metadata_url or notice.METADATA_URL)
        try:
            return await notice.watch(
                command, asked, stop=stop, poll_seconds=poll_seconds, say=lambda text: _say(False, text)
            )
        finally:
            await asked.close()

    raise typer.Exit(console.run(console.until_interrupted(work)))


def _folder(experiment: str) -> Path:
    import platformdirs

    from potluck.hub.subjects import check_run_name

    check_run_name(experiment)
    return Path(platformdirs.user_data_dir("potluck")) / "spot" / experiment


def _provider(name: ProviderName, experiment: str, region: str, endpoint_url: str) -> Provider:
    """To look and to remove: with all that an experiment may have."""
    if name == "aws":
        return _aws(experiment, region, endpoint_url)
    from potluck.testing.slotlines import SlotLines

    return _local(experiment, SlotLines(experiment))


def _local(
    experiment: str, lines: SlotLines | None, link: str = "", market: Sequence[Change] = (), *, yes: bool = False
) -> Provider:
    from potluck.spot.local import LocalProvider

    def command(slot: Slot, place: Path) -> list[str]:
        """A peer with an identity and a name of its own; a line that it has limits it, or else it does so itself."""
        own = ["--name", slot.name, "--identity-path", str(place / "identity.nkey"), "--json"]
        if slot.bandwidth_mbit is not None and lines is None:
            own += ["--bandwidth", f"{slot.bandwidth_mbit:g}Mbit"]
        role = ["join", *(["--yes"] if yes else [])] if slot.role == "worker" else ["aux"]
        return [sys.executable, "-m", "potluck.cli", *role, link, *own]

    return LocalProvider(_folder(experiment) / "machines", command, trace=market, lines=lines)


def _aws(
    experiment: str,
    region: str,
    endpoint_url: str,
    image: str = "",
    instance_profile: str = "",
    subnet: str = "",
    max_price: float = 0.0,
    yes: bool = False,
) -> Provider:
    from potluck.spot.aws import AwsConfig, AwsProvider

    _folder(experiment)  # or its name is refused
    return AwsProvider(
        AwsConfig(
            experiment=experiment,
            region=region,
            image=image,
            instance_profile=instance_profile,
            subnet=subnet,
            max_price=max_price or None,
            endpoint_url=endpoint_url or None,
            yes=yes,
        )
    )


def _lines(experiment: str, asked: bool | None, bandwidth: str, link: str, as_json: bool) -> SlotLines | None:
    """Networks for the slots' lines, if possible; otherwise Potluck's own limit holds them."""
    from potluck.errors import ConfigurationError
    from potluck.testing.namespaces import lab_available
    from potluck.testing.slotlines import SlotLines

    if asked is False or (asked is None and not bandwidth):
        return None
    why_not = "they reach only a run that is hosted here, and --link names another" if link else lab_available()
    if why_not is None:
        return SlotLines(experiment)
    if asked:
        raise ConfigurationError(f"no networks of their own for the machines: {why_not}; leave --namespaces out")
    _say(as_json, f"Potluck itself holds peers to their lines. No networks of their own: {why_not}.")
    return None


def _keep_link(machines: Any, link: str) -> None:
    from potluck.errors import ConfigurationError
    from potluck.hub.joinlink import JoinLink

    line = JoinLink.parse(link).pip_line
    if not line:
        raise ConfigurationError("the link names no wheel, so machines cannot install Potluck: host with --wheel")
    machines.keep_link(link, line.removeprefix("pip install ").strip("'"))


def _market(trace: Path | None, compress: float, churn: float, num_machines: int) -> list[Change]:
    from potluck.spot.preemption import PreemptionConfig, compressed, generate, parse_trace

    if trace is not None:
        return compressed(parse_trace(trace.read_text(encoding="utf-8")), compress)
    if churn > 0:
        return generate(PreemptionConfig(num_machines=num_machines, bursts_per_hour=churn), hours=24.0, seed=0)
    return []


@asynccontextmanager
async def _hosted(
    run_file: Path | None, link: str, announce: Sequence[str], experiment: str, lines: SlotLines | None
) -> AsyncIterator[str]:
    """The run's join link; the run is hosted by a process of ours where no link was given."""
    if link:
        yield link
        return
    from potluck.cli.demo.processes import Actor
    from potluck.errors import FatalError
    from potluck.spot.local import note_process

    folder = _folder(experiment)
    folder.mkdir(parents=True, exist_ok=True)
    await asyncio.to_thread(_end_left_host, experiment)
    inside: list[str] = []
    if lines is not None:
        from potluck.testing.slotlines import HUB_ADDRESS

        inside, announce = await asyncio.to_thread(lines.plug_hub), [HUB_ADDRESS]
    with (folder / "host.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *inside,
            *[sys.executable, "-m", "potluck.cli", "host", str(run_file), "--folder", str(folder / "hub"), "--json"],
            *(word for address in announce for word in ("--announce", address)),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    note_process(folder / HOST_FILE, process.pid)
    host = Actor("host", process, folder / "host.log")
    try:
        said = await asyncio.wait_for(host.until("ready"), HOST_START_SECONDS)
        yield str(said["link"])
    except TimeoutError:
        raise FatalError(f"the host did not start: {host.tail()}") from None
    finally:
        await host.leave()


def _end_left_host(experiment: str) -> list[str]:
    """End the host that a runner has left behind by crashing."""
    from potluck.spot.local import end_noted

    return ["host"] if end_noted(_folder(experiment) / HOST_FILE) else []


async def _supervise(
    machines: Provider, supervision: Any, provider: ProviderName, experiment: str, stop: asyncio.Event, as_json: bool
) -> None:
    from potluck.spot.runner import Runner

    folder = _folder(experiment)
    folder.mkdir(parents=True, exist_ok=True)
    runner = Runner(
        machines,
        supervision,
        interval_seconds=LOCAL_INTERVAL_SECONDS if provider == "local" else 15.0,
        log_path=folder / "turns.jsonl",
        say=lambda text: _say(as_json, text),
    )
    await runner.run(stop)


def _say_plan(wanted: Sequence[Slot], config: SupervisionConfig, provider: Provider, as_json: bool) -> None:
    """Which machine each slot would get at the prices now."""
    from potluck.cli import console

    prices = provider.prices(config.kinds + config.aux_kinds)
    rows: list[dict[str, Any]] = []
    for slot in wanted:
        kind = config.affordable(slot, prices)
        rows.append(
            {
                "slot": slot.name,
                "line_mbit": slot.bandwidth_mbit,
                "kind": kind,
                "dollars_per_hour": None if kind is None else prices.get(kind),
            }
        )
    dollars = sum(row["dollars_per_hour"] or 0.0 for row in rows)
    if as_json:
        console.print_json({"slots": rows, "prices": prices, "dollars_per_hour": dollars})
        return
    console.show_table(
        [
            {
                "slot": row["slot"],
                "line": "unlimited" if row["line_mbit"] is None else f"{row['line_mbit']:g} Mbit/s",
                "machine": row["kind"] or f"none for {config.max_price:g} $/h or less",
                "$/h": "" if row["dollars_per_hour"] is None else f"{row['dollars_per_hour']:.3f}",
            }
            for row in rows
        ],
        empty="",
    )
    _say(False, f"About {dollars:.2f} $/h {SPOT_PRICES}. Nothing was started.")


def _say_link(link: str, lines: SlotLines | None, as_json: bool) -> None:
    from potluck.cli import console

    inside = "" if lines is None else " ".join(lines.hub_argv) + " "
    if as_json:
        console.print_json({"event": "ready", "link": link, "inside": inside.strip()})
    else:
        console.err.print(f"Look at the run: {inside}potluck monitor '{link}'", soft_wrap=True, markup=False)


def _say(as_json: bool, text: str) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json({"event": "said", "text": text})
    else:
        console.err.print(text)
