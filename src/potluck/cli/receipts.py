"""`potluck receipts`: what you gave, in the coordinators' own signed words."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from potluck.run.peer import Peer
    from potluck.training.books.receipts import Checked

NONE_HERE = "There are no receipts in {folder}: they come while you train."


def receipts(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE…", help="Receipts to check. Default: this machine's own.")
    ] = None,
    link: Annotated[
        str, typer.Option(help="The run's join link: also check that the signer coordinated that run.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Show and check receipts: so many samples, to so many epochs. Exit code 1 if one is not genuine.

    A peer that trains gets one from the coordinator for every epoch it helped to make, and keeps it as a line of JSON.

    Examples: [bold]potluck receipts[/bold]; [bold]potluck receipts my-run.jsonl --link 'potluck://…'[/bold]
    """
    from potluck.cli import console
    from potluck.training.books.receipts import check_receipts, read_lines, receipts_folder

    console.set_up_logging(verbose=False)
    paths = files or sorted(receipts_folder().glob("*.jsonl"))
    checked, num_bad = check_receipts(line for path in paths for line in read_lines(path))
    known = _coordinators(link, as_json) if link else None
    rows = [_row(each, known) for each in checked]
    strangers = [row for row in rows if row.get("signed by") == "strangers"]
    if as_json:
        console.print_json({"receipts": rows, "not_genuine": num_bad})
    else:
        named = " or ".join(map(str, files or ()))
        empty = f"There is no genuine receipt in {named}." if files else NONE_HERE.format(folder=receipts_folder())
        console.show_table([{**row, "samples": f"{row['samples']:,.0f}"} for row in rows], empty=empty)
        if num_bad:
            console.err.print(f"[red]{console.count(num_bad, 'line')} of them cannot be trusted: not genuine.[/red]")
    raise typer.Exit(1 if num_bad or strangers else 0)


def _row(checked: Checked, known: tuple[str, set[str]] | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run": checked.run,
        "peer": checked.peer,
        "name": checked.name,
        "epochs": len(checked.epochs),
        "samples": checked.samples,
    }
    if known is not None and known[0] == checked.run:
        row["signed by"] = "coordinators" if checked.coordinators <= known[1] else "strangers"
    return row


def _coordinators(link: str, as_json: bool) -> tuple[str, set[str]]:
    """The run, and who coordinated it, by its book and its roster."""
    from potluck.cli.joining import observe, parse_link

    parsed = parse_link(link, "potluck receipts --link")
    found: set[str] = set()

    async def look(peer: Peer, _stop: asyncio.Event) -> None:
        from potluck.training.books.contributions import read_book

        book, _revision = await read_book(peer.session)
        found.update(book.coordinators)
        found.update(presence.peer for presence in peer.session.roster if presence.coordinates)

    observe(parsed, "receipts", None, as_json, look, takes_key=False)
    return parsed.run, found
