"""What a notebook's cell shows (the rest is executed for real in tests/e2e)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from trainlab import PATIENCE_SECONDS, train_lab

from potluck import notebook
from potluck.errors import ConfigurationError, StoppedError
from potluck.notebook import MOST_POINTS, Picture, Screen, take_part
from potluck.optim.progress.tracker import RunProgress
from potluck.recipes.reference import RecipeRef
from potluck.run.joined import Joined
from potluck.testing.polling import poll_until_sync
from potluck.training.manifest.manifest import Manifest, Settings, SyncSettings
from potluck.training.trainer import trainer
from potluck.training.trainer.config import TrainConfig
from potluck.training.trainer.trainer import TrainProgress


def progress(epoch: int, *, paused: bool = False) -> TrainProgress:
    return TrainProgress(epoch, epoch, 1200 * epoch, 3.0, 12.0, paused, given=1000 * epoch)


def test_a_page_has_bar_figures_and_plot() -> None:
    picture = Picture("my-<run>")
    picture.add(progress(4))
    picture.ask = lambda: RunProgress(epoch=4, token=1, samples=30, target=256, num_trainers=3, samples_per_second=99.0)
    page = picture.html()
    assert '<progress max="256" value="30">' in page
    assert "epoch 4" in page
    assert "4,000 samples given" in page
    assert "3 training, 99.0 samples/s together" in page
    assert "data:image/png;base64," in page
    assert "my-&lt;run&gt;" in page
    assert "Stop the cell to leave" in page
    assert "Thank you" in picture.html("Thank you")


def test_before_anything_is_known_there_is_a_page_too() -> None:
    assert "<progress>" in Picture("run").html()


def test_a_pause_is_told() -> None:
    picture = Picture("run")
    picture.add(progress(1, paused=True))
    assert "paused" in picture.html()


def test_a_long_run_is_thinned_out() -> None:
    picture = Picture("run")
    for epoch in range(5 * MOST_POINTS):
        picture.add(progress(epoch))
    assert len(picture.points) <= MOST_POINTS
    assert picture.points[0][0] == 0
    assert picture.points[-1][0] == 5 * MOST_POINTS - 1


class Pages:
    """What a cell has shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def show(self, page: str) -> None:
        self.shown.append(page)


def stop_cell(monkeypatch: pytest.MonkeyPatch, is_time: Callable[[Picture], bool]) -> list[str]:
    """Train in a run in memory, and stop the cell when it is time; the pages that it has shown."""

    def watch(training: Future[TrainProgress], picture: Picture, _screen: Screen) -> None:
        poll_until_sync(lambda: is_time(picture) or training.done(), PATIENCE_SECONDS, "the time to stop")
        raise KeyboardInterrupt

    monkeypatch.setattr(notebook, "_watch", watch)
    manifest = Manifest(
        run="test",
        recipe=RecipeRef(name="digits"),
        settings=(Settings(training=SyncSettings(target_batch_size=1 << 30)),),
    )
    screen = Pages()
    with train_lab() as lab:
        lab.put_up(manifest)
        notebook.train_in_cell(lab.join("Ada"), TrainConfig(batch_size=4, num_threads=1), None, 60.0, screen)
    return screen.shown


def test_a_cell_that_is_stopped_hands_in_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, leaving, handing_in, thanks = stop_cell(monkeypatch, lambda picture: picture.progress is not None)
    assert "Loading the model" in loading
    assert "Leaving" in leaving
    assert "Handing in your last" in handing_in
    assert "up to epoch 1. Thank you!" in thanks


def test_a_cell_that_is_stopped_while_the_state_is_loaded_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(run: Joined, *_others: object, **_options: object) -> None:
        run.call_unless_leaving(asyncio.sleep(600.0))

    monkeypatch.setattr(trainer, "Trainer", load)
    with pytest.raises(StoppedError):
        stop_cell(monkeypatch, lambda _picture: True)


@pytest.mark.parametrize("link", ["", "potluck://…"])
def test_a_cell_without_a_link_says_what_to_do(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POTLUCK_LINK", raising=False)
    with pytest.raises(ConfigurationError, match="Paste its join link"):
        take_part(link)
