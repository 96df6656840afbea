"""What a volunteer is told about a slow line."""

from __future__ import annotations

import pytest
from torch import nn

from potluck.errors import ConfigurationError
from potluck.training.manifest.manifest import (
    DiLoCoSettings,
    ExchangeSettings,
    Manifest,
    Patience,
    RecipeRef,
    Settings,
    SyncSettings,
)
from potluck.training.trainer.lineadvice import line_advice, round_bytes
from potluck.training.trainer.optimizers import gathering, options_of


def manifest(training: SyncSettings | DiLoCoSettings, **options: object) -> Manifest:
    return Manifest(run="r", recipe=RecipeRef(name="digits"), settings=(Settings(training=training),), **options)  # type: ignore[arg-type]


def test_the_values_of_a_round_as_they_travel() -> None:
    model = nn.Linear(999, 1000)
    assert round_bytes(model, manifest(SyncSettings())) == 2_000_000
    assert round_bytes(model, manifest(SyncSettings(), exchange=ExchangeSettings(codec="float32"))) == 4_000_000


def test_a_slow_line_is_named_with_what_would_help() -> None:
    told = line_advice(20_000_000, 250_000.0, 1e6, manifest(SyncSettings()))
    assert "0.25 MB/s; a round takes about 80 s" in told
    assert "DiLoCo" in told
    assert "overlap_steps" in line_advice(20_000_000, 1e6, 250_000.0, manifest(DiLoCoSettings()))
    assert "train on meanwhile" in line_advice(20_000_000, 1e6, 250_000.0, manifest(DiLoCoSettings(overlap_steps=10)))


@pytest.mark.parametrize("speeds", [(None, None), (1e8, 1e8), (None, 2e6)])
def test_a_line_that_is_fast_or_not_known_is_not_spoken_of(speeds: tuple[float | None, float | None]) -> None:
    assert not line_advice(20_000_000, *speeds, manifest(SyncSettings()))


def test_patience_of_the_run_is_that_of_its_peers() -> None:
    patient = manifest(SyncSettings(), patience=Patience(round_seconds=7.0, load_seconds=8.0, most_round_minutes=0.1))
    assert options_of(patient)["averaging_timeout_seconds"] == 7.0
    assert options_of(patient)["load_state_timeout_seconds"] == 8.0
    assert "averaging_timeout_seconds" not in options_of(manifest(DiLoCoSettings())), "each algorithm has its own"
    assert (gathering(patient).least_round_seconds, gathering(patient).most_round_seconds) == (6.0, 6.0)
    assert gathering(manifest(SyncSettings(), patience=Patience(slowest_line=2048.0))).least_bytes_per_second == 2048.0
    with pytest.raises(ConfigurationError):
        gathering(manifest(SyncSettings(), patience=Patience(most_round_minutes=-1.0)))
