"""The small things that pages are made of. Text goes into labels, so it is always shown as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nicegui import ui

from potluck.monitor.dashboard.charts import Options
from potluck.monitor.figures import NOTHING


def box(classes: str = "", tag: str = "div") -> ui.element:
    """A plain element to put others in."""
    return ui.element(tag).classes(classes)


def words(text: str = "", classes: str = "") -> ui.label:
    """Text."""
    return ui.label(text).classes(classes)


@contextmanager
def card(title: str = "", note: str = "", classes: str = "") -> Iterator[ui.element]:
    """A sheet with a title."""
    with box(f"card {classes}", "section") as sheet:
        if title:
            with box("card-head"):
                words(title, "card-title")
                if note:
                    words(note, "card-note")
        yield sheet


class Figure:
    """A large number with its name above and a remark below."""

    def __init__(self, name: str, classes: str = "") -> None:
        with box(f"card figure {classes}") as self.sheet:
            words(name, "figure-name")
            self._value = words(NOTHING, "figure-value")
            self._note = words("", "figure-note")

    def show(self, value: str, note: str = "") -> None:
        """What it is now."""
        self._value.text = value
        self._note.text = note


class Meter:
    """A bar that fills up."""

    def __init__(self, classes: str = "") -> None:
        with box(f"meter {classes}"):
            self._fill = box("meter-fill")

    def show(self, share: float) -> None:
        """From 0 to 1."""
        self._fill.style(replace=f"width: {100 * min(max(share, 0.0), 1.0):.1f}%")


class Bars:
    """A list of names with a bar and a figure each; rows are changed in place."""

    def __init__(self, empty: str = "") -> None:
        self._box = box("bars")
        self._rows: list[tuple[ui.element, ui.label, Meter, ui.label]] = []
        with self._box:
            self._empty = words(empty, "quiet")

    def show(self, rows: Sequence[tuple[str, float, str]]) -> None:
        """Each: name, share from 0 to 1, figure."""
        self._empty.set_visibility(not rows)
        with self._box:
            while len(self._rows) < len(rows):
                with box("bar-row") as row:
                    name = words("", "bar-name")
                    meter = Meter()
                    figure = words("", "bar-figure")
                self._rows.append((row, name, meter, figure))
        for index, (row, name, meter, figure) in enumerate(self._rows):
            row.set_visibility(index < len(rows))
            if index < len(rows):
                name.text, share, figure.text = rows[index]
                meter.show(share)


class Chart:
    """A chart that is sent again only when it has changed."""

    def __init__(self, options: Options, classes: str = "chart") -> None:
        self._version: object = None
        self.element = ui.echart(options).classes(classes)

    def show(self, options: Options, version: object) -> None:
        """Draw it anew, unless this version is what is drawn."""
        if version == self._version:
            return
        self._version = version
        self.element.options.clear()
        self.element.options.update(options)
        self.element.update()

    def is_due(self, version: object) -> bool:
        """Whether what is drawn is of another version: then it is worth computing."""
        return version != self._version


class Items:
    """A list of titles with a remark each; rows are changed in place, since making elements is what costs most."""

    def __init__(self, empty: str = "") -> None:
        self._box = box("list")
        self._rows: list[tuple[ui.element, ui.label, ui.label]] = []
        with self._box:
            self._empty = words(empty, "empty")

    def show(self, items: Sequence[tuple[str, str]]) -> None:
        """Each: title, remark."""
        self._empty.set_visibility(not items)
        with self._box:
            while len(self._rows) < len(items):
                with box("item") as row, box("item-text"):
                    self._rows.append((row, words("", "item-title"), words("", "item-note")))
        for index, (row, title, note) in enumerate(self._rows):
            row.set_visibility(index < len(items))
            if index < len(items):
                title.text, note.text = items[index]


def facts(pairs: Iterable[tuple[str, str]]) -> None:
    """Names and values, one a line."""
    with box("facts"):
        for name, value in pairs:
            words(name, "fact-name")
            words(value, "fact-value")


def table(
    columns: Sequence[tuple[str, str, str]],
    rows: list[dict[str, Any]],
    key: str,
    page: int = 50,
    *,
    numbers: Sequence[str] = (),
) -> ui.table:
    """A table that sorts by its columns. Each column: field, title, alignment.

    Those in `numbers` show text, and sort by the number that a row has under FIELD_number.
    """
    described = [
        {"name": field, "field": field, "label": title, "align": align, "sortable": True}
        for field, title, align in columns
    ]
    for column in described:
        if column["name"] in numbers:
            number = f"{column['name']}_number"
            column[":sort"] = f"(a, b, one, other) => (one.{number} ?? -1) - (other.{number} ?? -1)"
    made = ui.table(columns=described, rows=rows, row_key=key, pagination=page).classes("table")
    return made.props("flat hide-pagination" if len(rows) <= page else "flat")


async def confirm(question: str, explanation: str, yes: str, *, dangerous: bool = False) -> bool:
    """Ask first."""
    with ui.dialog() as dialog, box("card dialog"):
        words(question, "card-title")
        words(explanation, "quiet")
        with box("buttons"):
            button("Cancel", lambda: dialog.submit(False), kind="plain")
            button(yes, lambda: dialog.submit(True), kind="danger" if dangerous else "main").mark("confirm")
    dialog.open()
    answer = await dialog
    dialog.delete()
    return bool(answer)


def button(text: str, on_click: Any, *, kind: str = "plain") -> ui.button:
    """A button; kinds: main, plain, danger."""
    return ui.button(text, on_click=on_click, color=None).props("unelevated no-caps dense").classes(f"button {kind}")
