"""What a run has learnt, to look at: its newest checkpoint on this disk, against the untrained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from potluck.errors import BackupError
from potluck.recipes.catalogue import open_recipe
from potluck.recipes.shipped import folder_files
from potluck.state.backups import Backups
from potluck.training.manifest.curriculum import data_at
from potluck.training.manifest.runfile import manifest_of, read_run_file
from potluck.training.trainer.models import load, preview, untrained

LOSS = "evaluation_loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultPreview:
    """What became of the model."""

    epoch: int
    checkpoint: Path
    loss_before: float
    loss_after: float
    text: str


def examine(folder: Path, states: Path) -> ResultPreview:
    """The run that `folder` describes, by the newest whole checkpoint in `states`; BackupError when there is none."""
    manifest = manifest_of(read_run_file(folder), folder)
    recipe = open_recipe(manifest.recipe, manifest.model, files=folder_files(folder))
    recipe.data = data_at(recipe, manifest, manifest.newest.from_epoch)
    model = untrained(recipe, manifest.seed).eval()
    with torch.no_grad():
        loss_before = recipe.evaluate(model)[LOSS]
    restored = Backups(states / "backups", run=manifest.run).restore()
    if restored is None:
        raise BackupError(f"there is no checkpoint in {states} that can be read")
    try:
        load(model, restored.snapshot.tensors())
    finally:
        restored.snapshot.release()
    text, figures = preview(recipe, model)
    return ResultPreview(
        epoch=restored.info.epoch,
        checkpoint=restored.info.tensors_path,
        loss_before=loss_before,
        loss_after=figures[LOSS],
        text=text,
    )
