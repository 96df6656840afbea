"""What the model says, read from a host's backups and told to all dashboards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from potluck.clock import SystemClock
from potluck.errors import ConfigurationError
from potluck.hub.connection import Store
from potluck.monitor import previews
from potluck.monitor.follower import RunFollower
from potluck.monitor.past import Past
from potluck.monitor.previews import Previewer
from potluck.optim.parameters import PARAMETER, prefixed
from potluck.peer.identity import Identity
from potluck.recipes.catalogue import open_recipe
from potluck.recipes.reference import RecipeRef
from potluck.sim.memoryrun import MemoryRun
from potluck.state.backups import Backups
from potluck.state.chunkpool import ChunkPool
from potluck.state.snapshot import stage
from potluck.testing.polling import poll_until
from potluck.training.books.history import KEPT_PREVIEWS, Preview, preview_key
from potluck.training.manifest.manifest import Manifest

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


async def in_run(run: MemoryRun) -> tuple[Store, RunFollower]:
    """The history as the host writes it, and somebody elsewhere who follows."""
    await run.open()
    host = await run.join("host", identity=Identity.temporary(), coordinates=True, role="aux")
    visitor = await run.join("visitor", identity=Identity.temporary(), role="observer")
    return host.session.hub.store("history"), await RunFollower.start(visitor.session)


async def test_each_backup_is_read_once_and_everybody_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(previews, "EVERY_SECONDS", 0.01)
    run = MemoryRun(clock=SystemClock())
    history, follower = await in_run(run)
    save(tmp_path, 10)
    previewer = Previewer(tmp_path, lambda: DIGITS, history)
    previewer.start()
    await poll_until(lambda: len(follower.past.previews()) == 1, 60, lambda: previewer.problem or "a preview")
    save(tmp_path, 20)
    await poll_until(lambda: len(follower.past.previews()) == 2, 60, lambda: previewer.problem or "another")
    await previewer.close()
    said = follower.past.previews()[-1]
    assert (said.epoch, previewer.counts["made"]) == (20, 2)
    assert said.text.endswith("seen  " + " ".join("7" * 20))
    assert 0.0 < said.figures["accuracy"] < 0.3
    again = Previewer(tmp_path, lambda: DIGITS, history)  # after a restart
    again.start()
    save(tmp_path, 30)
    await poll_until(lambda: len(follower.past.previews()) == 3, 60, lambda: again.problem or "the next")
    await again.close()
    assert again.counts["made"] == 1
    assert [entry.key for entry in await history.entries("preview.")] == ["preview.0", "preview.1", "preview.2"]
    await follower.close()
    await run.close()


async def test_what_stands_in_the_way_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previews, "EVERY_SECONDS", 0.01)
    run = MemoryRun(clock=SystemClock())
    history, follower = await in_run(run)
    save(tmp_path, 10)
    own = Manifest(run="bakery", recipe=RecipeRef(name="mine.py", digest="0" * 64))
    previewer = Previewer(tmp_path, lambda: own, history)
    previewer.start()
    await poll_until(lambda: "--recipe" in previewer.problem, 60, lambda: previewer.problem)
    await previewer.close()
    assert not follower.past.previews()
    await follower.close()
    await run.close()


async def test_a_recipe_that_fails_is_asked_again_at_the_next_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(previews, "EVERY_SECONDS", 0.01)
    asked: list[int] = []
    speak = previews.preview

    def fail_at_first(*arguments: Any) -> tuple[str, dict[str, float]]:
        asked.append(len(asked))
        if len(asked) == 1:
            raise RuntimeError("lost for words")
        return speak(*arguments)

    monkeypatch.setattr(previews, "preview", fail_at_first)
    run = MemoryRun(clock=SystemClock())
    history, follower = await in_run(run)
    save(tmp_path, 10)
    looks: list[None] = []
    previewer = Previewer(tmp_path, lambda: looks.append(None) or DIGITS, history)
    previewer.start()
    await poll_until(lambda: "lost for words" in previewer.problem, 60, lambda: previewer.problem)
    seen = len(looks)
    await poll_until(lambda: len(looks) >= seen + 3, 60, "more looks")
    assert (previewer.counts["errors"], len(asked)) == (1, 1)
    save(tmp_path, 20)
    await poll_until(lambda: len(follower.past.previews()) == 1, 60, lambda: previewer.problem)
    await previewer.close()
    assert (follower.past.previews()[0].epoch, previewer.problem) == (20, "")
    await follower.close()
    await run.close()


async def test_what_is_no_preview_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previews, "EVERY_SECONDS", 0.01)
    run = MemoryRun(clock=SystemClock())
    history, follower = await in_run(run)
    await history.put("preview.7", b"scribble")
    await poll_until(lambda: follower.counts["bad_previews"] == 1, 60, "what cannot be read")
    save(tmp_path, 10)
    previewer = Previewer(tmp_path, lambda: DIGITS, history)
    previewer.start()
    await poll_until(lambda: len(follower.past.previews()) == 1, 60, lambda: previewer.problem or "a preview")
    await previewer.close()
    await follower.close()
    await run.close()


def test_only_the_newest_previews_are_kept() -> None:
    past = Past()
    for epoch in range(KEPT_PREVIEWS + 3):
        past.put_preview(Preview(epoch=epoch, at=1.0, text="hello"))
    assert [each.epoch for each in past.previews()] == list(range(3, KEPT_PREVIEWS + 3))
    assert preview_key(KEPT_PREVIEWS) == preview_key(0)


def test_the_dashboard_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from potluck.cli import dashboard

    assert dashboard.is_installed()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nicegui" else found(name))
    with pytest.raises(ConfigurationError, match=r"pip install 'potluck-train\[dashboard\]'"):
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
