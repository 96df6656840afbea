"""`potluck leaderboard`: who has given how much."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from potluck.run.peer import Peer
    from potluck.training.books.contributions import ContributionBook


def leaderboard(
    link: Annotated[str, typer.Argument(help="The join link, in quotes; else POTLUCK_LINK.")] = "",
    top: Annotated[int, typer.Option(help="How many to show.")] = 20,
    receipts: Annotated[
        bool, typer.Option("--receipts", help="Also show the samples for which this machine has signed receipts.")
    ] = False,
    identity_path: Annotated[
        Path | None, typer.Option(help="File with the key you look by; a new one is made unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Tell in JSON.")] = False,
) -> None:
    """Show who has given how many samples to the run.

    The names are those that people gave themselves (`--name`); two with the same name are told apart by their ids.

    Example: [bold]potluck leaderboard 'potluck://hub.example.org:4222/my-run?ca=…#…'[/bold]
    """
    from potluck.cli import console
    from potluck.cli.joining import observe, parse_link

    console.set_up_logging(verbose=False)

    parsed = parse_link(link, "potluck leaderboard")

    async def look(peer: Peer, _stop: asyncio.Event) -> None:
        from potluck.training.books.contributions import read_book

        book, _revision = await read_book(peer.session)
        _show(book, top, _own_receipts(parsed.run) if receipts else None, as_json)

    observe(parsed, "leaderboard", identity_path, as_json, look)


def _own_receipts(run: str) -> dict[str, float]:
    """The samples that this machine has receipts for, by peer."""
    from potluck.training.books.receipts import check_receipts, read_lines, receipts_folder, receipts_path

    path = receipts_path(receipts_folder(), run)
    checked, _num_bad = check_receipts(read_lines(path) if path.exists() else ())
    return {each.peer: each.samples for each in checked}


def _show(book: ContributionBook, top: int, receipts: dict[str, float] | None, as_json: bool) -> None:
    import msgspec

    from potluck.cli import console

    ranked = book.ranked()[: max(top, 0)]
    if as_json:
        peers: list[dict[str, Any]] = [{"peer": peer, **msgspec.structs.asdict(given)} for peer, given in ranked]
        if receipts is not None:
            peers = [{**row, "receipts": receipts.get(row["peer"], 0.0)} for row in peers]
        console.print_json({"epoch": book.epoch, "missed": book.missed, "peers": peers})
        return
    rows: list[dict[str, Any]] = []
    for place, (peer, given) in enumerate(ranked, 1):
        figures = {"samples": f"{given.samples:,.0f}", "epochs": given.epochs, "last seen in epoch": given.last_epoch}
        if receipts is not None:
            figures["with your receipts"] = f"{receipts.get(peer, 0.0):,.0f}"
        rows.append({"place": place, "who": given.name or "-", "id": peer, **figures})
    console.show_table(rows, empty="Nobody has given anything yet.")
    if book.missed:
        console.out.print(f"{console.count(book.missed, 'epoch')} of {book.epoch} could not be written down.")
