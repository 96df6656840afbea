"""The run's figures elsewhere: TensorBoard for real, Weights & Biases by a module that stands in for it."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from potluck.errors import ConfigurationError
from potluck.monitor.exporters import figures_of, open_exporters
from potluck.monitor.view import Overview


def overview(epoch: int, loss: float | None = 1.0) -> Overview:
    return Overview(
        run="bakery", epoch=epoch, samples=1, target=10, samples_per_second=5.0, loss=loss, seconds_per_epoch=None,
        due_in_seconds=None, num_trainers=2, num_peers=3, bytes_per_epoch=10, coordinator="host",
    )  # fmt: skip


def test_only_what_is_known_is_told() -> None:
    assert set(figures_of(overview(1))) == {"loss", "samples_per_second", "trainers", "peers", "epoch_bytes"}
    assert "loss" not in figures_of(overview(1, float("nan")))


def test_each_epoch_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, float]] = []

    class Run:
        def log(self, figures: dict[str, float], step: int) -> None:
            told.append((step, figures["loss"]))

        def finish(self) -> None:
            told.append((-1, 0.0))

    module = types.ModuleType("wandb")
    asked: dict[str, Any] = {}
    module.init = lambda **options: asked.update(options) or Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    exporters = open_exporters("bakery", wandb_project="bread")
    for epoch, loss in ((1, 3.0), (1, 2.5), (2, None), (2, 2.0), (3, 1.0)):
        exporters.epoch_seen(overview(epoch, loss))
    exporters.close()
    assert told == [(1, 3.0), (2, 2.0), (3, 1.0), (-1, 0.0)]
    assert (asked["project"], asked["name"]) == ("bread", "bakery")


def test_a_package_that_is_missing_is_the_users_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match="pip install wandb"):
        open_exporters("bakery", wandb_project="bread")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigurationError, match="pip install tensorboard"):
        open_exporters("bakery", tensorboard_folder=tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_we_write(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    exporters = open_exporters("bakery", tensorboard_folder=tmp_path)
    for epoch, loss in ((1, 3.0), (2, 2.0)):
        exporters.epoch_seen(overview(epoch, loss))
    exporters.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("run/loss")] == [(1, 3.0), (2, 2.0)]
