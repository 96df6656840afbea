"""What a run has learnt, by its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from potluck.errors import BackupError
from potluck.optim.parameters import PARAMETER, prefixed
from potluck.recipes import stdlib_lm
from potluck.recipes.stdlib_lm import Config, StdlibLM
from potluck.state.backups import Backups
from potluck.state.chunkpool import ChunkPool
from potluck.state.snapshot import stage
from potluck.training.trainer.models import preview, untrained
from potluck.training.trainer.resultpreview import examine

RUN_FILE = """
name = "tiny"
recipe = "stdlib-lm"
seed = 3
[model]
layers = 1
width = 8
heads = 1
context = 8
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    return tmp_path


def test_a_checkpoint_is_compared_with_the_untrained_model(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdlib_lm, "PREVIEW_BYTES", 8)
    recipe = StdlibLM(Config(layers=1, width=8, heads=1, context=8))
    model = untrained(recipe, seed=3)
    _, before = preview(recipe, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    text, after = preview(recipe, model)
    tensors = prefixed(PARAMETER, {name: value.detach() for name, value in model.named_parameters()})
    Backups(run / "states" / "backups", run="tiny").save(stage(tensors, {}, ChunkPool()).hashed(), epoch=7)
    found = examine(run, run / "states")
    assert (found.epoch, found.text) == (7, text)
    assert found.checkpoint.is_file()
    assert found.loss_before == pytest.approx(before["evaluation_loss"])
    assert found.loss_after == pytest.approx(after["evaluation_loss"])
    assert found.loss_before != found.loss_after


def test_without_a_checkpoint_that_is_said(run: Path) -> None:
    with pytest.raises(BackupError, match="no checkpoint"):
        examine(run, run / "states")
