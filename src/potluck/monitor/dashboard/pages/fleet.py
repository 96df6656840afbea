"""The machines of a fleet, their jobs, and the jobs' own curves side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable
from urllib.parse import quote

from nicegui import ui

from potluck.fleet.jobs.machine import JobReport, JobState
from potluck.monitor import figures
from potluck.monitor.dashboard import charts
from potluck.monitor.dashboard.frame import Page
from potluck.monitor.dashboard.parts import Chart, Meter, box, card, words
from potluck.monitor.fleetnews import Heard

MAX_SHOWN = 100
MAX_CHARTS = 4
TONES: dict[JobState, str] = {"running": "good", "finished": "good", "failed": "bad", "refused": "bad"}
COLOURS = ("#d9480f", "#2f8a51", "#1c7ed6", "#9c36b5", "#b8860b", "#c92a2a", "#0b7285", "#5c7cfa")


class FleetPage:
    """Machines live, jobs with their last words, curves."""

    def __init__(self, page: Page) -> None:
        self._dashboard = page.dashboard
        self._news = page.dashboard.follower.fleet
        self._machines: list[_Machine] = []
        self._jobs: list[_Job] = []
        self._may_read = page.visitor is not None and page.dashboard.organising is not None
        self._charts: list[tuple[ui.element, ui.label, Chart]] = []
        with card("Machines"):
            self._machine_list = box("list")
            self._nobody = words("There are no machines. “potluck fleet agent LINK” adds the one it runs on.", "empty")
        with card("Jobs"):
            self._job_list = box("list")
            self._nothing = words("There are no jobs. “potluck fleet up fleet.toml” starts some.", "empty")
        self._chart_box = box("stack")
        page.live(self.refresh)

    def refresh(self) -> None:
        """Show how it is now."""
        heard = sorted(self._news.machines.values(), key=lambda each: (each.report.name, each.peer))[:MAX_SHOWN]
        jobs = [(each, job) for each in heard for job in each.report.jobs][:MAX_SHOWN]
        self._nobody.set_visibility(not heard)
        self._nothing.set_visibility(not jobs)
        with self._machine_list:
            while len(self._machines) < len(heard):
                self._machines.append(_Machine())
        with self._job_list:
            while len(self._jobs) < len(jobs):
                self._jobs.append(_Job(self._may_read))
        for index, machine in enumerate(self._machines):
            machine.sheet.set_visibility(index < len(heard))
            if index < len(heard):
                machine.show(heard[index], self._news.is_there(heard[index]))
        for index, row in enumerate(self._jobs):
            row.sheet.set_visibility(index < len(jobs))
            if index < len(jobs):
                where, job = jobs[index]
                row.show(where, job, self._news.is_there(where), self._dashboard.now())
        self._draw()

    def _draw(self) -> None:
        names = sorted({figure for _, figure in self._news.curves if figure != "step"})[:MAX_CHARTS]
        with self._chart_box:
            while len(self._charts) < len(names):
                with card() as sheet, box("card-head"):
                    title = words("", "card-title")
                with sheet:
                    self._charts.append((sheet, title, Chart({}, "chart short")))
        for (_, title, drawn), name in zip(self._charts, names, strict=False):
            if not drawn.is_due((name, self._news.version)):
                continue
            title.text = name
            jobs = sorted(job for job, figure in self._news.curves if figure == name)
            lines = [
                charts.line(job, points_of(self._news.curves[job, name]), COLOURS[index % len(COLOURS)])
                for index, job in enumerate(jobs)
            ]
            drawn.show(charts.chart(lines, by="at"), (name, self._news.version))


class _Machine:
    """One machine."""

    def __init__(self) -> None:
        with box("item") as self.sheet, box("item-text"):
            with box("item-head"):
                self._name = words("", "item-title")
                self._state = words("", "chip")
            self._note = words("", "item-note")
            with box("bars"):
                self._bars = {name: self._bar(name) for name in ("CPU", "memory", "GPU")}

    @staticmethod
    def _bar(name: str) -> tuple[ui.element, Meter, ui.label]:
        with box("bar-row") as row:
            words(name, "bar-name")
            return row, Meter(), words("", "bar-figure")

    def show(self, heard: Heard, is_there: bool) -> None:
        report, facts = heard.report, heard.report.facts
        self._name.text = report.name
        self._state.text = "here now" if is_there else "away"
        self._state.classes(replace=f"chip {'good' if is_there else 'bad'}")
        running = sum(job.state == "running" for job in report.jobs)
        engines = ", ".join(facts.engines) or "no container engine"
        disk = f"{figures.size(facts.disk_free_bytes)} of disk free"
        jobs = f"{running} job{'s' if running != 1 else ''} running"
        self._note.text = f"{jobs} · {disk} · {engines} · allows {report.allow}"
        gpu = max(facts.gpu_percent, default=0.0)
        memory = f"{figures.size(facts.memory_used_bytes)} of {figures.size(facts.memory_bytes)}"
        shares = {
            "CPU": (facts.cpu_percent / 100, f"{facts.cpu_percent:.0f}% of {facts.cpus}"),
            "memory": (facts.memory_used_bytes / max(facts.memory_bytes, 1), memory),
            "GPU": (gpu / 100, f"{gpu:.0f}% of {len(facts.gpus)}"),
        }
        for name, (share, text) in shares.items():
            row, meter, figure = self._bars[name]
            row.set_visibility(name != "GPU" or bool(facts.gpus))
            meter.show(share if is_there else 0.0)
            figure.text = text


class _Job:
    """One job."""

    def __init__(self, may_read: bool) -> None:
        with box("item") as self.sheet:
            with box("item-text"):
                with box("item-head"):
                    self._name = words("", "item-title")
                    self._state = words("", "chip")
                    self._log = ui.link("log", "").classes("nav-link")
                    self._log.set_visibility(may_read)
                self._note = words("", "item-note")
                self._words = words("", "item-note")
            self._figures = words("", "bar-figure")

    def show(self, heard: Heard, job: JobReport, is_there: bool, now: float) -> None:
        state = job.state if is_there else "unknown"
        self._name.text = job.name
        self._log.props["href"] = f"/fleet/log/{quote(job.name)}"
        self._state.text = state
        self._state.classes(replace=f"chip {TONES.get(job.state, '') if is_there else 'bad'}")
        times = f"{job.restarts} restart{'s' if job.restarts != 1 else ''}"
        since = f" for {figures.duration(max(now - job.since, 0.0))}" if job.since and is_there else ""
        used = f"{job.cpu_percent:.0f}% of a core, {figures.size(job.memory_bytes)}" if job.memory_bytes else ""
        self._note.text = " · ".join(part for part in (f"on {heard.report.name}{since}", times, used) if part)
        self._words.text = job.last_words
        self._words.set_visibility(bool(job.last_words))
        self._figures.text = "  ".join(f"{name} {value:.4g}" for name, value in list(job.metrics.items())[:3])


def points_of(curve: Iterable[tuple[float, float]]) -> list[list[float]]:
    """As ECharts wants them."""
    return [[round(at * 1000), float(f"{value:.5g}")] for at, value in curve if math.isfinite(value)]
