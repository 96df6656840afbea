"""`potluck paths`, and a run with paths: the real commands, in real processes, with kills, a stop and a browser.

With POTLUCK_SCREENSHOTS set to a folder, the picture of the documentation is written there.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Visit, open_browser
from commandline import PATIENCE_SECONDS, Terminal, events, until_event
from organiser import LONG_SECONDS, ONE_THREAD
from safetensors.torch import load_file

from potluck.peer.grouplease import in_order
from potluck.peer.identity import Identity
from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess

PICTURES = os.environ.get("POTLUCK_SCREENSHOTS", "")
PATHS = [(0, 0), (0, 1), (1, 0), (1, 1)]
MODULES = ("shared", "level-0-0", "level-0-1", "level-1-0", "level-1-1")

RUN_FILE = """\
name = "grove"
recipe = "recipe.py"

[model]
layers = 2

[paths]
levels = [2, 2]
route_prefix = 16
inner_steps = 12
batch_size = 8
stop_after = 1000

[training]
algorithm = "diloco"
grace_seconds = 10

[optimizer]
learning_rate = 1e-2
"""

RECIPE = """\
import time

from potluck.recipes import Recipe, RecipeConfig
from potluck.testing.languages import WordModel, languages, word_losses


class Config(RecipeConfig, frozen=True, kw_only=True):
    layers: int = 2


class Grove(Recipe[Config]):
    Config = Config
    document_window = 32

    def model(self):
        return WordModel(16, self.config.layers)

    def documents(self):
        return languages(400, length=48)[0]

    def token_losses(self, model, tokens):
        time.sleep(0.02)  # so that a phase lasts long enough to be killed in
        return word_losses(model, tokens)

    def samples(self, shard, generator):
        return ((document,) for document in self.documents())

    def loss(self, model, batch):
        return word_losses(model, batch[0]).mean()
"""


class Grove:
    """A run with paths."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.folder = terminal.folder / "grove"
        self.folder.mkdir()
        (self.folder / "run.toml").write_text(RUN_FILE)
        (self.folder / "recipe.py").write_text(RECIPE)
        self.place = ("--run", "grove", "--folder", terminal.folder / "hub")
        self.link = ""

    def host(self, *options: str, **environment: str) -> ManagedProcess:
        place = ("--folder", self.terminal.folder / "hub", "--listen", "127.0.0.1", "--backup-every", "1", "--json")
        host = self.terminal.start(
            "host", self.folder, *place, *(options or ("--no-dashboard",)), name="host", **ONE_THREAD, **environment
        )
        self.link = until_event(host, "ready")["link"]
        return host

    def key(self, name: str) -> tuple[str | Path, ...]:
        file = "".join(filter(str.isalnum, name))
        return ("--identity-path", self.terminal.folder / f"{file}.nkey", "--name", name)

    def join(self, name: str) -> ManagedProcess:
        what = ("--json", "--yes", "--recipe", self.folder / "recipe.py", "--threads", "1")
        return self.terminal.start("join", self.link, *self.key(name), *what, **ONE_THREAD)

    def aux(self, name: str) -> ManagedProcess:
        """Who coordinates two modules at least, once the host has made way."""
        members = self.terminal.ask("members", "list", *self.place)
        host = next(row["peer"] for row in members if row["role"] == "aux")
        is_chosen = False
        while not is_chosen:
            file = self.terminal.folder / f"{name}.nkey"
            file.unlink(missing_ok=True)
            identity = Identity.open(file)
            is_chosen = sum(in_order(module, [host, identity.peer_id])[0] != host for module in MODULES) >= 2
            identity.close()
        invite = ("members", "invite", "--role", "aux", "--coordinates", "--trusted")
        link = self.terminal.ask(*invite, *self.place)["link"]
        return self.terminal.start("aux", link, "--json", *self.key(name), name=name, **ONE_THREAD)

    def ask(self, command: str, *arguments: str | Path) -> dict[str, Any]:
        found: dict[str, Any] = self.terminal.ask(
            "paths", command, *arguments, *self.place, patience_seconds=LONG_SECONDS
        )
        return found

    def look(self) -> dict[str, Any]:
        shown: dict[str, Any] = self.terminal.ask("paths", self.link, patience_seconds=LONG_SECONDS)
        return shown


def begun(processes: list[ManagedProcess]) -> dict[tuple[int, ...], int]:
    """The newest phase of each path that was begun."""
    newest: dict[tuple[int, ...], int] = {}
    for process in processes:
        for each in events(process):
            if each["event"] == "path":
                path = tuple(each["path"])
                newest[path] = max(newest.get(path, 0), each["phase"])
    return newest


def until_phase(processes: list[ManagedProcess], phase: int) -> None:
    """Wait until each of the four paths has begun this phase."""

    def reached() -> bool:
        assert all(process.exit_code is None for process in processes), [p.output()[-2000:] for p in processes]
        newest = begun(processes)
        return len(newest) == 4 and min(newest.values()) >= phase

    poll_until_sync(reached, 2 * PATIENCE_SECONDS, lambda: f"phase {phase} of all paths, not {begun(processes)}")


def coordinated_by(shown: dict[str, Any], name: str) -> list[str]:
    return [row["module"] for row in shown["modules"] if row["coordinator"] == name]


