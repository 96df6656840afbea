"""A state as a folder that other programs load: what the recipe writes of its model, and a model card.

The host leaves the run's newest manifest beside its states, so that this needs no hub.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import torch

import potluck
from potluck.errors import ConfigurationError, ProtocolError
from potluck.plaintext import clean
from potluck.recipes.catalogue import open_recipe
from potluck.run.hostrecord import read_record
from potluck.state.backupfile import BackupInfo
from potluck.state.backups import Backups
from potluck.training.books.contributions import ContributionBook
from potluck.training.manifest import noticeboard
from potluck.training.manifest.curriculum import data_at
from potluck.training.manifest.manifest import Manifest
from potluck.training.manifest.requirements import KEPT_FILE
from potluck.training.trainer.models import load, untrained

MOST_NAMED = 50
_MARKDOWN = re.compile(r"[\\`*_\[\]<>#|~&:@]")
CONTRIBUTORS_FILE = "contributors.json"


def kept_manifest(folder: Path) -> Manifest:
    """The manifest that a host left in its folder; ConfigurationError where there is none."""
    record = read_record(folder)
    try:
        if record is None:
            raise FileNotFoundError(folder / KEPT_FILE)
        manifest, _organiser = noticeboard.read((folder / KEPT_FILE).read_bytes(), record.run)
    except (OSError, ProtocolError) as error:
        raise ConfigurationError(
            f"{folder} does not say what the run trains ({error}): a model can be written where its host has run"
        ) from error
    return manifest


def export_folder(target: Path, backups: Backups, info: BackupInfo, manifest: Manifest) -> dict[str, Any]:
    """Write the state as its recipe's library reads it, with a model card; returns the card's figures."""
    recipe = open_recipe(manifest.recipe, manifest.model, files=manifest.files)
    recipe.data = data_at(recipe, manifest, info.epoch)
    model = untrained(recipe, manifest.seed)
    snapshot = backups.read(info)
    try:
        load(model, snapshot.tensors())
    finally:
        snapshot.release()
    model.eval()
    target.mkdir(parents=True, exist_ok=True)
    recipe.export(model, target)
    figures: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    with torch.no_grad(), contextlib.suppress(ConfigurationError):  # its data may not be here
        figures |= {name: round(value, 4) for name, value in recipe.evaluate(model).items()}
    (target / "README.md").write_text(model_card(manifest, info, figures), encoding="utf-8")
    return figures


def model_card(manifest: Manifest, info: BackupInfo, figures: dict[str, Any]) -> str:
    """What the model is, what it is worth, and how it came to be."""
    settings = manifest.at(info.epoch)
    training = type(settings.training).__struct_config__.tag
    rows = "\n".join(f"| {name.replace('_', ' ')} | {value} |" for name, value in figures.items())
    contributors = _contributors(info)
    return f"""---
library_name: transformers
tags: [potluck]
---
# {manifest.run}

Trained together by volunteers with [Potluck](https://pypi.org/project/potluck-train/) {potluck.__version__}.

| | |
|---|---|
| epoch | {info.epoch} |
| recipe | {manifest.recipe.name} |
| algorithm | {training} |
| optimizer | {settings.optimizer.name}, learning rate {settings.optimizer.learning_rate:g} |
{rows}

{contributors}
## What was asked for

```json
{json.dumps({"model": manifest.model, "data": settings.data}, indent=2)}
```
"""


def write_contributors(states: Path, book: ContributionBook) -> None:
    """Leave who has given how much beside the states, for model cards."""
    rows = [(given.name or peer[:12], given.samples) for peer, given in book.ranked()[:MOST_NAMED]]
    part = states / f"{CONTRIBUTORS_FILE}.part"
    part.write_text(json.dumps(rows), encoding="utf-8")
    part.replace(states / CONTRIBUTORS_FILE)


def _contributors(info: BackupInfo) -> str:
    """Names in the contributions that the host has written beside its states."""
    path = info.tensors_path.parent.parent / CONTRIBUTORS_FILE
    try:
        names = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return ""
    told = "\n".join(f"- {_as_text(name)}: {samples:,.0f} samples" for name, samples in names[:MOST_NAMED])
    return f"## Contributors\n\n{told}\n"


def _as_text(name: str) -> str:
    """As somebody called themselves, on a page that will be published: no markup, and no link."""
    return _MARKDOWN.sub(r"\\\g<0>", clean(name))
