"""What a notebook's cell shows (the rest is executed for real in tests/e2e)."""

from __future__ import annotations

import pytest

from potluck.errors import ConfigurationError
from potluck.notebook import MOST_POINTS, Picture, take_part
from potluck.optim.progress.tracker import RunProgress
from potluck.training.trainer import TrainProgress


def progress(epoch: int, *, paused: bool = False) -> TrainProgress:
    return TrainProgress(epoch, epoch, 1000 * epoch, 3.0, 12.0, paused)


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


@pytest.mark.parametrize("link", ["", "potluck://…"])
def test_a_cell_without_a_link_says_what_to_do(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POTLUCK_LINK", raising=False)
    with pytest.raises(ConfigurationError, match="Paste its join link"):
        take_part(link)
