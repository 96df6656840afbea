"""The notebooks, executed for real by a kernel, against a host on this machine, with the Potluck that it serves."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import Party, Terminal, until_event
from organiser import LONG_SECONDS, ONE_THREAD, Organiser, end

from potluck.testing.processes import Children, ManagedProcess

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
RUN_NOTEBOOK = Path(__file__).with_name("runnotebook.py")
NOTEBOOK_SECONDS = 180.0  # a kernel starts, pip looks around, torch is imported
PLACES = {"kaggle": {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "colab": {"COLAB_RELEASE_TAG": "release"}}


def start_notebook(children: Children, terminal: Terminal, name: str, link: str, *options: str) -> ManagedProcess:
    site = terminal.folder / f"{name}-site"  # where this notebook's pip installs; all dependencies are here already
    site.mkdir(exist_ok=True)
    environment = {
        **ONE_THREAD,
        **PLACES[name],
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_TARGET": str(site),
        "PIP_NO_COMPILE": "1",
        "PYTHONPATH": str(site),
        "PYTHONDONTWRITEBYTECODE": "",
        "XDG_DATA_HOME": str(terminal.folder / name),  # a key of its own
        "POTLUCK_NAME": name,
    }
    command = [sys.executable, RUN_NOTEBOOK, NOTEBOOKS / f"{name}.ipynb", link, *options]
    return children.spawn(command, name=name, env=environment)


@pytest.mark.timeout(400)
def test_both_notebooks_train_until_the_run_ends_or_the_cell_is_stopped(terminal: Terminal, children: Children) -> None:
    organiser = Organiser(terminal, "--recipe", "stdlib-lm")
    for before, after in (
        ("layers = 4", "layers = 1"),
        ("width = 128", "width = 32"),
        ("context = 128", "context = 16"),
    ):
        organiser.edit(before, after)
    organiser.edit("target_batch_size = 256", "target_batch_size = 2048")
    organiser.edit("end_epoch = 0 ", "end_epoch = 12 ")
    host, link = organiser.host()

    colab = start_notebook(children, terminal, "colab", link, "--stop-at-epoch", "2")
    assert colab.wait(NOTEBOOK_SECONDS) == 0, colab.output()
    assert until_event(host, "left", name="colab")["reason"] == "it said good-bye"

    kaggle = start_notebook(children, terminal, "kaggle", link)
    assert kaggle.wait(NOTEBOOK_SECONDS) == 0, kaggle.output()
    assert until_event(host, "left", name="kaggle")["reason"] == "it said good-bye"

    for notebook in (colab, kaggle):
        page = notebook.output()
        assert "<progress" in page
        assert "data:image/png;base64," in page
        thanks = re.search(r"You gave ([\d,]+) samples, up to epoch (\d+)", page)
        assert thanks, page
        assert int(thanks.group(1).replace(",", "")) > 0
        assert list((terminal.folder / notebook.name / "potluck" / "receipts").glob("*.jsonl")), "it has its receipts"
        site = terminal.folder / f"{notebook.name}-site"
        assert list(site.glob("potluck/__pycache__/notebook.*.pyc")), "what the host served is what ran"
    assert "up to epoch 12" in kaggle.output()
    board = terminal.ask("leaderboard", link, patience_seconds=LONG_SECONDS)
    assert {row["name"] for row in board["peers"]} == {"colab", "kaggle"}
    end(host)


def test_a_notebook_installs_nothing_but_what_the_link_names(terminal: Terminal, children: Children) -> None:
    link = Party(terminal).link
    assert link.wheel is not None
    for other, says in (
        (None, "its host offers no Potluck"),
        (replace(link.wheel, sha256="0" * 64), "is not what the link names. Ask the organiser for a new link"),
        (replace(link.wheel, version="9.9"), "If your join link names another version"),
    ):
        colab = start_notebook(children, terminal, "colab", str(replace(link, wheel=other)))
        assert colab.wait(NOTEBOOK_SECONDS) != 0
        assert says in colab.output()
        assert not list((terminal.folder / "colab-site").iterdir())


@pytest.mark.parametrize("name", sorted(PLACES))
def test_a_notebook_is_one_cell_to_run(name: str) -> None:
    book = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    [cell] = [each for each in book["cells"] if each["cell_type"] == "code"]
    source = "".join(cell["source"])
    assert source.startswith('LINK = "potluck://…"')
    assert source.endswith("take_part(LINK)")
    assert cell["outputs"] == []
    assert cell["execution_count"] is None
