"""A volunteer with nothing but the link of a run with its own recipe, tokenizer and data: one command."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest
from commandline import PATIENCE_SECONDS, Terminal, until_event
from organiser import end

from potluck.hub.joinlink import JoinLink
from potluck.testing.polling import poll_until_sync

RUN_FILE = """
name = "letters"
recipe = "letters.py"
files = ["data/*.txt"]
requirements = ["msgspec>=0.1"]
[training]
algorithm = "sync"
target_batch_size = 64
"""
RECIPE = """
import torch
from potluck.recipes import Recipe, RecipeConfig

class Letters(Recipe[RecipeConfig]):
    num_shards = 8

    def model(self):
        return torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256))

    def samples(self, shard, generator):
        text = self.file("data/text.txt").read_bytes()
        for at in range(shard, len(text) - 1, self.num_shards):
            yield torch.tensor(text[at]), torch.tensor(text[at + 1])

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0].long()), batch[1].long())
"""


@pytest.mark.timeout(400)
def test_a_volunteer_needs_nothing_but_the_link(terminal: Terminal, tmp_path: Path) -> None:
    folder = terminal.folder / "letters"
    (folder / "data").mkdir(parents=True)
    (folder / "run.toml").write_text(RUN_FILE)
    (folder / "letters.py").write_text(RECIPE)
    (folder / "data" / "text.txt").write_text("bread and butter, " * 2000)
    hub = terminal.folder / "hub"
    host = terminal.start("host", folder, "--folder", hub, "--listen", "127.0.0.1", "--json", OMP_NUM_THREADS="1")
    link = JoinLink.parse(until_event(host, "ready")["link"])
    own = {"POTLUCK_DATA": str(tmp_path / "volunteer"), "OMP_NUM_THREADS": "1"}
    key = ("--identity-path", tmp_path / "ada.nkey")
    poll_until_sync(
        lambda: httpx.get(link.files_url("manifest")).status_code == httpx.codes.OK, PATIENCE_SECONDS, host.tail
    )

    # What is not the run's own is not served, and what is, is served in parts too.
    for wrong in ("files/" + "0" * 64, "files/../../etc/passwd", "", "manifest/"):
        assert httpx.get(link.files_url(wrong)).status_code == httpx.codes.NOT_FOUND
    elsewhere = link.files_url("manifest").replace(link.files_key, "0" * 32)
    assert httpx.get(elsewhere).status_code == httpx.codes.NOT_FOUND
    data = (folder / "data" / "text.txt").read_bytes()
    part = httpx.get(link.files_url(f"files/{hashlib.sha256(data).hexdigest()}"), headers={"Range": "bytes=1000-"})
    assert (part.status_code, part.content) == (httpx.codes.PARTIAL_CONTENT, data[1000:])

    # Nothing runs without consent, and nobody asks to be let in before.
    refused = terminal.refuse("join", str(link), "--json", *key, code=2, **own)
    assert "runs only with your consent" in refused
    rows = terminal.ask("members", "list", "--run", "letters", "--folder", hub)
    assert {row["name"] for row in rows} == {"organiser", "host"}
    assert (tmp_path / "volunteer").exists(), "the code was fetched, to be read"
    checks = {check["name"]: check for check in terminal.ask("doctor", str(link), **own)["checks"]}
    assert checks["what it trains"]["level"] == "yellow"
    assert checks["packages"]["level"] == "green"
    assert checks["files"]["found"].startswith("1 files to fetch")

    # One command.
    ada = terminal.start("join", str(link), "--yes", "--json", *key, name="ada", **own)
    assert until_event(ada, "recipe")["name"] == "letters.py"
    until_event(ada, "training", recipe="letters.py")
    progress = poll_until_sync(
        lambda: until_event(ada, "progress")["samples"] > 0 or ada.exit_code, PATIENCE_SECONDS, ada.tail
    )
    assert progress is True
    end(ada)

    # Asked once: the same code runs again without a word, and other code does not.
    again = terminal.start("join", str(link), "--json", *key, name="again", **own)
    until_event(again, "training")
    end(again)
    end(host)


@pytest.mark.timeout(400)
def test_packages_that_are_missing_are_named_before_anything_else(terminal: Terminal, tmp_path: Path) -> None:
    folder = terminal.folder / "letters"
    (folder / "data").mkdir(parents=True)
    (folder / "run.toml").write_text(RUN_FILE.replace("msgspec>=0.1", 'no-such-package>=2", "msgspec>=99'))
    (folder / "letters.py").write_text(RECIPE)
    (folder / "data" / "text.txt").write_text("bread and butter, " * 200)
    host = terminal.start(
        "host", folder, "--folder", terminal.folder / "hub", "--listen", "127.0.0.1", "--json", OMP_NUM_THREADS="1"
    )
    link = until_event(host, "ready")["link"]
    output = terminal.run("join", link, "--yes", code=2, POTLUCK_DATA=str(tmp_path / "volunteer"))
    assert "pip install 'no-such-package>=2' 'msgspec>=99'" in output
    assert not list((tmp_path / "volunteer").glob("*")), "nothing was fetched"
    end(host)
