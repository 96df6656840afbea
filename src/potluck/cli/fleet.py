"""`potluck fleet`: machines that run jobs, and what they shall run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from potluck.cli.fleetdemo.command import demo, init
from potluck.cli.lending import DEFAULT_RUN, Engine, Run, agent, host
from potluck.cli.options import AsJson

if TYPE_CHECKING:
    from potluck.fleet.jobs.control import FleetControl, JobStatus, Machine

T = TypeVar("T")

app = typer.Typer(
    help="Machines that run jobs: host the hub, add machines, say what runs where, watch it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Folder = Annotated[Path | None, typer.Option(help="The host's folder, if it is not the default one.")]
Job = Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")]
FleetFileArgument = Annotated[Path, typer.Argument(metavar="FLEET.TOML", help="A fleet.toml, or the folder with one.")]


app.command("demo")(demo)
app.command("init")(init)
app.command("host")(host)
app.command("agent")(agent)


@app.command("machines")
def machines(run: Run = DEFAULT_RUN, folder: Folder = None, as_json: AsJson = False) -> None:
    """List the machines: their resources, their load, and what their owners allow.

    Example: [bold]potluck fleet machines[/bold]
    """
    import msgspec

    from potluck.cli import console

    found = _with_control(run, folder, lambda control: control.machines())
    if as_json:
        console.print_json(
            [
                {
                    "peer": each.known.peer,
                    "name": each.known.name,
                    "is_there": each.known.is_there,
                    "report": msgspec.to_builtins(each.report),
                }
                for each in found
            ]
        )
        return
    console.show_table(
        [machine_row(each) for each in found],
        empty="There are no machines. `potluck fleet agent LINK` adds the one it runs on.",
    )


def machine_row(machine: Machine) -> dict[str, str]:
    """A machine as a row of a table."""
    report = machine.report
    row = {"name": machine.known.name, "id": machine.known.peer, "state": "there" if report is not None else "away"}
    if report is None:
        return {**row, **dict.fromkeys(("cpu", "memory", "gpu", "disk free", "engines", "allows", "jobs"), "")}
    facts = report.facts
    return {
        **row,
        "cpu": f"{facts.cpu_percent:.0f}% of {facts.cpus}",
        "memory": f"{facts.memory_used_bytes / 1e9:.1f} of {facts.memory_bytes / 1e9:.1f} GB",
        "gpu": ", ".join(facts.gpus) or "none",
        "disk free": f"{facts.disk_free_bytes / 1e9:.0f} GB",
        "engines": ", ".join(facts.engines) or "none",
        "allows": report.allow,
        "jobs": str(sum(job.state == "running" for job in report.jobs)),
    }


@app.command("up")
def up(
    fleet_file: FleetFileArgument = Path("fleet.toml"),
    run: Run = DEFAULT_RUN,
    folder: Folder = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
    wait_seconds: Annotated[float, typer.Option("--wait", help="Seconds to wait until all jobs run.")] = 0.0,
    engine: Engine = "",
    as_json: AsJson = False,
) -> None:
    """Make the fleet run what fleet.toml says. Run again, it changes only what differs.

    Jobs that the file does not name (any more) end. Example: [bold]potluck fleet up fleet.toml[/bold]
    """
    from potluck.cli import console
    from potluck.fleet.jobs.fleetfile import read_fleet_file

    file = read_fleet_file(fleet_file)

    async def work(control: FleetControl) -> tuple[dict[str, Any], list[JobStatus]]:
        images = None
        if any(plan.is_container for plan in file.jobs):
            from potluck.fleet.agent.runners.images import find_images

            images = await asyncio.to_thread(find_images, engine)
        changes = await control.up(file, images, dry_run=dry_run)
        statuses: list[JobStatus] = []
        until = time.monotonic() + wait_seconds
        while wait_seconds:
            statuses = await control.jobs()
            if all(each.report is not None and each.report.state in ("running", "finished") for each in statuses):
                break
            if time.monotonic() >= until:
                raise typer.Exit(_say_what_is_missing(statuses, as_json))
            await asyncio.sleep(0.5)
        return dict(changes), statuses

    changes, _ = _with_control(run, folder, work)
    if as_json:
        console.print_json({"changes": changes})
        return
    for name, change in sorted(changes.items()):
        console.out.print(f"{name}: {change}", highlight=False, markup=False)
    if not changes:
        console.out.print("There is nothing to run.")


def _say_what_is_missing(statuses: list[JobStatus], as_json: bool) -> int:
    from potluck.cli import console

    for status in statuses:
        state = status.report.state if status.report is not None else "unknown"
        words = status.report.last_words if status.report is not None else "its machine is away"
        if state not in ("running", "finished"):
            if as_json:
                console.print_json({"event": "not running", "job": status.job.name, "state": state, "why": words})
            else:
                console.err.print(f"{status.job.name} does not run: {state} {words}", markup=False)
    return 1


@app.command("down")
def down(run: Run = DEFAULT_RUN, folder: Folder = None, as_json: AsJson = False) -> None:
    """End all jobs of the fleet, with notice. Their folders stay on the machines.

    Example: [bold]potluck fleet down[/bold]
    """
    ended = _with_control(run, folder, lambda control: control.down())
    _tell(as_json, f"Ended: {', '.join(ended) or 'nothing'}.", ended=ended)


@app.command("ps")
def ps(run: Run = DEFAULT_RUN, folder: Folder = None, as_json: AsJson = False) -> None:
    """List the jobs: where they run, since when, how often they were restarted, and why they are not running.

    Example: [bold]potluck fleet ps[/bold]
    """
    from potluck.cli import console

    found = _with_control(run, folder, lambda control: control.jobs())
    if as_json:
        console.print_json([job_record(each) for each in found])
    else:
        console.show_table(
            [job_row(each) for each in found], empty="There are no jobs. `potluck fleet up` starts some."
        )


def job_record(status: JobStatus) -> dict[str, Any]:
    """A job for programs."""
    import msgspec

    report = status.report
    return {
        "job": status.job.name,
        "machine": status.machine,
        "kind": status.job.kind,
        "wanted": status.job.state,
        "state": report.state if report is not None else "unknown",
        "restarts": report.restarts if report is not None else 0,
        "since": report.since if report is not None else 0.0,
        "last_words": report.last_words if report is not None else "its machine is away",
        "metrics": msgspec.to_builtins(report.metrics) if report is not None else {},
        "memory_bytes": report.memory_bytes if report is not None else 0,
        "cpu_percent": report.cpu_percent if report is not None else 0.0,
    }


def job_row(status: JobStatus) -> dict[str, str]:
    """A job as a row of a table."""
    record = job_record(status)
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in record["metrics"].items())
    return {
        "job": record["job"],
        "machine": record["machine"],
        "state": record["state"],
        "for": _age(record["since"]),
        "restarts": str(record["restarts"]),
        "cpu": f"{record['cpu_percent']:.0f}%",
        "memory": f"{record['memory_bytes'] / 1e6:.0f} MB",
        "figures": metrics,
        "last words": record["last_words"],
    }


@app.command("top")
def top(
    run: Run = DEFAULT_RUN,
    folder: Folder = None,
    every_seconds: Annotated[float, typer.Option("--every", min=0.5, help="Seconds between two updates.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Watch the machines and jobs of the fleet, live, until Ctrl-C.

    Example: [bold]potluck fleet top[/bold]
    """
    from rich.console import Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from potluck.cli import console
    from potluck.errors import RetryableError

    def table(rows: list[dict[str, str]], leave_out: tuple[str, ...], empty: str) -> Table | Text:
        if not rows:
            return Text(empty)
        names = [name for name in rows[0] if name not in leave_out]
        found = Table(*names, expand=True)
        for row in rows:
            found.add_row(*(Text(console.shortened(row[name]), overflow="ellipsis") for name in names))
        return found

    async def work(control: FleetControl) -> None:
        with Live(console=console.out, screen=not as_json and console.out.is_terminal, auto_refresh=False) as live:
            while True:
                try:
                    machines, jobs = await control.overview()
                except RetryableError as error:
                    live.update(Text(f"The hub is away: {error}"), refresh=not as_json)
                else:
                    if as_json:
                        rows = [job_record(each) for each in jobs]
                        console.print_json({"machines": [machine_row(each) for each in machines], "jobs": rows})
                    else:
                        shown = (
                            table([machine_row(each) for each in machines], ("id",), "There are no machines."),
                            table([job_row(each) for each in jobs], (), "There are no jobs."),
                        )
                        live.update(Group(*shown), refresh=True)
                await asyncio.sleep(every_seconds)

    async def until(stop: asyncio.Event) -> None:
        await console.unless_stopped(_controlled(run, folder, work), stop)

    console.set_up_logging(verbose=False)
    console.run(console.until_interrupted(until))


