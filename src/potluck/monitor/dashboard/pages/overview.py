"""The run at a glance."""

from __future__ import annotations

from nicegui import ui

from potluck.monitor import figures
from potluck.monitor.dashboard import charts
from potluck.monitor.dashboard.frame import Page
from potluck.monitor.dashboard.parts import Bars, Chart, Figure, Meter, box, card, words
from potluck.monitor.past import Axis
from potluck.monitor.view import GroupRow, Overview

TREND_EPOCHS = 20
TOP_PEERS = 8
SHORT = 240  # points of a small chart
FACTS = (
    "Running for",
    "Next epoch in",
    "An epoch takes",
    "Done in",
    "Traffic per epoch",
    "Traffic in all",
    "Coordinator",
)
AXES: dict[str, Axis] = {"Epochs": "epoch", "Time": "at"}


class OverviewPage:
    """What most people keep open."""

    def __init__(self, page: Page) -> None:
        self._dashboard = page.dashboard
        self._past = page.dashboard.follower.past
        self._alarms = box("alarms")
        self._alarm_texts: list[str] = []
        with box("grid four"):
            self._epoch = Figure("Epoch", "hero")
            with self._epoch.sheet:
                self._filled = Meter("slim")
                self._filling = words("", "quiet")
            self._loss = Figure("Loss")
            self._rate = Figure("Samples per second")
            self._peers = Figure("Peers")
        with box("grid wide-narrow"):
            with card("Loss", classes="filled") as sheet:
                with sheet.default_slot.children[0]:
                    self._axis = ui.toggle(list(AXES), value="Epochs", on_change=lambda: self._draw(force=True))
                    self._axis.props("unelevated no-caps dense toggle-color=primary")
                self._loss_chart = Chart({}, "chart main")
            with box("stack"):
                with card("Who computes", "samples per second"):
                    self._top = Bars("Nobody computes just now.")
                with card("Roles"):
                    self._roles = Bars("Nobody is here.")
                with card("Places"):
                    self._places = Bars("Nobody is here.")
                with card("Groups") as self._groups_sheet:
                    self._groups = Bars("There is one group.")
                self._groups_sheet.set_visibility(False)
        with box("grid three"):
            with card("Speed", "samples per second"):
                self._speed_chart = Chart({}, "chart short")
            with card("Peers over time"):
                self._peers_chart = Chart({}, "chart short")
            with card("The run"), box("facts"):
                self._facts: dict[str, ui.label] = {}
                for name in FACTS:
                    words(name, "fact-name")
                    self._facts[name] = words(figures.NOTHING, "fact-value")
        page.live(self.refresh)

    def refresh(self) -> None:
        """Show how it is now."""
        overview = self._dashboard.overview()
        self._show_alarms()
        self._show_figures(overview)
        self._show_facts(overview)
        rows = [row for row in self._dashboard.rows() if row.role == "trainer" and row.samples_per_second > 0]
        fastest = max((row.samples_per_second for row in rows), default=1.0)
        self._top.show(
            [
                (row.name, row.samples_per_second / fastest, figures.number(row.samples_per_second))
                for row in rows[:TOP_PEERS]
            ]
        )
        for bars, counts in ((self._roles, overview.roles), (self._places, overview.places)):
            bars.show([(name, count / overview.num_peers, str(count)) for name, count in counts.items()])
        self._show_groups()
        self._draw()

    def _show_groups(self) -> None:
        rows = self._dashboard.follower.view.groups()
        self._groups_sheet.set_visibility(len(rows) > 1)
        if len(rows) > 1:
            furthest = max(row.epoch for row in rows) or 1
            self._groups.show([(row.name, row.epoch / furthest, _describe_group(row)) for row in rows])

    def _show_alarms(self) -> None:
        texts = [alarm.text for alarm in self._dashboard.alarms()]
        if texts == self._alarm_texts:
            return
        self._alarm_texts = texts
        self._alarms.clear()
        with self._alarms:
            for text in texts:
                with box("alarm"):
                    ui.icon("warning_amber")
                    words(text)

    def _show_figures(self, overview: Overview) -> None:
        settings = self._dashboard.follower.settings
        end = settings.end_epoch if settings is not None else 0
        self._epoch.show(f"{overview.epoch:,}", f"of {end:,}" if end else "updates so far")
        self._filled.show(overview.samples / overview.target if overview.target else 0.0)
        wanted = f" of {overview.target:,}" if overview.target else ""
        self._filling.text = f"{overview.samples:,}{wanted} samples"
        before = self._past.loss_at(overview.epoch - TREND_EPOCHS)
        trend = ""
        if overview.loss is not None and before is not None:
            trend = f"{overview.loss - before:+.4f} in {TREND_EPOCHS} epochs"
        self._loss.show(figures.loss(overview.loss), trend)
        alone = overview.fastest_samples_per_second
        ratio = figures.times(overview.samples_per_second / alone) if alone else ""
        self._rate.show(figures.number(overview.samples_per_second), f"{ratio} the fastest alone" if ratio else "")
        others = overview.num_peers - overview.num_trainers
        self._peers.show(str(overview.num_peers), f"{overview.num_trainers} train, {others} help or watch")

    def _show_facts(self, overview: Overview) -> None:
        settings = self._dashboard.follower.settings
        end = settings.end_epoch if settings is not None else 0
        usual = overview.seconds_per_epoch
        started = self._past.started_at()
        facts = {
            "Running for": figures.duration(self._dashboard.now() - started) if started else figures.NOTHING,
            "Next epoch in": "now" if overview.due_in_seconds == 0 else figures.duration(overview.due_in_seconds),
            "An epoch takes": figures.duration(usual),
            "Done in": self._rest(end, overview),
            "Traffic per epoch": figures.size(overview.bytes_per_epoch),
            "Traffic in all": figures.size(self._past.total("sent_bytes")),
            "Coordinator": overview.coordinator or "nobody",
        }
        for name, value in facts.items():
            self._facts[name].text = value

    @staticmethod
    def _rest(end: int, overview: Overview) -> str:
        if not end:
            return "no end is set"
        usual = overview.seconds_per_epoch
        return figures.duration((end - overview.epoch) * usual) if end > overview.epoch and usual else figures.NOTHING

    def _draw(self, *, force: bool = False) -> None:
        by = AXES[str(self._axis.value)]
        now = len(self._past)
        shared = self._dashboard.shared
        if self._loss_chart.is_due((now, by)) or force:
            self._loss_chart.show(shared(f"loss by {by}", now, lambda: self._loss_options(by)), (now, by))
        if self._speed_chart.is_due(now):
            self._speed_chart.show(shared("speed", now, self._speed_options), now)
            self._peers_chart.show(shared("peers over time", now, self._peers_options), now)

    def _loss_options(self, by: Axis) -> charts.Options:
        loss = self._past.series("loss", by)
        line = charts.line("loss", charts.pairs(loss.x, loss.mean, by), charts.TOMATO, area=True)
        return charts.chart([*charts.band(loss, by, charts.TOMATO), line], by=by, legend=False)

    def _speed_options(self) -> charts.Options:
        rate, alone = self._past.series("rate", "at", SHORT), self._past.series("alone", "at", SHORT)
        lines = [
            charts.line("all together", charts.pairs(rate.x, rate.mean, "at"), charts.BLUE, area=True),
            charts.line("fastest alone", charts.pairs(alone.x, alone.mean, "at"), charts.GREY, dashed=True),
        ]
        return charts.chart(lines, by="at", from_zero=True)

    def _peers_options(self) -> charts.Options:
        trainers, peers = self._past.series("trainers", "at", SHORT), self._past.series("peers", "at", SHORT)
        lines = [
            charts.line("all", charts.pairs(peers.x, peers.mean, "at"), charts.GREY, thin=True),
            charts.line("trainers", charts.pairs(trainers.x, trainers.mean, "at"), charts.GREEN, area=True),
        ]
        return charts.chart(lines, by="at", from_zero=True)


def _describe_group(row: GroupRow) -> str:
    saved = "" if row.cut_epoch is None else f", saved at {row.cut_epoch:,}"
    return f"epoch {row.epoch:,}{saved}, {row.num_members} members"
