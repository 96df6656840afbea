"""Execute a notebook as a person does: paste the link, run the cell, and stop it if asked.

    python runnotebook.py NOTEBOOK LINK [--stop-at-epoch N]

Prints the last page that the cell showed. An error in the cell is an error here.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from potluck.testing.polling import poll_until

PLACEHOLDER = "potluck://…"
CELL_SECONDS = 240


def page(cell: nbformat.NotebookNode) -> str:
    """What the cell shows now."""
    shown = [output.data.get("text/html", "") for output in cell.outputs if "data" in output]
    return shown[-1] if shown else ""


def epoch_in(text: str) -> int:
    found = re.search(r"epoch (\d+) ", text)
    return int(found.group(1)) if found else -1


async def run(path: Path, link: str, stop_at_epoch: int | None) -> str:
    book = nbformat.read(path, as_version=4)
    [cell] = [each for each in book.cells if each.cell_type == "code"]
    assert PLACEHOLDER in cell.source
    cell.source = cell.source.replace(PLACEHOLDER, link)
    client = NotebookClient(book, timeout=CELL_SECONDS)
    async with client.async_setup_kernel():
        executing = asyncio.create_task(client.async_execute_cell(cell, book.cells.index(cell)))
        if stop_at_epoch is not None:
            await poll_until(
                lambda: executing.done() or epoch_in(page(cell)) >= stop_at_epoch, CELL_SECONDS, "the epoch to stop at"
            )
            await client.km.interrupt_kernel()
        await executing
    return page(cell)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("link")
    parser.add_argument("--stop-at-epoch", type=int)
    chosen = parser.parse_args()
    sys.stdout.write(asyncio.run(run(chosen.notebook, chosen.link, chosen.stop_at_epoch)) + "\n")


if __name__ == "__main__":
    main()
