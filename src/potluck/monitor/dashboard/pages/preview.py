"""What the model says now, and what it said before."""

from __future__ import annotations

from nicegui import ui

from potluck.monitor import figures
from potluck.monitor.dashboard import charts
from potluck.monitor.dashboard.frame import Page
from potluck.monitor.dashboard.parts import Chart, box, card, words
from potluck.training.books.history import Preview

EVERY_SECONDS = 2.0
MOST_FIGURES = 4


class PreviewPage:
    """The newest words, a slider into the past, and the recipe's own figures."""

    def __init__(self, page: Page) -> None:
        self._previewer = page.dashboard.previewer  # on the host, which makes them
        self._past = page.dashboard.follower.past
        self._shown: object = None
        self._last = 0  # the newest preview's place
        with box("grid wide-narrow"):
            with card("What the model says") as sheet:
                with sheet.default_slot.children[0]:
                    self._note = words("", "card-note")
                self._text = words("", "preview")
                self._empty = words("", "empty")
                self._slider = ui.slider(min=0, max=0, value=0, on_change=lambda: self._show(self._chosen()))
                self._slider.props("snap color=primary").style("margin-top: 14px")
            with box("stack"):
                self._charts = [self._figure_card() for _ in range(MOST_FIGURES)]
        page.live(self.refresh, EVERY_SECONDS)

    @staticmethod
    def _figure_card() -> tuple[ui.element, ui.label, Chart]:
        with card() as sheet:
            with box("card-head"):
                title = words("", "card-title")
            drawn = Chart({}, "chart short")
        return sheet, title, drawn

    def refresh(self) -> None:
        """Show how it is now; who looks at the newest sees each newer one."""
        previews = self._past.previews()
        self._slider.set_visibility(len(previews) > 1)
        self._empty.set_visibility(not previews)
        if not previews:
            self._empty.text = self._explanation()
        version = (len(previews), previews[-1].epoch if previews else 0)
        if version == self._shown:
            return
        was_newest = int(self._slider.value or 0) >= self._last
        self._shown = version
        self._last = max(0, len(previews) - 1)
        self._slider.props["max"] = self._last
        self._slider.update()
        if was_newest:
            self._slider.value = self._last
        self._show(self._chosen())
        self._draw(previews)

    def _explanation(self) -> str:
        problem = self._previewer.problem if self._previewer is not None else ""
        return problem or "The model speaks after the first backup of the host, and everybody hears it."

    def _chosen(self) -> Preview | None:
        previews = self._past.previews()
        index = int(self._slider.value or 0)
        return previews[min(index, len(previews) - 1)] if previews else None

    def _show(self, preview: Preview | None) -> None:
        if preview is not None:
            self._text.text = preview.text or "(nothing)"
            self._note.text = f"at epoch {preview.epoch:,}, {figures.clock(preview.at)}"

    def _draw(self, previews: list[Preview]) -> None:
        names = sorted({name for preview in previews for name in preview.figures})[:MOST_FIGURES]
        for index, (sheet, title, drawn) in enumerate(self._charts):
            sheet.set_visibility(index < len(names))
            if index < len(names):
                name = names[index]
                points = [[each.epoch, round(each.figures[name], 5)] for each in previews if name in each.figures]
                title.text = name.replace("_", " ")
                line = charts.line(name, [list(map(float, point)) for point in points], charts.PLUM, area=True)
                drawn.show(charts.chart([line], legend=False), (name, len(points)))
