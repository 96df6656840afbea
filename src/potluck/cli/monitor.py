"""`potluck monitor`: the run at a glance, live."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from potluck.monitor.alarms import Alarm
    from potluck.monitor.exporters import Exporters
    from potluck.monitor.view import GroupRow, Overview, PeerRow
    from potluck.monitor.watcher import Watcher
    from potluck.run.peer import Peer

EVERY_SECONDS = 1.0
COLUMNS = ("", "role", "place", "reach", "epoch", "samples", "per second", "loss", "up", "down", "state")
NEEDED_CHARACTERS = {
    "up": 124,
    "down": 124,
    "place": 98,
    "reach": 98,
    "role": 70,
    "epoch": 70,
    "samples": 70,
    "loss": 48,
}
"""Terminals narrower than that do without the column: fewer that can be read say more than all of them cut short."""


def monitor(
    link: Annotated[str, typer.Argument(help="The join link, in quotes; else POTLUCK_LINK.")] = "",
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    identity_path: Annotated[
        Path | None, typer.Option(help="File with the key you watch by; a new one is made unless given.")
    ] = None,
    wandb: Annotated[
        str, typer.Option(metavar="PROJECT", help="Log each epoch to this project of Weights & Biases as well.")
    ] = "",
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write each epoch for TensorBoard into this folder as well.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Tell in JSON, one object a second.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")] = False,
) -> None:
    """Show how the run is doing: epoch, loss, peers, samples per second, traffic. Ctrl-C ends it.

    Example: [bold]potluck monitor 'potluck://hub.example.org:4222/my-run?ca=…#…'[/bold]
    """
    from potluck.cli import console
    from potluck.cli.joining import observe, parse_link
    from potluck.monitor.exporters import open_exporters

    console.set_up_logging(verbose)
    parsed = parse_link(link, "potluck monitor")
    # Before there is an event loop: one of them may ask for an account, or be missing, and takes seconds to start.
    exporters = open_exporters(parsed.run, wandb_project=wandb, tensorboard_folder=tensorboard)

    async def watch(peer: Peer, stop: asyncio.Event) -> None:
        await _watch(peer, stop, exporters, once=once, as_json=as_json)

    try:
        observe(parsed, "monitor", identity_path, as_json, watch)
    finally:
        exporters.close()


async def _watch(peer: Peer, stop: asyncio.Event, exporters: Exporters, *, once: bool, as_json: bool) -> None:
    import msgspec

    from potluck.cli import console
    from potluck.monitor.watcher import Watcher

    watcher = Watcher(peer.session)
    await watcher.start()
    try:
        with Screen(console.out, is_live=not (once or as_json)) as screen:
            while not stop.is_set():
                await console.unless_stopped(asyncio.sleep(EVERY_SECONDS), stop)
                now = peer.session.clock.monotonic()
                overview, rows = watcher.view.overview(now), watcher.view.rows(now)
                exporters.epoch_seen(overview)
                alarms = watcher.alarms()
                if as_json:
                    peers = [msgspec.to_builtins(row) for row in rows]
                    told = [{"kind": alarm.kind, "text": alarm.text, "peer": alarm.peer} for alarm in alarms]
                    told_groups = [msgspec.to_builtins(row) for row in watcher.view.groups()]
                    figures = {**msgspec.to_builtins(overview), "paused": watcher.is_paused, "alarms": told}
                    if (pause := watcher.pause) is not None:
                        figures |= {"paused_by": pause.by, "paused_because": pause.reason}
                    if len(told_groups) > 1:
                        cut = watcher.view.cut
                        figures |= {"groups": told_groups, "cut": cut.number if cut is not None else None}
                    console.print_json({"event": "run", **figures, "peers": peers})
                else:
                    width = console.out.width
                    groups = watcher.view.groups()
                    shown = picture(overview, rows, alarms, groups, pause=_pause_words(watcher), width=width)
                    screen.show(shown, (overview.epoch, watcher.is_paused, [alarm.text for alarm in alarms]))
                if once or peer.session.ended.done():
                    break
        if peer.session.ended.done():
            peer.session.ended.result()
    finally:
        await watcher.close()


class Screen:
    """Where pictures go: on a terminal each takes the place of the one before, elsewhere news follow each other."""

    def __init__(self, console: Console, *, is_live: bool) -> None:
        from rich.live import Live

        self._console = console
        in_place = is_live and console.is_terminal
        self._live = Live(console=console, auto_refresh=False, screen=False) if in_place else None
        self._shown: object = None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, picture: RenderableType, news: object) -> None:
        """`news` says what is worth another picture where the one before stays."""
        if self._live is not None:
            self._live.update(picture, refresh=True)
        elif news != self._shown:
            self._shown = news
            self._console.print(picture)


def picture(
    overview: Overview,
    rows: list[PeerRow],
    alarms: Sequence[Alarm] = (),
    groups: Sequence[GroupRow] = (),
    *,
    pause: str = "",
    width: int | None = None,
) -> RenderableType:
    """The run as a person sees it: a line of figures, a table of peers, and what is wrong.

    A run with several groups has a table of them too.
    `pause` says that the run is paused, and why. Without a width, any will do.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from potluck.training.books.history import shown_names

    filled = f"{overview.samples} of {overview.target}" if overview.target else str(overview.samples)
    facts = [
        ("epoch", str(overview.epoch)),
        ("loss", _number(overview.loss, ".4f")),
        ("held-out loss", _number(overview.held_out_loss, ".4f")),
        ("samples", filled),
        ("per second", f"{overview.samples_per_second:.1f}"),
        ("next epoch in", _seconds(overview.due_in_seconds)),
        ("an epoch takes", _seconds(overview.seconds_per_epoch)),
        ("traffic per epoch", _bytes(overview.bytes_per_epoch)),
        ("coordinator", overview.coordinator or "nobody"),
    ]
    head = Text.assemble(
        (overview.run, "bold"),
        (f"   {pause}" if pause else "", "bold yellow"),
        *(part for name, value in facts for part in (f"   {name} ", (value, "bold"))),
    )
    columns = [each for each in COLUMNS if width is None or width >= NEEDED_CHARACTERS.get(each, 0)]
    table = Table(*columns)
    called = shown_names((row.peer for row in rows), {row.peer: row.name for row in rows})
    for row in rows:
        # Other people's words: never read as markup.
        name = Text(called[row.peer], style="bold" if row.coordinates else "")
        cells: tuple[RenderableType, ...] = (
            name,
            row.role,
            Text(row.place),
            row.reach,
            str(row.epoch),
            str(row.samples),
            f"{row.samples_per_second:.1f}",
            _number(row.loss, ".4f"),
            _speed(row.upload_bytes_per_second),
            _speed(row.download_bytes_per_second),
            row.state,
        )
        table.add_row(*(cell for column, cell in zip(COLUMNS, cells, strict=True) if column in columns))
    tables = [table]
    if len(groups) > 1:
        tables.insert(0, Table("group", "epoch", "saved", "members", "coordinator"))
        for group in groups:
            saved = str(group.cut_epoch) if group.cut_epoch is not None else "no"
            coordinator = Text(group.coordinator or "nobody")
            tables[0].add_row(group.name, str(group.epoch), saved, str(group.num_members), coordinator)
    return Group(head, *tables, *(Text(f"! {alarm.text}", style="bold red") for alarm in alarms))


def _pause_words(watcher: Watcher) -> str:
    """That the run is paused, who did it and why; nothing while it is not."""
    if not watcher.is_paused:
        return ""
    order = watcher.pause
    by = f" by {order.by}" if order is not None and order.by else ""
    reason = f" ({order.reason})" if order is not None and order.reason else ""
    return f"paused{by}{reason}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _bytes(value: float) -> str:
    return f"{value / 1e6:.1f} MB"


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{_bytes(value)}/s"