@pytest.mark.timeout(600)
def test_four_paths_on_three_peers_with_kills_and_a_stop(terminal: Terminal) -> None:
    grove = Grove(terminal)
    check_preparation(grove)
    host = grove.host()
    helper = grove.aux("bea")
    peers = {name: grove.join(name) for name in ("ada", "ben", "cy")}
    until_phase(list(peers.values()), 1)

    victim = peers.pop("cy")
    last = len(events(victim))
    poll_until_sync(lambda: any(e["event"] == "path" for e in events(victim)[last:]), PATIENCE_SECONDS, "a new phase")
    victim.kill()
    first = max(begun([victim, *peers.values()]).values())
    until_phase(list(peers.values()), first + 1)

    def made_way() -> dict[str, Any] | None:
        shown = grove.look()
        return shown if len(coordinated_by(shown, "bea")) >= 2 else None

    before = poll_until_sync(made_way, PATIENCE_SECONDS, "two modules that bea coordinates")
    assert sum(row["returned"] for row in before["paths"]) == 1, "the lease of the dead came back"
    helper.kill()
    second = max(begun(list(peers.values())).values())
    until_phase(list(peers.values()), second + 2)
    after = grove.look()
    assert not coordinated_by(after, "bea")
    assert all(row["epoch"] > old["epoch"] for row, old in zip(after["modules"], before["modules"], strict=True))
    assert all(row["phases"] > old["phases"] for row, old in zip(after["paths"], before["paths"], strict=True))

    rerouted = grove.ask("reroute")
    assert rerouted["documents"] == 400
    until_phase(list(peers.values()), rerouted["from_phase"] + 1)  # so they have fetched the new routing

    last_begun = max(begun(list(peers.values())).values())
    for process in (host, *peers.values()):  # everything stops at once
        os.kill(process.pid, signal.SIGINT)
    for process in (host, *peers.values()):
        assert process.wait(PATIENCE_SECONDS) == 0, process.output()
    cut = check_last_cut(grove)
    check_use(grove, terminal.folder)

    grove.host()
    again = grove.join("ada")
    until_phase([again], last_begun + 2)
    assert all(row["epoch"] > cut[row["module"]] for row in grove.look()["modules"]), "it goes on from there"
    assert "are lost" not in again.output()


def check_preparation(grove: Grove) -> None:
    """What an organiser sees before the run."""
    terminal = grove.terminal
    refused = terminal.refuse("host", grove.folder, "--folder", terminal.folder / "hub", code=2)
    assert "potluck paths prepare" in refused, "there is no routing yet"
    prepared = terminal.ask("paths", "prepare", grove.folder)
    assert [row["path"] for row in prepared["paths"]] == ["(0, 0)", "(0, 1)", "(1, 0)", "(1, 1)"]
    assert sum(row["tokens"] for row in prepared["paths"]) == prepared["tokens"]


def check_last_cut(grove: Grove) -> dict[str, int]:
    """The host has the newest state of each module, and they are one cut."""
    rows = grove.terminal.ask("checkpoint", "list", "--path", grove.terminal.folder / "hub" / "states")
    newest = max(row["cut"] for row in rows)
    cut = {row["group"]: row["epoch"] for row in rows if row["cut"] == newest}
    last = {name: max(row["epoch"] for row in rows if row["group"] == name) for name in MODULES}
    assert cut == last
    return cut


def check_use(grove: Grove, folder: Path) -> None:
    """What an organiser does with the model."""
    file = folder / "path.safetensors"
    grove.ask("export", "--path", "1,0", "--to", file)
    assert "words.weight" in load_file(file)
    grove.ask("export", "--path", "1,0", "--best", "--to", folder / "best.safetensors")
    best, last = load_file(folder / "best.safetensors"), load_file(file)
    assert best.keys() == last.keys()
    assert any(not torch.equal(best[name], last[name]) for name in last), "it has trained on since it was judged"
    grove.ask("export", "--all", "--to", folder / "all")
    assert json.loads((folder / "all" / "paths.json").read_text())["levels"] == [2, 2]
    assert json.loads((folder / "all" / "routing.json").read_text())["kind"] == "discriminative"
    found = grove.ask("evaluate", "--reroute-every", "16", "--dense", file)
    assert len(found["paths"]) == 4
    assert 0 < found["mixture"] < found["dense"], "a path is worse than the mixture"
    assert found["rerouted"] > 0
    refuse = grove.terminal.refuse
    assert "there is no path (5, 0)" in refuse("paths", "export", "--path", "5,0", *grove.place, code=2)
    assert "export what?" in refuse("paths", "export", *grove.place, code=2)


@pytest.mark.xdist_group("dashboard")
@pytest.mark.timeout(300)
def test_the_page_of_paths_in_a_browser(terminal: Terminal) -> None:
    grove = Grove(terminal)
    terminal.ask("paths", "prepare", grove.folder)
    host = grove.host("--dashboard-port", "0", POTLUCK_NO_DASHBOARD="")
    peers = [grove.join(name) for name in (("Ada", "Ben") if PICTURES else ("<b>Ada</b>",))]
    until_phase(peers, 2)
    with open_browser() as browser, Visit(browser, until_event(host, "dashboard")["url"]) as visit:
        page = visit.see("/paths")
        page.wait_for_selector(".nav-link.here:text-is('Paths')")
        for title in (*(f"Path ({one}, {two})" for one, two in PATHS), *MODULES):
            page.wait_for_selector(f".item-title:text-is('{title}')")
        page.wait_for_selector("text=/[0-9]+ outer steps, the last [0-9]+ s ago; 4 paths, coordinated by/")
        page.wait_for_selector(f"text=trained by {'Ada' if PICTURES else '<b>Ada</b>'}")
        tokens = page.locator(".item", has=page.locator(".item-title:text-is('Path (0, 0)')"))
        before = tokens.inner_text()
        page.wait_for_function("before => !document.body.innerText.includes(before)", arg=before)
        if PICTURES:
            until_phase(peers, 12)
            page.wait_for_timeout(3000)
            page.screenshot(path=Path(PICTURES) / "dashboard-paths.png", full_page=True)
        assert visit.complaints == []
