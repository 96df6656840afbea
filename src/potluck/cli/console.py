"""How answers look: tables for people on the terminal, JSON for programs, and an end that leaves cleanly."""

from __future__ import annotations

import asyncio
import importlib
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.logging import RichHandler
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from potluck import tasks
from potluck.hub.subjects import PEER_ID
from potluck.plaintext import clean, clean_lines

if TYPE_CHECKING:
    from potluck.hub.access.member import AccessRequest
    from potluck.peer.machinecheck import Check
    from potluck.peer.roster import RosterEvent

SHOWN_CHARACTERS = 12  # of an id, in tables


class PlainConsole(Console):
    """Shows text of others without its terminal commands. Colours and tables are our own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """All output passes through here; rich itself lets escape sequences pass."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(clean_lines(segment.text), segment.style)


class PlainFormatter(logging.Formatter):
    """One line for what a record says, also with names that others chose. Tracebacks stay as they are."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The message, cleaned."""
        record.message = clean(record.message)
        return super().formatMessage(record)


out = PlainConsole()
err = PlainConsole(stderr=True)

T = TypeVar("T")


def count(number: int, thing: str) -> str:
    """`1 peer`, `2 peers`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def print_json(value: Any) -> None:
    """One JSON value on a line of its own, flushed, for a program that reads along."""
    # JSON has written out control characters already, and reads the others as we write them.
    sys.stdout.write(clean(msgspec.json.encode(value).decode()) + "\n")
    sys.stdout.flush()


def tell_roster_event(event: RosterEvent, num_peers: int, as_json: bool) -> None:
    """Print joins and departures, except of observers. Names come from others, so they are never read as markup."""
    name = event.presence.card.name
    if as_json:
        print_json(
            {
                "event": event.change,
                "peer": event.peer,
                "name": name or event.peer[:SHOWN_CHARACTERS],
                "peers": num_peers,
                "reason": event.presence.reason,
            }
        )
    elif event.change in ("joined", "left", "dead") and event.presence.card.role != "observer":
        reason = f" ({event.presence.reason})" if event.presence.reason else ""
        out.print(
            Text.assemble(
                named(name, event.peer), " ", (event.change, "bold"), f"{reason}; now {count(num_peers, 'peer')}"
            )
        )


def tell_request(request: AccessRequest, as_json: bool) -> None:
    """Print requests to be let in, and the organiser's commands for them."""
    if as_json:
        print_json(
            {
                "event": "asks to be let in",
                "peer": request.peer,
                "name": request.name,
                "role": request.role,
                "host": request.host,
                "message": request.message,
            }
        )
        return
    short = request.peer[:SHOWN_CHARACTERS]
    said = f": “{request.message}”" if request.message else ""
    out.print(
        Text.assemble(
            (named(request.name, request.peer), "bold"),
            f" asks to be let in as {request.role}, from {request.host or 'somewhere'}{said}\n",
            f"  potluck members approve {short}    (or deny {short})",
        )
    )


def named(name: str, peer: str) -> str:
    """A peer's name with the beginning of its id, since two may have the same name."""
    short = peer[:SHOWN_CHARACTERS]
    return f"{name} ({short})" if name else short


def tell_alarm(kind: str, text: str, peer: str, as_json: bool) -> None:
    """Say what is wrong with the run; without a text, that it is over."""
    if as_json:
        print_json({"event": "alarm" if text else "alarm over", "kind": kind, "text": text, "peer": peer})
    elif text:
        out.print(Text(f"! {text}", style="bold red"))
    else:
        who = f" ({peer[:SHOWN_CHARACTERS]})" if peer else ""
        out.print(Text(f"✓ no longer: {kind}{who}", style="green"))


def show_check(check: Check) -> None:
    """One line per check, and what to do about it when it is not green."""
    mark = {"green": "✓", "yellow": "!", "red": "✗"}[check.level]
    out.print(Text.assemble((f"{mark} ", check.level), (f"{check.name}: ", "bold"), check.found))
    if check.remedy:
        out.print(Text(f"  → {check.remedy}"))


def show_table(rows: list[dict[str, Any]], *, empty: str) -> None:
    """Rows as a table, its columns named by their keys; `empty` says that there are none.

    Where the table is wider than the terminal, a row is a line for each of its values: nothing is cut off.
    """
    if not rows:
        out.print(empty, highlight=False)
        return
    table = Table(*(str(name) for name in rows[0]))
    cells = [{name: Text(clean_lines(shortened(str(value)))) for name, value in row.items()} for row in rows]
    for row in cells:
        table.add_row(*row.values())
    if Measurement.get(out, out.options.update(max_width=sys.maxsize), table).maximum <= out.width:
        out.print(table)
        return
    for number, row in enumerate(cells):
        if number:
            out.print()
        for name, value in row.items():
            out.print(Text.assemble((f"{name}: ", "bold"), value), soft_wrap=True)


def shortened(text: str) -> str:
    """With shortened ids: they fit into a table, and are enough to name a peer."""
    return PEER_ID.sub(lambda found: found.group()[:SHOWN_CHARACTERS], text)


def set_up_logging(verbose: bool) -> None:
    """Warnings always; our own progress with --verbose."""
    handler = RichHandler(console=err, show_path=False, rich_tracebacks=False)
    handler.setFormatter(PlainFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("potluck").setLevel(logging.DEBUG if verbose else logging.WARNING)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the fastest event loop there is."""
    from potluck.run.loopthread import loop_factory

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


async def import_slowly(module: str) -> Any:
    """A module that needs torch, whose import takes seconds, while the event loop goes on."""
    return await asyncio.to_thread(importlib.import_module, module)


async def until_interrupted(work: Callable[[asyncio.Event], Awaitable[T]]) -> T:
    """Run `work`, which watches the event it is given: the first Ctrl-C sets it, the second quits at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one ends us even if this loop hangs
        err.print("leaving cleanly; press Ctrl-C again to quit at once")
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        return await work(stop)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result of `work`; None if the event comes first: then `work` is cancelled."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    either: set[asyncio.Task[Any]] = {task, stopping}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await tasks.end(*(each for each in either if not each.done()))
