"""Plots as PNGs, for the demos and for notebooks: one curve or a few, and marks where something happened.

Drawn with Pillow, which is a fraction of what a plotting library weighs and imports in a tenth of a second.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 960, 480
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 44, 48
SCALE = 2  # drawn so much larger and then shrunk: smooth lines
TEXT_PIXELS = 15
MOST_TICKS = 6

PAPER, INK, GREY, GRID, MARK = "#ffffff", "#20242c", "#6b7280", "#e5e7eb", "#dc2626"
COLOURS = ("#2563eb", "#d97706", "#15803d", "#9333ea", "#0e7490", "#4b5563")


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Where a value is."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def plot_loss(
    points: Sequence[tuple[float, float]], marks: Sequence[Mark] = (), *, title: str = "loss", x_label: str = "epoch"
) -> bytes:
    """The curve through these points, as a PNG; points that are not finite are left out."""
    return plot_curves({"": points}, marks, title=title, x_label=x_label)


def plot_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], marks: Sequence[Mark] = (), *, title: str, x_label: str
) -> bytes:
    """The same for several curves, each with its name."""
    usable = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)] for name, points in curves.items()
    }
    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), PAPER)
    draw = ImageDraw.Draw(image)
    x_axis, y_axis = _axes([point for points in usable.values() for point in points], marks)
    _draw_grid(draw, x_axis, y_axis)
    _text(draw, LEFT, 12, title, INK)
    _text(draw, WIDTH - RIGHT, HEIGHT - 22, x_label, GREY, anchor="ra")
    for number, mark in enumerate(marks):
        _draw_mark(draw, x_axis.at(mark.x), mark.label, row=number % 3)
    legend_x = float(LEFT)
    for (name, points), colour in zip(usable.items(), itertools.cycle(COLOURS)):
        line = [(x_axis.at(x) * SCALE, y_axis.at(y) * SCALE) for x, y in points]
        if len(line) > 1:
            draw.line(line, fill=colour, width=2 * SCALE, joint="curve")
        for x, y in line[-1:]:
            draw.ellipse((x - 4 * SCALE, y - 4 * SCALE, x + 4 * SCALE, y + 4 * SCALE), fill=colour)
        _text(draw, legend_x, HEIGHT - 22, name, colour)
        legend_x += 18 + 9 * len(name)
    return _as_png(image)


def ticks(low: float, high: float, most: int = MOST_TICKS) -> list[float]:
    """Round values between two others, at most so many and at least two apart (pure)."""
    span = high - low
    if span <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _axes(points: Sequence[tuple[float, float]], marks: Sequence[Mark]) -> tuple[Axis, Axis]:
    xs = [x for x, _ in points] + [mark.x for mark in marks]
    ys = [y for _, y in points]
    low_x, high_x = (min(xs), max(xs)) if xs else (0.0, 1.0)
    low_y, high_y = (min(ys), max(ys)) if ys else (0.0, 1.0)
    room = (high_y - low_y) * 0.08 or 0.5
    return (
        Axis(low_x, high_x if high_x > low_x else low_x + 1.0, LEFT, WIDTH - RIGHT),
        Axis(low_y - room, high_y + room, HEIGHT - BOTTOM, TOP),
    )


def _draw_grid(draw: ImageDraw.ImageDraw, x_axis: Axis, y_axis: Axis) -> None:
    for value in ticks(y_axis.low, y_axis.high):
        y = y_axis.at(value)
        _line(draw, LEFT, y, WIDTH - RIGHT, y, GRID)
        _text(draw, LEFT - 8, y, f"{value:.3g}", GREY, anchor="rm")
    for value in ticks(x_axis.low, x_axis.high):
        _text(draw, x_axis.at(value), HEIGHT - BOTTOM + 8, f"{value:.6g}", GREY, anchor="ma")


def _draw_mark(draw: ImageDraw.ImageDraw, x: float, label: str, row: int = 0) -> None:
    _line(draw, x, TOP, x, HEIGHT - BOTTOM, MARK)
    beyond = x + 6 + 7.5 * len(label) > WIDTH - RIGHT
    _text(draw, x - 6 if beyond else x + 6, TOP + 4 + 18 * row, label, MARK, anchor="ra" if beyond else "la")


def _line(draw: ImageDraw.ImageDraw, x0: float, y0: float, x1: float, y1: float, colour: str) -> None:
    draw.line((x0 * SCALE, y0 * SCALE, x1 * SCALE, y1 * SCALE), fill=colour, width=SCALE)


def _text(draw: ImageDraw.ImageDraw, x: float, y: float, text: str, colour: str, anchor: str = "la") -> None:
    font = ImageFont.load_default(TEXT_PIXELS * SCALE)
    draw.text((x * SCALE, y * SCALE), text, fill=colour, font=font, anchor=anchor)


def _as_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
