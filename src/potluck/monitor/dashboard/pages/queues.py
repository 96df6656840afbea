"""A fleet's queues and topics, and the value network that is pooled through them."""

from __future__ import annotations

from nicegui import ui

from potluck.monitor import figures
from potluck.monitor.dashboard import charts
from potluck.monitor.dashboard.frame import Page
from potluck.monitor.dashboard.pages.fleet import COLOURS, points_of
from potluck.monitor.dashboard.parts import Chart, Items, Meter, box, card, words
from potluck.monitor.fleetqueues import QueueSeries, ValueSeries

MAX_SHOWN = 50


class QueuesPage:
    """How full each queue is, how fast items come and go, how old the oldest is."""

    def __init__(self, page: Page) -> None:
        self._dashboard = page.dashboard
        self._rows: list[_Queue] = []
        with card("Queues and topics"):
            self._list = box("list")
            self._nothing = words(
                "There are no queues. “potluck queue add NAME” makes one; so does fleet.toml.", "empty"
            )
        with card("Items waiting or taken"):
            self._chart = Chart({}, "chart short")
        page.live(self.refresh)

    def refresh(self) -> None:
        """Show how it is now."""
        queues = self._dashboard.queues
        shown = sorted(queues.queues.items())[:MAX_SHOWN] if queues is not None else []
        self._nothing.set_visibility(not shown)
        with self._list:
            while len(self._rows) < len(shown):
                self._rows.append(_Queue())
        for index, row in enumerate(self._rows):
            row.sheet.set_visibility(index < len(shown))
            if index < len(shown):
                row.show(shown[index][1], self._dashboard.now())
        if queues is not None and self._chart.is_due(queues.version):
            lines = [
                charts.line(name, points_of((at, items) for at, _, items in one.points), COLOURS[index % len(COLOURS)])
                for index, (name, one) in enumerate(shown)
                if one.depth.definition.kind == "queue"
            ]
            self._chart.show(charts.chart(lines, by="at", from_zero=True), queues.version)


class _Queue:
    """One queue."""

    def __init__(self) -> None:
        with box("item") as self.sheet, box("item-text"):
            with box("item-head"):
                self._name = words("", "item-title")
                self._kind = words("", "chip")
                self._dead = words("", "chip bad")
            self._note = words("", "item-note")
            with box("bars"), box("bar-row") as self._bar:
                words("full", "bar-name")
                self._meter = Meter()
                self._figure = words("", "bar-figure")

    def show(self, series: QueueSeries, now: float) -> None:
        depth, limits = series.depth, series.depth.definition
        put, left = series.rates
        self._name.text, self._kind.text = limits.name, limits.kind
        self._dead.text = f"{depth.dead:,} dead letter{'s' if depth.dead != 1 else ''}"
        self._dead.set_visibility(depth.dead > 0)
        if limits.kind == "topic":
            parts = [f"version {depth.num_put:,}", f"{put:.1f} published a second"]
        else:
            oldest = f"oldest {figures.duration(max(now - depth.oldest_at, 0.0))}" if depth.oldest_at else "empty"
            rates = [f"{put:.1f} put a second", f"{left:.1f} left a second"]
            parts = [*rates, f"{depth.out:,} with takers", oldest, f"when full: {limits.when_full}"]
        self._note.text = " · ".join(parts)
        size = depth.bytes + depth.parts_bytes
        self._bar.set_visibility(limits.kind == "queue")
        self._meter.show(max(depth.items / limits.max_items, size / limits.max_bytes))
        self._figure.text = f"{depth.items:,} of {limits.max_items:,} items, {figures.size(size)}"


class ValuePage:
    """The pooled value network: loss, staleness, who feeds it."""

    def __init__(self, page: Page) -> None:
        self._dashboard = page.dashboard
        self._parts: dict[str, tuple[ui.label, Items, Chart]] = {}
        self._page_box = box("stack")
        self._nothing = words(
            "No value network is published on a topic of this fleet. docs/fleet.md says how to pool one.", "empty"
        )
        page.live(self.refresh)

    def refresh(self) -> None:
        """Show how it is now."""
        queues = self._dashboard.queues
        values = queues.values if queues is not None else {}
        self._nothing.set_visibility(not values)
        for name, series in values.items():
            if name not in self._parts:
                with self._page_box:
                    self._parts[name] = self._make(name)
            note, heads, chart = self._parts[name]
            self._show(series, note, heads)
            if chart.is_due(series.number):
                lines = [
                    charts.line(head, points_of(one.points), COLOURS[index % len(COLOURS)])
                    for index, (head, one) in enumerate(sorted(series.heads.items()))
                ]
                chart.show(charts.chart(lines, by="at", from_zero=True), series.number)

    @staticmethod
    def _make(name: str) -> tuple[ui.label, Items, Chart]:
        with card(f"Value network on “{name}”"):
            note = words("", "item-note")
            heads = Items("Nobody feeds it yet.")
        with card("Loss of each head (1: as good as a constant)"):
            return note, heads, Chart({}, "chart short")

    def _show(self, series: ValueSeries, note: ui.label, heads: Items) -> None:
        parts = [
            f"version {series.number:,}",
            f"{series.learnt:,.0f} fragments learnt",
            f"{series.too_old:,.0f} too old",
            f"{series.staleness:.1f} versions behind on average",
        ]
        note.text = " · ".join(parts)
        heads.show(
            [
                (name, f"{one.num_fragments:,} fragments" + (f" · loss {one.points[-1][1]:.3f}" if one.points else ""))
                for name, one in sorted(series.heads.items())
            ]
        )
