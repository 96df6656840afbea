"""What is wrong with a recipe is found by its organiser's host, before there is a run to join."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trainlab import train_lab
from typer.testing import CliRunner

from potluck.cli import hostrecipe
from potluck.cli.main import app
from potluck.errors import ConfigurationError
from potluck.recipes.catalogue import open_recipe
from potluck.training.manifest import organising
from potluck.training.manifest.manifest import DiLoCoSettings
from potluck.training.manifest.runfile import manifest_of, read_run_file
from potluck.training.manifest.skeleton import files_of_a_run
from potluck.training.trainer.trainer import Trainer
from potluck.training.trainer.trial import try_out


def folder_of_run(folder: Path, *changes: tuple[str, str], recipe: str = "recipe.py") -> Path:
    files = files_of_a_run("bakery", "own")
    for before, after in changes:
        assert before in files["recipe.py"]
        files["recipe.py"] = files["recipe.py"].replace(before, after)
    (folder / recipe).parent.mkdir(exist_ok=True)
    (folder / recipe).write_text(files["recipe.py"])
    (folder / "run.toml").write_text(files["run.toml"].replace('"recipe.py"', f'"{recipe}"'))
    return folder


def try_in(folder: Path) -> None:
    manifest = manifest_of(read_run_file(folder), folder)
    try_out(open_recipe(manifest.recipe, manifest.model, folder / "recipe.py"), manifest)


DOWNLOAD = (
    "num_shards = 64",
    f"num_shards = 64\n    downloads = (Download(name='x', url='https://example.org/x', sha256='{'0' * 64}'),)",
)
IMPORT = ("import Recipe,", "import Download, Recipe,")


def test_the_recipe_to_start_from_is_fine(tmp_path: Path) -> None:
    try_in(folder_of_run(tmp_path))


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("nn.Linear(width, 1)", "nn.Linear(width)", r"TypeError.*recipe\.py, line \d+"),
        ("nn.Linear(width, 1)", "nn.Linear(width + 1, 1)", "RuntimeError.*line"),
        ("for _ in range(1000):", "for _ in range(0):", "no data"),
        ("self.truth(x) + noise", "self.thruth(x) + noise", "AttributeError.*thruth.*line"),
        ("functional.mse_loss(model(x), y)", "functional.mse_loss(model(x), y, reduction='none')", "one number"),
        ("functional.mse_loss(model(x), y)", "functional.mse_loss(model(x), y).detach()", "no gradient"),
    ],
)
def test_what_a_volunteer_would_have_found(before: str, after: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=words):
        try_in(folder_of_run(tmp_path, (before, after)))


def test_more_fragments_than_layers_are_told_to_the_organiser(tmp_path: Path) -> None:
    folder = folder_of_run(tmp_path)
    start = msgspec.structs.replace(read_run_file(folder), training=DiLoCoSettings(num_fragments=9))
    manifest = manifest_of(start, folder)
    with pytest.raises(ConfigurationError, match="num_fragments=9, and the model has 3 layers"):
        try_out(open_recipe(manifest.recipe, manifest.model, folder / "recipe.py"), manifest)


def test_every_stage_is_tried(tmp_path: Path) -> None:
    folder = folder_of_run(tmp_path, ("self.data.noise", "(1 / (self.data.noise - 9))"))
    try_in(folder)
    with (folder / "run.toml").open("a") as file:
        file.write("[[curriculum]]\nfrom_epoch = 5\ndata.noise = 9\n")
    with pytest.raises(ConfigurationError, match="ZeroDivisionError"):
        try_in(folder)


def test_a_host_may_lack_the_data_but_a_trainer_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POTLUCK_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    folder = folder_of_run(tmp_path, DOWNLOAD, IMPORT)
    with caplog.at_level(logging.WARNING):
        try_in(folder)
    assert "not tried" in caplog.text
    manifest = manifest_of(read_run_file(folder), folder)
    recipe = open_recipe(manifest.recipe, manifest.model, folder / "recipe.py")
    with train_lab() as lab, pytest.raises(ConfigurationError, match="potluck download data"):
        Trainer(lab.join("Ada"), lambda: manifest, recipe)


def test_a_host_tries_the_recipe_before_its_hub_opens(tmp_path: Path) -> None:
    folder = folder_of_run(tmp_path, ("model(x), y", "model(y), x, x"))
    hub = tmp_path / "hub"
    arguments = ["host", str(folder), "--folder", str(hub), "--listen", "127.0.0.1", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigurationError)
    assert "the recipe fails" in str(result.exception)
    assert "ready" not in result.output
    assert not (hub / "host.json").exists()


@pytest.mark.parametrize("recipe", ["recipe.py", "recipes/mine.py"])
async def test_previews_look_for_the_recipe_where_run_toml_says(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_up: list[Any] = []

    async def shown(manifest: Any, *_: Any) -> Any:
        put_up.append(manifest)

    monkeypatch.setattr(organising, "put_up", shown)

    class Somebody:
        address = keys = None

    run_file = folder_of_run(tmp_path, recipe=recipe) / "run.toml"
    assert await hostrecipe.put_up(run_file, Somebody()) == tmp_path / recipe  # type: ignore[arg-type]
    assert put_up[0].recipe.name == Path(recipe).name
