"""A short slice of each experiment: its files are right, and two peers in memory train its tiny profile for two epochs.

The whole profiles, with the real commands, are tests/e2e/test_experiment_profiles.py.
"""

from __future__ import annotations

import json
import math
import runpy
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from trainlab import together, train_lab

from potluck.recipes.catalogue import open_recipe, recipe_class
from potluck.recipes.huggingface.languagemodel import LanguageModel
from potluck.recipes.recipe import configured, data_of
from potluck.recipes.shipped import folder_files
from potluck.training.manifest.runfile import manifest_of, read_run_file
from potluck.training.trainer.config import TrainConfig
from potluck.training.trainer.models import preview, untrained
from potluck.training.trainer.trainer import Trainer

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
NAMES = sorted(path.parent.name for path in EXPERIMENTS.glob("*/run.toml"))


def test_all_are_there() -> None:
    assert NAMES == ["albert", "diloco-four-sites", "sahajbert", "swav", "trecover"]
    for name in NAMES:
        for file in ("README.md", "run.toml", "tiny.toml"):
            assert (EXPERIMENTS / name / file).is_file(), f"{name} has no {file}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("profile", ["run", "tiny"])
def test_its_files_fit_its_recipe(name: str, profile: str) -> None:
    """What the large profile says is checked as far as that goes without its data."""
    file = EXPERIMENTS / name / f"{profile}.toml"
    found = read_run_file(file)
    recipe = configured(recipe_class(found.recipe, file.parent), found.model)
    data_of(recipe, found.data)


