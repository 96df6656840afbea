"""`potluck plan`: a table from the recipe's own blocks, a profile that is kept, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from potluck.cli.main import app
from potluck.errors import ConfigurationError
from potluck.pipeline.blocks import run_blocks
from potluck.recipes.catalogue import recipe_class
from potluck.recipes.recipe import configured
from potluck.training.manifest.runfile import manifest_of, read_run_file

RUN = """
name = "toy"
recipe = "digits"
[training]
algorithm = "sync"
target_batch_size = 32
[pipeline]
"""


def plan(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def write(folder: Path, pipeline: str = "", text: str = RUN) -> Path:
    file = folder / "run.toml"
    file.write_text(text + pipeline)
    return file


def test_every_number_of_machines_has_its_shape_and_the_profile_is_kept(tmp_path: Path) -> None:
    file, profile = write(tmp_path), tmp_path / "profile.json"
    first = plan(file, "--machines", 3, "--profile", profile, "--json")
    assert first.exit_code == 0, first.output
    rows = [json.loads(line) for line in first.output.splitlines()]
    assert [row["machines"] for row in rows] == [1, 2, 3]
    for row in rows:
        chosen = row["chosen"]
        assert chosen["stages"] * chosen["replicas"] <= row["machines"]
        assert row["reason"]
    kept = profile.read_bytes()
    again = plan(tmp_path, "--machines", 3, "--profile", profile, "--json")
    assert again.output == first.output, "the same profile gives the same plan"
    assert profile.read_bytes() == kept
    shown = plan(file, "--machines", 2, "--profile", profile)
    assert "With 2 machines" in shown.output


def test_the_stages_that_run_toml_names_are_kept_to(tmp_path: Path) -> None:
    result = plan(write(tmp_path, "stages = 2\nmicro_batch = 8\n"), "--machines", 4, "--json")
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [row["machines"] for row in rows] == [2, 3, 4]
    assert all(row["chosen"]["stages"] == 2 and row["chosen"]["micro_batch"] == 8 for row in rows)


@pytest.mark.parametrize(
    ("pipeline", "options", "words"),
    [
        ("stages = 9", [], "9 stages for a model of 4 blocks"),
        ("stages = 0", [], "is wrong"),
        ("", ["--machines", 0], "at least one machine"),
        ("", ["--memory", "10kB"], "cannot hold this model"),
    ],
)
def test_what_cannot_be_says_why(tmp_path: Path, pipeline: str, options: list[str], words: str) -> None:
    result = plan(write(tmp_path, pipeline), *options)
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigurationError)
    assert words in str(result.exception)


def test_a_pipeline_is_hosted_where_the_rest_of_the_run_fits(tmp_path: Path) -> None:
    manifest = manifest_of(read_run_file(write(tmp_path)), tmp_path)
    assert manifest.pipeline is not None
    diloco = RUN.replace('algorithm = "sync"', 'algorithm = "diloco"') + '[exchange]\ncompression = "sparseloco"\n'
    with pytest.raises(ConfigurationError, match=r"one large batch|whole sums"):
        manifest_of(read_run_file(write(tmp_path, text=diloco)), tmp_path)
    with pytest.raises(ConfigurationError, match="1000 stages for a model of"):
        manifest_of(
            read_run_file(write(tmp_path, text=RUN.replace("[pipeline]", "[pipeline]\nstages = 1000"))), tmp_path
        )


@pytest.mark.parametrize("name", ["digits", "stdlib-lm"])
def test_a_recipes_blocks_give_the_loss_of_its_model(name: str, tmp_path: Path) -> None:
    recipe = configured(recipe_class(name, tmp_path), {})
    torch.manual_seed(0)
    model = recipe.model()
    blocks = list(recipe.blocks())
    with torch.no_grad():  # in the same order
        for own, given in zip((p for b in blocks for p in b.parameters()), model.parameters(), strict=True):
            own.copy_(given)
    samples = iter(recipe.samples(0, torch.Generator().manual_seed(0)))
    batch = recipe.collate([next(samples) for _ in range(3)])
    (found,) = run_blocks(dict(enumerate(blocks)), range(len(blocks)), batch, (0, 0, 0))
    assert torch.allclose(found, recipe.loss(model, batch))