@app.command("logs")
def logs(
    job: Job,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow its output until Ctrl-C.")] = False,
    num_lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many earlier lines to show.")] = 100,
    run: Run = DEFAULT_RUN,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show a job's output, directly from its machine.

    Example: [bold]potluck fleet logs -f cartpole[/bold]
    """
    import sys

    from potluck.cli import console
    from potluck.plaintext import clean_lines

    async def work(control: FleetControl) -> None:
        rest = ""
        async for data in control.read_log(job, num_lines=num_lines, follow=follow):
            text = data.decode(errors="replace")
            if as_json:
                *lines, rest = (rest + text).split("\n")
                for line in lines:
                    console.print_json({"job": job, "line": line})
                continue
            sys.stdout.write(clean_lines(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()
        if rest:
            console.print_json({"job": job, "line": rest})

    async def until(stop: asyncio.Event) -> None:
        await console.unless_stopped(_controlled(run, folder, work), stop)

    console.set_up_logging(verbose=False)
    console.run(console.until_interrupted(until))


@app.command("restart")
def restart(job: Job, run: Run = DEFAULT_RUN, folder: Folder = None, as_json: AsJson = False) -> None:
    """End a job, with notice, and start it anew.

    Example: [bold]potluck fleet restart cartpole[/bold]
    """
    _with_control(run, folder, lambda control: control.restart(job))
    _tell(as_json, f"{job} starts anew.", restarted=job)


@app.command("stop")
def stop(job: Job, run: Run = DEFAULT_RUN, folder: Folder = None, as_json: AsJson = False) -> None:
    """End a job, with notice. It stays ended until `up` or `restart`.

    Example: [bold]potluck fleet stop cartpole[/bold]
    """
    _with_control(run, folder, lambda control: control.stop(job))
    _tell(as_json, f"{job} is told to end.", stopped=job)


@app.command("cp")
def cp(
    source: Annotated[str, typer.Argument(metavar="JOB:PATH", help="A file or folder in the job's working folder.")],
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to put it.")] = Path(),
    run: Run = DEFAULT_RUN,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Copy a job's file or folder from its machine: checkpoints, results.

    Example: [bold]potluck fleet cp cartpole:checkpoints results/[/bold]
    """
    from potluck.errors import ConfigurationError

    job, colon, path = source.partition(":")
    if not colon:
        raise ConfigurationError(f"{source!r} names no file: write JOB:PATH, as in cartpole:checkpoints")
    names = _with_control(run, folder, lambda control: control.copy(job, path or ".", target))
    _tell(as_json, f"Copied to {target}: {', '.join(names[:10])}{' …' if len(names) > 10 else ''}", copied=names)


async def _controlled(run: str, folder: Path | None, work: Callable[[FleetControl], Awaitable[T]]) -> T:
    from potluck.cli.folders import hosted_run
    from potluck.fleet.jobs.control import fleet_control

    where, record = hosted_run(run, folder)
    async with fleet_control(where, record) as control:
        return await work(control)


def _with_control(run: str, folder: Path | None, work: Callable[[FleetControl], Awaitable[T]]) -> T:
    """Do something in the organiser's name, with the keys in the host's folder."""
    from potluck.cli import console

    console.set_up_logging(verbose=False)
    return console.run(_controlled(run, folder, work))


def _tell(as_json: bool, text: str, **done: object) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json(done)
    else:
        typer.echo(text)


def _age(since: float) -> str:
    if not since:
        return ""
    seconds = max(time.time() - since, 0.0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
