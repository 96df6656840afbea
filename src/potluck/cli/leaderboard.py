"""`potluck leaderboard`: who has given how much."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from potluck.run.peer import Peer
    from potluck.training.contributions import ContributionBook


def leaderboard(
    link: Annotated[str, typer.Argument(help="The join link, in quotes; else POTLUCK_LINK.")] = "",
    top: Annotated[int, typer.Option(help="How many to show.")] = 20,
    identity_path: Annotated[
        Path | None, typer.Option(help="File with the key you look by; a new one is made unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Tell in JSON.")] = False,
) -> None:
    """Show who has given how many samples to the run.

    Example: [bold]potluck leaderboard 'potluck://hub.example.org:4222/my-run?ca=…#…'[/bold]
    """
    from potluck.cli import console
    from potluck.cli.joining import observe, parse_link

    console.set_up_logging(verbose=False)

    async def look(peer: Peer, _stop: asyncio.Event) -> None:
        module = await console.import_slowly("potluck.training.contributions")
        book, _revision = await module.read_book(peer.session)
        _show(book, top, as_json)

    observe(parse_link(link, "potluck leaderboard"), "leaderboard", identity_path, as_json, look)


def _show(book: ContributionBook, top: int, as_json: bool) -> None:
    import msgspec
    from rich.table import Table
    from rich.text import Text

    from potluck.cli import console

    ranked = book.ranked()[: max(top, 0)]
    if as_json:
        peers = [{"peer": peer, **msgspec.structs.asdict(given)} for peer, given in ranked]
        console.print_json({"epoch": book.epoch, "missed": book.missed, "peers": peers})
        return
    table = Table("", "who", "samples", "epochs", "last seen in epoch")
    for place, (peer, given) in enumerate(ranked, 1):
        who = Text(given.name or peer[:12])  # other people's words: never read as markup
        table.add_row(str(place), who, f"{given.samples:,.0f}", str(given.epochs), str(given.last_epoch))
    console.out.print(table)
    if book.missed:
        console.out.print(f"{console.count(book.missed, 'epoch')} of {book.epoch} could not be written down.")
