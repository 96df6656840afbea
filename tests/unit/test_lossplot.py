from __future__ import annotations

import io
import math

import pytest
from PIL import Image

from potluck.monitor.lossplot import COLOURS, HEIGHT, MARK, PAPER, WIDTH, Mark, plot_loss, ticks


def colours(png: bytes) -> set[str]:
    image = Image.open(io.BytesIO(png))
    assert (image.format, image.size) == ("PNG", (WIDTH, HEIGHT))
    return {"#{:02x}{:02x}{:02x}".format(*pixel[:3]) for pixel in image.convert("RGB").get_flattened_data()}


def test_a_curve_with_marks() -> None:
    png = plot_loss([(epoch, 5.5 / (1 + epoch)) for epoch in range(50)], [Mark(20, "Ada killed"), Mark(49, "end")])
    assert {PAPER, COLOURS[0], MARK} <= colours(png)


@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(0, 1.0), (1, 1.0)], [(0, math.nan), (1, math.inf), (2, 3.0)]])
def test_little_to_draw_is_drawn_all_the_same(points: list[tuple[float, float]]) -> None:
    assert PAPER in colours(plot_loss(points))


def test_ticks_are_round_and_few() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(1.9, 5.7) == [2, 3, 4, 5]
    assert ticks(3, 3) == [3]
    for low, high in ((0.001, 0.0042), (-3.0, 1000.0), (5.0, 5.1)):
        found = ticks(low, high)
        assert 2 <= len(found) <= 7
        assert low - 1e-9 <= found[0] < found[-1] <= high + 1e-9
