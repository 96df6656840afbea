"""A run whose data are not on the host: what the recipe refuses is refused, and it is tried when the data are there."""

from __future__ import annotations

import json

import pytest
from commandline import PATIENCE_SECONDS, Terminal, until_event
from organiser import end

from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess

RUN_FILE = 'name = "waves"\nrecipe = "recipe.py"\n'
RECIPE = """
import torch
from potluck.recipes import Download, Recipe, RecipeConfig

class Config(RecipeConfig, frozen=True, kw_only=True):
    pass

class Data(RecipeConfig, frozen=True, kw_only=True):
    noise: float = 0.0

class Waves(Recipe[Config]):
    Config = Config
    Data = Data
    downloads = (Download(name="waves.txt", url="http://127.0.0.1:9/waves.txt", sha256="0" * 64),)

    def check_data(self, data):
        if data.noise > 1:
            raise ValueError(f"noise={data.noise} is above 1")

    def model(self):
        return torch.nn.Linear(1, 1)

    def samples(self, shard, generator):
        yield (torch.tensor([float(self.file("waves.txt").read_text())]),)

    def loss(self, model, batch):
        return model(batch[0]).square().mean()
"""


@pytest.mark.timeout(400)
def test_what_the_recipe_refuses_is_refused_and_what_was_not_tried_is_tried_later(terminal: Terminal) -> None:
    folder, hub, data = terminal.folder / "waves", terminal.folder / "hub", terminal.folder / "data"
    for each in (folder, data):
        each.mkdir()
    (folder / "run.toml").write_text(RUN_FILE)
    (folder / "recipe.py").write_text(RECIPE)

    def start() -> ManagedProcess:
        options = ("--folder", hub, "--listen", "127.0.0.1", "--json")
        return terminal.start("host", folder, *options, POTLUCK_DATA=str(data), OMP_NUM_THREADS="1")

    def is_tried() -> bool:
        return bool(json.loads((hub / "host.json").read_text())["is_tried"])

    host = start()
    until_event(host, "ready")
    assert "the recipe is not tried here" in " ".join(host.output().split())
    place = ("--run", "waves", "--folder", hub)
    poll_until_sync(  # its manifest comes a moment after the hub
        lambda: json.loads((hub / "host.json").read_text())["recipe_file"] or host.exit_code,
        PATIENCE_SECONDS,
        host.tail,
    )
    assert "noise=2.0 is above 1" in terminal.refuse("run", "set", "data.noise=2", *place, code=2)
    assert terminal.ask("run", "set", "data.noise=0.5", *place)["from_epoch"] == 2
    assert not is_tried()
    end(host)

    (data / f"{'0' * 16}-waves.txt").write_text("no number")
    host = start()
    assert host.wait(PATIENCE_SECONDS) == 2
    assert "the recipe fails: ValueError: could not convert string to float" in host.output()
    assert "Traceback" not in host.output()

    (data / f"{'0' * 16}-waves.txt").write_text("0.5")
    host = start()
    poll_until_sync(lambda: is_tried() or host.exit_code is not None, PATIENCE_SECONDS, host.tail)
    end(host)
