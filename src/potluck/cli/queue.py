"""`potluck queue`: the queues and topics of a fleet, for people and scripts."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

if TYPE_CHECKING:
    from potluck.fleet.sync import AsyncFleet

T = TypeVar("T")

app = typer.Typer(
    help="Queues and topics of a fleet: put, take, look, clear. On the host, or anywhere with a join link.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Name = Annotated[str, typer.Argument(help="The queue's or topic's name.")]
Link = Annotated[str, typer.Option("--link", help="The fleet's join link; else the run hosted on this machine.")]
Run = Annotated[str, typer.Option("--run", help="The run's name. Default: the name in the run.toml of this folder.")]
Folder = Annotated[Path | None, typer.Option(help="The run's folder, if it is not the default one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]


@app.command("ls")
def ls(link: Link = "", run: Run = "", folder: Folder = None, as_json: AsJson = False) -> None:
    """List the queues and topics that you may use, and how full they are.

    Example: [bold]potluck queue ls[/bold]
    """
    import msgspec

    async def work(fleet: AsyncFleet) -> list[Any]:
        return await fleet.list_queues()

    depths = _with_fleet(link, run, folder, work)
    from potluck.cli import console

    if as_json:
        console.print_json(msgspec.to_builtins(depths))
        return
    rows = [
        {
            "name": depth.definition.name,
            "kind": depth.definition.kind,
            "items": f"{depth.items:,}",
            "taken": f"{depth.out:,}",
            "size": _size(depth.bytes + depth.parts_bytes),
            "of": _size(depth.definition.max_bytes),
            "oldest": _age(depth.oldest_at),
            "dead": f"{depth.dead:,}",
            "you may": ", ".join(depth.rights),
        }
        for depth in depths
    ]
    console.show_table(rows, empty="There is no queue that you may use. `potluck queue add NAME` makes one.")


@app.command("add")
def add(
    name: Name,
    topic: Annotated[bool, typer.Option("--topic", help="A topic: keeps the newest item for everybody.")] = False,
    max_items: Annotated[int, typer.Option(help="How many items it may hold.")] = 100_000,
    max_megabytes: Annotated[float, typer.Option(help="How many megabytes it may hold.")] = 256.0,
    max_hours: Annotated[float, typer.Option(help="Remove items after so many hours; 0: never.")] = 0.0,
    when_full: Annotated[
        Literal["block", "refuse", "drop"],
        typer.Option(help="Let putters wait, refuse their items, or drop the oldest item."),
    ] = "block",
    tries: Annotated[int, typer.Option(help="How often an item is handed out before it is a dead letter.")] = 5,
    lease_seconds: Annotated[float, typer.Option(help="Seconds of silence after which a taker counts as dead.")] = 15.0,
    id_window_seconds: Annotated[float, typer.Option(help="How long ids of items are remembered.")] = 600.0,
    run: Run = "",
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Make a queue or topic, or change the limits of one. On the machine that hosts the run.

    Example: [bold]potluck queue add experience --when-full drop[/bold]; [bold]potluck queue add weights --topic[/bold]
    """
    from potluck.hub.access.organise import Done
    from potluck.hub.access.queueing import CreateQueue
    from potluck.hub.queues import QueueDefinition

    definition = QueueDefinition(
        name=name,
        kind="topic" if topic else "queue",
        max_items=max_items,
        max_bytes=int(max_megabytes * 1e6),
        max_age_seconds=max_hours * 3600,
        when_full=when_full,
        tries=tries,
        lease_seconds=lease_seconds,
        id_window_seconds=id_window_seconds,
    )

    async def work(fleet: AsyncFleet) -> None:
        await fleet.member.ask("create", CreateQueue(definition=definition), Done)

    _with_fleet("", run, folder, work)
    _tell(as_json, f"The {definition.kind} {name} is there.", added=name, kind=definition.kind)


@app.command("rm")
def rm(name: Name, run: Run = "", folder: Folder = None, as_json: AsJson = False) -> None:
    """Remove a queue or topic and all that is in it. On the machine that hosts the run.

    Example: [bold]potluck queue rm experience[/bold]
    """
    from potluck.hub.access.organise import Done
    from potluck.hub.access.queueing import DeleteQueue

    async def work(fleet: AsyncFleet) -> None:
        await fleet.member.ask("delete", DeleteQueue(name=name), Done)

    _with_fleet("", run, folder, work)
    _tell(as_json, f"{name} is gone.", removed=name)