@pytest.mark.parametrize("name", NAMES)
def test_two_peers_train_its_tiny_profile_for_two_epochs(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(EXPERIMENTS / name, tmp_path / name)
    if (folder / "make_data.py").exists():
        subprocess.run([sys.executable, folder / "make_data.py", folder], check=True)
    for texts in (folder / "texts").glob("*.jsonl"):
        texts.write_text("".join(texts.read_text().splitlines(keepends=True)[:400]))
    file = folder / "tiny.toml"
    text = file.read_text().replace("vocabulary = 2000", "vocabulary = 400")
    file.write_text(text.replace("inner_steps = 25", "inner_steps = 2").replace("min_peers = 4", "min_peers = 2"))
    found = read_run_file(file)
    if "tokenized = true" in text:
        recipe = configured(recipe_class(found.recipe, folder), found.model)
        assert isinstance(recipe, LanguageModel)
        recipe.files, recipe.data = folder_files(folder), data_of(recipe, found.data)
        recipe.tokenize(folder, lambda *_: None)
    manifest = manifest_of(found, folder)

    def opened():
        return open_recipe(manifest.recipe, manifest.model, folder / found.recipe, folder_files(folder))

    with train_lab() as lab:

        def train(number: int) -> tuple[int, float]:
            recipe = opened()
            recipe.is_light = True  # here, in a thread: processes that read are tried elsewhere
            config = TrainConfig(batch_size=8, num_threads=1)
            trainer = Trainer(runs[number], lambda: short, recipe, config)
            last = trainer.train(threading.Event())
            return last.epoch, last.loss

        settings = [each for each in manifest.settings if each.from_epoch == 0]
        first = msgspec.structs.replace(settings[0], end_epoch=2)
        short = msgspec.structs.replace(manifest, settings=(first,))
        runs = [lab.join(each) for each in ("Ada", "Bob")]
        ended = together(lambda: train(0), lambda: train(1))
    assert all(epoch >= 2 for epoch, _ in ended)
    assert any(math.isfinite(loss) for _, loss in ended)
    shown, figures = preview(opened_with_data(opened(), manifest), untrained(opened(), manifest.seed))
    assert shown
    assert figures
    assert all(math.isfinite(value) for value in figures.values())


def opened_with_data(recipe, manifest):
    recipe.data = data_of(recipe, manifest.settings[0].data)
    return recipe


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sahajBERT's tiny model as an export of a run that has not begun, and the labelled sentences beside it."""
    folder = shutil.copytree(EXPERIMENTS / "sahajbert", tmp_path_factory.mktemp("downstream") / "sahajbert")
    subprocess.run([sys.executable, folder / "make_data.py", folder], check=True)
    for texts in (folder / "texts").glob("*.jsonl"):
        texts.write_text("".join(texts.read_text().splitlines(keepends=True)[:400]))
    found = read_run_file(folder / "tiny.toml")
    manifest = manifest_of(found, folder)
    opened = open_recipe(manifest.recipe, manifest.model, folder / found.recipe, folder_files(folder))
    recipe = opened_with_data(opened, manifest)
    assert isinstance(recipe, LanguageModel)
    recipe.export(recipe.model(), folder / "model")
    return folder


@pytest.mark.parametrize(("task", "chance"), [("ner", 0.4), ("ncc", 0.3)])
def test_a_checkpoint_is_tried_on_both_downstream_tasks(
    task: str,
    chance: float,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On our labelled sentences: what is learned is better than the commonest answer."""
    words = [str(checkpoint / "model"), "--task", task, "--tiny"]
    monkeypatch.setattr(sys, "argv", ["downstream.py", *words])
    runpy.run_path(str(checkpoint / "downstream.py"), run_name="__main__")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["task"] == task
    assert found["right"] > chance + 0.2, found


@pytest.fixture(scope="module")
def swav():
    found = read_run_file(EXPERIMENTS / "swav" / "tiny.toml")
    return configured(recipe_class(found.recipe, EXPERIMENTS / "swav"), found.model)


def module_of(recipe):
    return sys.modules[type(recipe).__module__]


def test_sinkhorn_is_the_doubly_normalised_matrix(swav) -> None:
    """Against the loop that it stands for, in double precision; and both sums are right in the end."""
    scores = torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = module_of(swav).sinkhorn(scores, 0.5, 50)
    slow = (scores / 0.5).exp()
    for _ in range(50):
        for column in range(5):
            slow[:, column] /= slow[:, column].sum() * 5
        for row in range(12):
            slow[row] /= slow[row].sum() * 12
    assert torch.allclose(found, slow * 12, atol=1e-9)
    assert torch.allclose(found.sum(1), torch.ones(12, dtype=torch.float64))
    assert torch.allclose(found.sum(0), torch.full((5,), 12 / 5, dtype=torch.float64), atol=1e-6)


def test_the_queue_starts_with_the_runs_epoch_also_for_newcomers(swav) -> None:
    """Off, it keeps nothing; on, it is used once it is full, and no sooner; a newcomer starts empty at that epoch."""
    queue = module_of(swav).Queue(4, 2)
    ones = torch.ones(2, 2)
    assert len(queue.exchange(0, ones, is_on=False)) == 0
    assert [len(queue.exchange(0, ones * n, is_on=True)) for n in range(4)] == [0, 0, 4, 4]
    assert queue.exchange(0, ones, is_on=True)[:2].tolist() == [[3.0, 3.0]] * 2, "the newest come first"
    assert len(queue.exchange(1, ones, is_on=True)) == 0, "each of the two crops has its own"
    manifest = manifest_of(read_run_file(EXPERIMENTS / "swav" / "tiny.toml"), EXPERIMENTS / "swav")
    assert [manifest.at(epoch).data["queue"] for epoch in (0, 39, 40, 1000)] == [False, False, True, True]


def test_larc_without_clipping_steps_by_the_tensors_length() -> None:
    """As SwAV has it: lr · trust · |p| / (|g| + λ|p|), whatever lr is; against the formula."""
    from potluck.training.trainer.larc import Larc

    parameter = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    parameter.grad = torch.tensor([0.6, 0.8])
    Larc([parameter], lr=2.4, momentum=0.0, weight_decay=0.1, trust=0.001, clips=False).step()
    local = 0.001 * 5.0 / (1.0 + 0.1 * 5.0)
    expected = torch.tensor([3.0, 4.0]) - 2.4 * local * (torch.tensor([0.6, 0.8]) + 0.1 * torch.tensor([3.0, 4.0]))
    assert torch.allclose(parameter.detach(), expected)


def test_columns_hold_the_right_letter_and_as_many_others_as_asked() -> None:
    found = read_run_file(EXPERIMENTS / "trecover" / "tiny.toml")
    recipe = configured(recipe_class(found.recipe, EXPERIMENTS / "trecover"), found.model)
    letters = torch.arange(26, dtype=torch.uint8)
    noise = torch.arange(26)
    columns = module_of(recipe).columns_around(letters, noise, torch.Generator().manual_seed(0))
    for place, column in enumerate(columns.tolist()):
        assert column >> place & 1
        assert column.bit_count() == place + 1
