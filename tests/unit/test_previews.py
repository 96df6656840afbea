"""What the model says, read from a host's backups."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from potluck.errors import ConfigurationError
from potluck.monitor import previews
from potluck.monitor.previews import Previewer
from potluck.optim.parameters import PARAMETER, prefixed
from potluck.peer.identity import Identity
from potluck.recipes.catalogue import RecipeRef, open_recipe
from potluck.state.backups import Backups
from potluck.state.chunkpool import ChunkPool
from potluck.state.snapshot import stage
from potluck.testing.polling import poll_until
from potluck.training.manifest import Manifest

DIGITS = Manifest(run="bakery", recipe=RecipeRef(name="digits"))


def save(folder: Path, epoch: int) -> torch.nn.Module:
    """A backup of a model whose first layer says nothing and whose last always sees a 7."""
    model = open_recipe(DIGITS.recipe, {}).model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        list(model.parameters())[-1][7] = 1.0
    tensors = prefixed(PARAMETER, {name: parameter.detach() for name, parameter in model.named_parameters()})
    snapshot = stage(tensors, {}, ChunkPool()).hashed()
    Backups(folder / "states" / "backups", run="bakery").save(snapshot, epoch=epoch)
    snapshot.release()
    return model


async def test_each_backup_is_read_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previews, "EVERY_SECONDS", 0.01)
    save(tmp_path, 10)
    previewer = Previewer(tmp_path, lambda: DIGITS)
    previewer.start()
    await poll_until(lambda: len(previewer.previews) == 1, 60, lambda: previewer.problem or "a preview")
    save(tmp_path, 20)
    await poll_until(lambda: len(previewer.previews) == 2, 60, lambda: previewer.problem or "another")
    await previewer.close()
    said = previewer.previews[1]
    assert (said.epoch, previewer.counts["made"]) == (20, 2)
    assert said.text.endswith("seen  " + " ".join("7" * 20))
    assert 0.0 < said.figures["accuracy"] < 0.3
    again = Previewer(tmp_path, lambda: None)
    again.start()
    assert list(again.previews) == list(previewer.previews)
    await again.close()


async def test_what_stands_in_the_way_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previews, "EVERY_SECONDS", 0.01)
    save(tmp_path, 10)
    own = Manifest(run="bakery", recipe=RecipeRef(name="mine.py", digest="0" * 64))
    previewer = Previewer(tmp_path, lambda: own)
    previewer.start()
    await poll_until(lambda: "--recipe" in previewer.problem, 60, lambda: previewer.problem)
    await previewer.close()
    assert not previewer.previews


def test_a_line_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / previews.PREVIEW_FILE).write_text('scribble\n{"epoch":3,"at":1.0,"text":"hello"}\n')
    previewer = Previewer(tmp_path, lambda: None)
    previewer.read()
    assert [each.epoch for each in previewer.previews] == [3]


def test_the_dashboard_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from potluck.cli import dashboard

    assert dashboard.is_installed()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nicegui" else found(name))
    with pytest.raises(ConfigurationError, match=r"pip install 'potluck\[dashboard\]'"):
        dashboard.check_installed()


async def test_a_dashboard_waits_for_the_end_of_the_one_before(tmp_path: Path) -> None:
    from potluck.cli.dashboard import open_identity

    path = tmp_path / "dashboard.nkey"
    before = Identity.open(path)
    with pytest.raises(ConfigurationError, match="another peer"):
        await open_identity(path, 0.0)
    asyncio.get_running_loop().call_later(0.05, before.close)
    after = await open_identity(path, 60.0)
    assert after.peer_id == before.peer_id
    after.close()
