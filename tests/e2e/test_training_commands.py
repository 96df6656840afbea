"""`potluck train`, `aux`, `visualize`, `checkpoint`, `download`: the real commands, in real processes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest
from commandline import PATIENCE_SECONDS, Terminal, events, until_event
from organiser import LONG_SECONDS, ONE_THREAD, Organiser, end, until_epoch
from safetensors.torch import load_file


@pytest.mark.timeout(500)
def test_a_trainer_an_aux_peer_and_what_comes_of_it(fresh_terminal: Terminal) -> None:
    terminal = fresh_terminal
    organiser = Organiser(terminal)
    host, link = organiser.host()
    helper = terminal.start("aux", link, "--json", "--state-path", terminal.folder / "aux", name="aux", **ONE_THREAD)
    until_event(helper, "joined")
    options = ("--batch-size", "48", "--n-workers", "2", "--backup-every-step", "1", "--bandwidth", "80Mbit")
    place = (
        "--state-path",
        terminal.folder / "ada",
        "--recipe",
        organiser.recipe,
        "--max-memory",
        "20GB",
        "--threads",
        "1",
        "--device",
        "cpu",
        "--verbose",
    )
    ada = terminal.start("train", link, "--json", "--name", "Ada", *options, *place, name="Ada")
    started = until_event(ada, "training")
    assert (started["batch_size"], started["threads"], started["device"]) == (48, 1, "cpu")
    assert "INFO" in ada.output(), "--verbose says more"
    until_epoch(ada, 3)

    shown = terminal.ask("visualize", link, "--once", "--recipe", organiser.recipe, patience_seconds=LONG_SECONDS)
    assert shown["epoch"] >= 1
    assert "truth" in shown["text"]
    assert shown["evaluation_loss"] > 0
    look_without_torch(terminal, link)
    folder = terminal.folder / "saved"
    saved = terminal.ask("checkpoint", "save", link, "--to", folder, patience_seconds=LONG_SECONDS)
    [row] = terminal.ask("checkpoint", "verify", "--path", folder, patience_seconds=LONG_SECONDS)
    assert (row["epoch"], row["whole"]) == (saved["epoch"], True)
    elsewhere = terminal.folder / "elsewhere"
    place_there = (f"file://{elsewhere}", "--path", folder)
    uploaded = terminal.ask("checkpoint", "upload", *place_there, patience_seconds=LONG_SECONDS)
    assert uploaded["epoch"] == saved["epoch"]
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    file = terminal.folder / "model.safetensors"
    terminal.run("checkpoint", "export", file, "--path", folder, patience_seconds=LONG_SECONDS)
    assert set(load_file(file)) == {"0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"}

    os.kill(ada.pid, signal.SIGINT)
    assert ada.wait(PATIENCE_SECONDS) == 0, ada.output()
    last = until_event(ada, "trained")
    handed_in = [each["samples"] for each in events(ada) if each["event"] == "handing in"]
    assert handed_in == ([last["handed_in"]] if last["handed_in"] else []), "alone, all of it is handed in"
    assert list((terminal.folder / "ada" / "backups").glob("epoch-*.json"))
    end(helper)
    end(host)


def look_without_torch(terminal: Terminal, link: str) -> None:
    """Whoever only looks need not wait for its import: here it cannot be imported at all."""
    absent = terminal.folder / "absent"
    absent.mkdir()
    (absent / "torch.py").write_text("raise ImportError('torch is not here')\n")
    without = {"PYTHONPATH": os.pathsep.join([str(absent), *filter(None, [os.environ.get("PYTHONPATH")])])}
    place = ("--run", "waves", "--folder", terminal.folder / "hub")
    seen = json.loads(terminal.run("monitor", link, "--once", "--json", **without))
    assert "Ada" in {peer["name"] for peer in seen["peers"]}
    assert "Ada" in terminal.run("leaderboard", link, **without)
    assert "learning_rate" in terminal.run("run", "show", *place, **without)
    assert "Ada" in terminal.run("members", "list", *place, **without)


def test_download_data(fresh_terminal: Terminal) -> None:
    terminal = fresh_terminal
    recipe = terminal.folder / "mine.py"
    content = b"some data"
    source = terminal.folder / "source"
    source.mkdir()
    (source / "data.txt").write_bytes(content)
    server = terminal._children.spawn(
        ["python3", "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", source], name="server"
    )
    server.wait_for_line("Serving HTTP", PATIENCE_SECONDS)
    port = server.output().split(" port ")[1].split()[0]
    recipe.write_text(
        "from potluck.recipes import Download, Recipe\n"
        "class Mine(Recipe):\n"
        f"    downloads = (Download(name='data.txt', url='http://127.0.0.1:{port}/data.txt',\n"
        f"                          sha256='{hashlib.sha256(content).hexdigest()}'),)\n"
        "    def model(self): ...\n    def samples(self, shard, generator): ...\n"
        "    def loss(self, model, batch): ...\n"
    )
    place = (recipe, "--folder", terminal.folder / "data")
    assert "data.txt" in terminal.run("download", "data", *place, "--check", code=1, patience_seconds=LONG_SECONDS)
    [row] = terminal.ask("download", "data", *place, patience_seconds=LONG_SECONDS)
    assert Path(row["path"]).read_bytes() == content