@app.command("put")
def put(
    name: Name,
    value: Annotated[str, typer.Argument(help="A JSON value; - reads one from standard input.")],
    item_id: Annotated[str, typer.Option("--id", help="An id: the same id is put once.")] = "",
    link: Link = "",
    run: Run = "",
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Put an item into a queue, or publish it on a topic.

    Example: [bold]potluck queue put jobs '{"seed": 7}' --id seed-7[/bold]
    """
    import msgspec

    from potluck.errors import ConfigurationError

    text = sys.stdin.read() if value == "-" else value
    try:
        item = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise ConfigurationError(
            f"{text[:60]!r} is not JSON ({error}): write text in quotes, as in '\"hello\"'"
        ) from error

    async def work(fleet: AsyncFleet) -> bool:
        kinds = {depth.definition.name: depth.definition.kind for depth in await fleet.list_queues()}
        if kinds.get(name) == "topic":
            await fleet.topic(name).publish(item)
            return True
        return await fleet.queue(name).put(item, id=item_id)

    is_new = _with_fleet(link, run, folder, work)
    _tell(as_json, f"Put into {name}." if is_new else f"An item {item_id} was put into {name} before.", put=is_new)


@app.command("take")
def take(
    name: Name,
    num: Annotated[int, typer.Option("--num", "-n", help="How many items at most.")] = 1,
    wait_seconds: Annotated[float, typer.Option("--wait", help="Seconds to wait for the first one.")] = 0.0,
    keep: Annotated[bool, typer.Option("--keep", help="Give them back instead of marking them done.")] = False,
    link: Link = "",
    run: Run = "",
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Take items from a queue, print them, and mark them done; or print a topic's newest item.

    Exit code 1 when there was none. Example: [bold]potluck queue take jobs -n 10 --wait 5 --json[/bold]
    """

    async def work(fleet: AsyncFleet) -> int:
        kinds = {depth.definition.name: depth.definition.kind for depth in await fleet.list_queues()}
        if kinds.get(name) == "topic":
            version = await fleet.topic(name).latest()
            if version is not None:
                _show_item({"version": version.number, "publisher": version.publisher}, version.value, as_json)
            return int(version is not None)
        items = await fleet.queue(name).take(num, wait_seconds)
        for item in items:
            _show_item({"id": item.id, "putter": item.putter, "tries": item.tries}, item.value, as_json)
            await (item.again() if keep else item.done())
        return len(items)

    if not _with_fleet(link, run, folder, work):
        if not as_json:
            typer.echo(f"There is nothing in {name}.", err=True)
        raise typer.Exit(1)


@app.command("peek")
def peek(
    name: Name,
    num: Annotated[int, typer.Option("--num", "-n", help="How many items at most.")] = 10,
    link: Link = "",
    run: Run = "",
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Look at the oldest items of a queue without taking them.

    Example: [bold]potluck queue peek jobs -n 3[/bold]
    """
    _look(name, num, link, run, folder, as_json, dead=False)


@app.command("dead")
def dead(
    name: Name,
    num: Annotated[int, typer.Option("--num", "-n", help="How many items at most.")] = 10,
    retry: Annotated[bool, typer.Option("--retry", help="Put them back into the queue, then clear them.")] = False,
    link: Link = "",
    run: Run = "",
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Look at dead letters: items that were handed out too often and never done.

    Example: [bold]potluck queue dead jobs[/bold]; [bold]potluck queue dead jobs --retry[/bold] tries them again.
    """
    if not retry:
        _look(name, num, link, run, folder, as_json, dead=True)
        return

    async def work(fleet: AsyncFleet) -> int:
        return await fleet.queue(name).retry_dead()

    number = _with_fleet(link, run, folder, work)
    _tell(as_json, f"{number} dead letters are in {name} again.", retried=number)


@app.command("purge")
def purge(
    name: Name,
    dead_letters: Annotated[bool, typer.Option("--dead", help="Its dead letters, not its items.")] = False,
    run: Run = "",
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Throw away what is in a queue or topic. On the machine that hosts the run.

    Example: [bold]potluck queue purge experience[/bold]
    """
    from potluck.hub.access.queueing import Purged, PurgeQueue

    async def work(fleet: AsyncFleet) -> int:
        return (await fleet.member.ask("purge", PurgeQueue(name=name, dead=dead_letters), Purged)).items

    number = _with_fleet("", run, folder, work)
    _tell(as_json, f"{number} items of {name} are gone.", purged=number)


def _look(name: str, num: int, link: str, run: str, folder: Path | None, as_json: bool, *, dead: bool) -> None:
    async def work(fleet: AsyncFleet) -> None:
        items = await fleet.queue(name).peek(num, dead=dead)
        for item in items:
            _show_item({"id": item.id, "putter": item.putter}, item.value, as_json)
        if not items and not as_json:
            typer.echo(f"There are no dead letters of {name}." if dead else f"There is nothing in {name}.")

    _with_fleet(link, run, folder, work)


def _with_fleet(link: str, run: str, folder: Path | None, work: Callable[[AsyncFleet], Awaitable[T]]) -> T:
    """Do something with the queues: by a link, else in the organiser's name with the keys in the run's folder."""
    from potluck.cli import console
    from potluck.fleet.member import FleetMember
    from potluck.fleet.sync import AsyncFleet
    from potluck.peer import environment

    console.set_up_logging(verbose=False)

    async def connected() -> T:
        if link or (environment.link() and not run and folder is None):
            fleet = await AsyncFleet.join(link)
        else:
            from potluck.cli.folders import hosted_run
            from potluck.hub.address import HubAddress
            from potluck.hub.keys import HubKeys
            from potluck.peer.identity import Identity

            where, record = hosted_run(run, folder)
            keys = HubKeys.load_or_create(where / "identity")
            address = HubAddress(servers=record.servers, ca_pem=record.ca_pem)
            member = FleetMember(address, record.run, Identity(keys.organiser_seed))
            await member.open(is_member=True)
            fleet = AsyncFleet(member)
        async with fleet:
            return await work(fleet)

    return console.run(connected())


def _show_item(about: dict[str, Any], value: Any, as_json: bool) -> None:
    from rich.text import Text

    from potluck.cli import console

    shown = _plain(value)
    if as_json:
        console.print_json({**about, "value": shown})
    else:
        head = "  ".join(f"{name} {text}" for name, text in about.items())
        console.out.print(Text.assemble((console.shortened(head), "dim"), f"\n{shown!r}"), soft_wrap=True)


def _plain(value: Any) -> Any:
    """For people and JSON: arrays by their type and shape."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"<{value.dtype} array of shape {tuple(value.shape)}>"
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    return value


def _tell(as_json: bool, text: str, **done: object) -> None:
    from potluck.cli import console

    if as_json:
        console.print_json(done)
    else:
        typer.echo(text)


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def _age(since: float) -> str:
    if not since:
        return ""
    seconds = max(time.time() - since, 0.0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
