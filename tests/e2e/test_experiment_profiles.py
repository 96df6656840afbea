"""The tiny profiles of all experiments from their first epoch to their last, with the real commands.

scripts/test tests/e2e/test_experiment_profiles.py -m soak
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commandline import Terminal, until_event
from organiser import ONE_THREAD, end, until_epoch

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

import tiny  # noqa: E402 - it lies with the experiments


@pytest.mark.timeout(400)
def test_the_first_seeds_guide_line_by_line(terminal: Terminal) -> None:
    """Keyless reading: host, a trainer and an aux peer with the guide's own options, and the recovered text."""
    folder = terminal.folder / "trecover"
    folder.mkdir()
    for name in ("recipe.py", "tiny.toml"):
        text = (EXPERIMENTS / "trecover" / name).read_text()
        (folder / name).write_text(text.replace("target_batch_size = 128", "target_batch_size = 16"))
    assert "needs no data" in terminal.run("download", "data", folder / "recipe.py")
    where = ("--folder", terminal.folder / "hub", "--listen", "127.0.0.1", "--no-dashboard", "--json")
    host = terminal.start("host", folder / "tiny.toml", *where, **ONE_THREAD)
    link = until_event(host, "ready")["link"]
    key = ("--identity-path", terminal.folder / "ada.nkey", "--yes", "--json")
    options = ("--sync-args", "--batch-size", "1", "--n-workers", "2", "--backup-every-step", "1")
    trainer = terminal.start("collab", "train", link, *options, *key, name="train", **ONE_THREAD)
    helper = terminal.start(
        *("aux", link, "--sync-args", "--verbose", "--as-active-peer", "--backup-every-step", "1"),
        *("--identity-path", terminal.folder / "bob.nkey", "--json"),
        **ONE_THREAD,
    )
    until_event(helper, "joined")
    until_epoch(trainer, 2)
    shown = terminal.ask("visualize", link, "--once", **ONE_THREAD)
    assert {"columns:", "read:", "text:"} <= set(shown["text"].splitlines())
    assert 0.2 < shown["letters_right"] <= 1.0
    assert terminal.ask("monitor", link, "--once")["epoch"] >= 2
    refused = terminal.refuse("train", link, "--lr", "1e-3", code=2)
    assert "learning_rate under [optimizer]" in refused
    for process in (trainer, helper, host):
        end(process)


def learned(name: str, tmp_path: Path) -> list[dict]:
    found = tiny.run(name, scratch=tmp_path, seconds=1500.0)
    assert len(found["samples"]) >= 2
    assert all(share > 0 for share in found["samples"].values()), "every peer has given something"
    return found["evaluations"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "figure", "at_least", "rises_by"),
    [
        ("trecover", "letters_right", 0.65, 0.2),  # a third by chance
        ("swav", "knn_right", 0.125 + 0.2, 0.08),  # an eighth by chance
    ],
)
def test_a_figure_rises_with_training(name: str, figure: str, at_least: float, rises_by: float, tmp_path: Path) -> None:
    seen = learned(name, tmp_path)
    assert seen[-1][figure] >= at_least
    assert seen[-1][figure] - seen[0][figure] >= rises_by


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["albert", "sahajbert"])
def test_masked_tokens_are_guessed_better(name: str, tmp_path: Path) -> None:
    seen = learned(name, tmp_path)
    assert seen[-1]["masked_loss"] < seen[0]["masked_loss"] - 1.0


@pytest.mark.soak
@pytest.mark.lab
@pytest.mark.usefixtures("needs_lab")
@pytest.mark.timeout(1800)
def test_four_sites_on_shaped_lines(tmp_path: Path) -> None:
    seen = learned("diloco-four-sites", tmp_path)
    assert seen[-1]["evaluation_loss"] < seen[0]["evaluation_loss"]
