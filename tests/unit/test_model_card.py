"""The model card beside an export: what the model is, its figures, and who contributed."""

from __future__ import annotations

from pathlib import Path

import torch

from potluck.recipes.reference import RecipeRef
from potluck.state.backups import Backups
from potluck.state.chunkpool import ChunkPool
from potluck.state.snapshot import stage
from potluck.training.books.contributions import ContributionBook, Given
from potluck.training.manifest.manifest import DiLoCoSettings, Manifest, Settings
from potluck.training.trainer.exporting import model_card, write_contributors


def test_a_card_has_the_figures_the_settings_and_the_contributors(tmp_path: Path) -> None:
    snapshot = stage({"parameter/w": torch.zeros(4)}, {}, ChunkPool()).hashed()
    info = Backups(tmp_path / "backups", run="bakery").save(snapshot, epoch=40, made_at=0)
    snapshot.release()
    settings = Settings(training=DiLoCoSettings(inner_steps=10))
    manifest = Manifest(
        run="bakery", recipe=RecipeRef(name="hf-causal-lm"), model={"architecture": "llama"}, settings=(settings,)
    )
    assert "Contributors" not in model_card(manifest, info, {}), "nobody is known yet"

    peers = {
        "A" * 56: Given(name="Ada", epochs=40, samples=3000.0, last_epoch=40),
        "B" * 56: Given(name="", epochs=2, samples=12.0, last_epoch=3),
        "C" * 56: Given(name="<b> # [free](http://x)", epochs=1, samples=1.0, last_epoch=3),
    }
    write_contributors(tmp_path, ContributionBook(epoch=40, peers=peers))
    card = model_card(manifest, info, {"parameters": 26_000_000, "evaluation_loss": 3.21})
    assert card.startswith("---\nlibrary_name: transformers\n")
    for row in ("epoch | 40", "recipe | hf-causal-lm", "algorithm | diloco", "parameters | 26000000", "loss | 3.21"):
        assert row in card
    assert '"architecture": "llama"' in card
    told = card.split("## Contributors\n\n")[1].split("\n\n")[0].splitlines()
    assert told[:2] == ["- Ada: 3,000 samples", "- BBBBBBBBBBBB: 12 samples"]
    assert told[2:] == [r"- \<b\> \# \[free\](http\://x): 1 samples"], "a name is no markdown"
