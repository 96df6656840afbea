"""Held-out losses: which leave the band, what is kept as the best, and what is rolled back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from potluck.messages import encode
from potluck.monitor.evaluating import Evaluations
from potluck.recipes.reference import RecipeRef
from potluck.sim.memoryhub import MemoryHub
from potluck.state.backupfile import BackupInfo
from potluck.state.backups import BackupConfig, Backups
from potluck.state.chunkpool import ChunkPool
from potluck.state.snapshot import stage
from potluck.training.books.history import Preview, RoundMember, RoundRecord, preview_key, round_key
from potluck.training.books.lossband import Evaluated, leaves_band, members_between, upper_edge
from potluck.training.manifest.manifest import Evaluation, Manifest

CONFIG = Evaluation(every_epochs=10, gate=True)
FALLING = [Evaluated(epoch, 4.0 - 0.01 * epoch) for epoch in range(0, 50, 10)]


@pytest.mark.parametrize(
    ("loss", "leaves"), [(3.5, False), (1.0, False), (3.9, False), (4.1, True), (math.nan, True), (math.inf, True)]
)
def test_what_rises_more_than_usual_leaves_the_band(loss: float, leaves: bool) -> None:
    assert leaves_band(FALLING, Evaluated(50, loss), CONFIG) is leaves


def test_nothing_is_judged_by_little() -> None:
    assert upper_edge(FALLING[:2], CONFIG) == math.inf
    assert not leaves_band(FALLING[:2], Evaluated(50, 99.0), CONFIG)


def test_those_who_gave_something_since_are_named() -> None:
    rounds = [
        RoundRecord(
            epoch=epoch,
            committed_at=0.0,
            seconds=1.0,
            members=(RoundMember(peer=name, name=name, weight=1.0), RoundMember(peer="aux", name="aux")),
        )
        for epoch, name in ((40, "Ada"), (41, "Bob"), (45, "Eve"), (51, "Zoe"))
    ]
    assert members_between(rounds, 40, 50) == ["Bob", "Eve"]


def save(backups: Backups, epoch: int) -> BackupInfo:
    snapshot = stage({"parameter/w": torch.full((4,), float(epoch))}, {}, ChunkPool()).hashed()
    try:
        return backups.save(snapshot, epoch=epoch, made_at=0)
    finally:
        snapshot.release()


async def test_the_best_is_kept_and_what_leaves_the_band_is_rolled_back(tmp_path: Path) -> None:
    hub = MemoryHub()
    connection: Any = hub.connect("host")
    history = connection.store("history")
    manifest = Manifest(run="bakery", recipe=RecipeRef(name="digits"), evaluation=CONFIG)
    ordered: list[tuple[int, str]] = []

    async def roll_back(info: BackupInfo, reason: str) -> None:
        ordered.append((info.epoch, reason))

    backups = Backups(tmp_path / "backups", BackupConfig(keep_last=1, most_bytes=1), run="bakery")
    evaluations = Evaluations(tmp_path, history, lambda: manifest, roll_back)
    member = RoundMember(peer="eve", name="Eve", weight=1.0)
    await history.put(round_key(45), encode(RoundRecord(epoch=45, committed_at=0.0, seconds=1.0, members=(member,))))
    for epoch, loss in ((10, 3.0), (20, 2.9), (30, 2.8), (40, 2.82), (50, 9.0)):
        info = save(backups, epoch)
        await evaluations.judge(Preview(epoch=epoch, at=0.0, text="", figures={"evaluation_loss": loss}), info)
    [(epoch, reason)] = ordered
    assert epoch == 40
    assert "9.0000 at epoch 50" in reason
    assert "Eve" in reason
    assert backups.epochs() == [50, 40], "the best is no longer among them, and what is gone back to is again"
    restored = Backups(tmp_path / "best", run="bakery").restore()
    assert restored is not None
    assert restored.info.epoch == 30
    assert restored.snapshot.tensors()["parameter/w"][0] == 30
    restored.snapshot.release()
    assert len(list((tmp_path / "best").iterdir())) == 2
    assert len(list((tmp_path / "last-good").iterdir())) == 2
    await connection.close()


async def test_a_host_that_starts_again_knows_the_best_and_the_band(tmp_path: Path) -> None:
    connection: Any = MemoryHub().connect("host")
    history = connection.store("history")
    manifest = Manifest(run="bakery", recipe=RecipeRef(name="digits"), evaluation=CONFIG)
    ordered: list[int] = []

    async def roll_back(info: BackupInfo, reason: str) -> None:
        ordered.append(info.epoch)

    backups = Backups(tmp_path / "backups", BackupConfig(keep_last=3), run="bakery")
    losses = {10: 3.0, 20: 2.9, 30: 2.8, 40: 9.0, 50: 2.82, 60: 2.85, 70: 9.0}
    for number, (epoch, loss) in enumerate(losses.items()):
        info = save(backups, epoch)
        preview = Preview(epoch=epoch, at=0.0, text="", figures={"evaluation_loss": loss})
        await history.put(preview_key(number), encode(preview))  # as the previewer does, before it is judged
        started_again = Evaluations(tmp_path, history, lambda: manifest, roll_back)
        await started_again.judge(preview, info)
    assert ordered == [30, 60]
    restored = Backups(tmp_path / "best", run="bakery").restore()
    assert restored is not None
    assert restored.info.epoch == 30
    restored.snapshot.release()
    await connection.close()
