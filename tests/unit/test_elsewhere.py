"""Options and commands of other systems' guides: they work, or say what replaces them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from potluck.cli.elsewhere import REPLACED
from potluck.cli.main import app
from potluck.errors import ConfigurationError

RUN_FILE = """
name = "tuned"
recipe = "digits"
[model]
width = 8
[training]
algorithm = "sync"
target_batch_size = 16
"""


@pytest.mark.parametrize("option", sorted(REPLACED))
def test_an_option_of_another_system_says_what_replaces_it(option: str) -> None:
    for words in (["train", "potluck://x", option, "1"], ["collab", "aux", f"{option}=1"]):
        error = CliRunner().invoke(app, words).exception
        assert isinstance(error, ConfigurationError)
        assert str(error).startswith(f"{option} is not needed here. {REPLACED[option]}")


def test_what_replaces_them_exists() -> None:
    """Options that are named are options of some command, and settings are in the description of run.toml."""
    docs = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    helped = CliRunner().invoke(app, ["join", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for command in ("host", "monitor", "visualize"):
        helped += CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for text in REPLACED.values():
        for option in re.findall(r"--[a-z-]+", text):
            assert option in helped, text
        for setting in re.findall(r"(\w+) under \[(?:training|optimizer|schedule)\]", text):
            assert f"`{setting}`" in docs or setting in docs, text


@pytest.mark.parametrize(
    "words",
    [
        ["collab", "train", "--sync-args", "--batch-size", "1", "--n-workers", "2", "--backup-every-step", "1"],
        ["collab", "aux", "--sync-args", "--verbose", "--as-active-peer", "--backup-every-step", "1"],
        ["train", "--sync-args", "--batch-size", "1", "--n-workers", "2", "--backup-every-step", "1"],
    ],
)
def test_the_guides_own_lines_get_as_far_as_the_link(words: list[str]) -> None:
    """Without a link there is nothing to join: that is all that is wrong with them."""
    error = CliRunner().invoke(app, words, env={"POTLUCK_LINK": ""}).exception
    assert isinstance(error, ConfigurationError)
    assert "link" in str(error)


def test_tune_finds_options_for_this_machine(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    before = torch.get_num_threads()
    result = CliRunner().invoke(app, ["tune", str(tmp_path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.exception
    [line] = [line for line in result.output.splitlines() if line.startswith("potluck join LINK")]
    found = re.search(r"--batch-size (\d+) --threads (\d+) --n-workers (\d+)", line)
    assert found is not None
    assert 1 <= int(found[1]) <= 16, "no more than the run's target"
    assert torch.get_num_threads() == before
