"""docs/tutorials/nat.md and its notebook: the code is run, and says what the page says.

POTLUCK_WRITE_DOCS=1 scripts/test tests/e2e/test_nat_tutorial.py    # writes the outputs and the notebook anew
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorials" / "nat.md"
NOTEBOOK = ROOT / "notebooks" / "nat.ipynb"
CELL = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
CELL_SECONDS = 240


def as_notebook(page: str) -> nbformat.NotebookNode:
    """The page's text and code as cells, without outputs: running them is the reader's part."""
    cells, end = [], 0
    for found in CELL.finditer(page):
        cells.append(nbformat.v4.new_markdown_cell(page[end : found.start()].strip()))
        cells.append(nbformat.v4.new_code_cell(found[1].strip()))
        end = found.end()
    for number, cell in enumerate(cells):
        cell["id"] = f"step-{number}"
    book = nbformat.v4.new_notebook(cells=cells)
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return book


def without_links(text: str) -> str:
    """Links from a page to its neighbours lead elsewhere from a notebook."""
    return re.sub(r"\[([^]]*)\]\(\.\./[^)]*\)", r"\1", text)


def said(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


@pytest.mark.lab
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("needs_lab")
async def test_the_tutorial_shows_what_its_code_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert shutil.which("potluck")
    page = PAGE.read_text()
    book = as_notebook(without_links(page))
    await NotebookClient(book, timeout=CELL_SECONDS).async_execute()
    outputs = [said(cell) for cell in book.cells if cell.cell_type == "code"]
    if os.environ.get("POTLUCK_WRITE_DOCS"):
        results = iter(outputs)
        page = CELL.sub(
            lambda found: (
                f"```python\n{found[1]}```" + ("" if not (text := next(results)) else f"\n\n```text\n{text}```")
            ),
            page,
        )
        PAGE.write_text(page)
        nbformat.write(as_notebook(without_links(page)), NOTEBOOK)
    assert outputs == [found[2] or "" for found in CELL.finditer(page)]


def test_the_notebook_is_the_page() -> None:
    ours = as_notebook(without_links(PAGE.read_text()))
    theirs = nbformat.read(NOTEBOOK, as_version=4)
    assert [(cell.cell_type, cell.source) for cell in theirs.cells] == [
        (cell.cell_type, cell.source) for cell in ours.cells
    ]
