"""A pipeline: stages × servers, what flows between them, the slowest stage, moves, new shapes and spot checks."""

from __future__ import annotations

from nicegui import ui

from potluck.monitor.dashboard.charts import Options
from potluck.monitor.dashboard.frame import Page
from potluck.monitor.dashboard.parts import Chart, Figure, Items, box, card, words
from potluck.monitor.flowpicture import draw_flow
from potluck.training.staged.overview import Overview

EVERY_SECONDS = 2.0
SILENT_SECONDS = 20.0
SHOWN = 64


class PipelinePage:
    """Who computes what, and how fast."""

    def __init__(self, page: Page) -> None:
        self._dashboard = page.dashboard
        self._drawn = ""
        with box("alarm calm") as self._waiting:
            self._waits = words()
        with box("grid five"):
            self._step = Figure("Step", "hero")
            self._loss = Figure("Loss")
            self._shape = Figure("Shape")
            self._slowest = Figure("Bottleneck")
            self._checks = Figure("Spot checks")
        with card("Where micro-batches flow", "wide lines: many; dashed boxes: copies that compute nothing"):
            self._picture = ui.html("", sanitize=False).classes("flow-frame")
        with card("Loss"):
            self._curve = Chart({})
        with box("grid two"):
            with card("Who does what"):
                self._peers = Items("Nobody is there yet.")
            with card("Moves and new shapes", "with their reasons"):
                self._changes = Items("Nothing has changed so far.")
            with card("Stages"):
                self._stages = Items("No shape counts yet.")
            with card("Excluded", "servers that a spot check found lying"):
                self._excluded = Items("Nobody.")
        page.live(self.refresh, EVERY_SECONDS)

    def refresh(self) -> None:
        """Show how it is now."""
        news = self._dashboard.follower.pipeline
        overview = news.newest
        silent = self._dashboard.follower.session.now() - news.heard_at > SILENT_SECONDS
        text = overview.waits if overview is not None and not silent else "nobody conducts"
        self._waiting.set_visibility(bool(text))
        self._waits.text = f"The pipeline waits: {text}." if text else ""
        if overview is None:
            return
        names = {row.peer: row.name or row.peer[:12] for row in self._dashboard.rows()}

        def name_of(peer: str) -> str:
            return names.get(peer, peer[:12])

        self._show_figures(overview)
        picture = draw_flow(overview, name_of)
        if picture != self._drawn:
            self._drawn = picture
            self._picture.set_content(picture)
        self._curve.show(_curve(overview), (overview.step, len(overview.losses)))
        self._peers.show([(name_of(peer), describe_peer(overview, peer)) for peer in list(overview.peers)[:SHOWN]])
        moves = [(name_of(m.peer), f"moved from stage {m.source} to {m.to}: {m.reason}") for m in overview.moves]
        shapes = [("New shape", line) for line in overview.morphs]
        self._changes.show([*reversed(shapes), *reversed(moves)][:SHOWN])
        self._stages.show([(f"Stage {stage}", describe_stage(overview, stage)) for stage in range(len(overview.rows))])
        self._excluded.show([(name_of(peer), reason) for peer, reason in overview.checks.excluded.items()])

    def _show_figures(self, overview: Overview) -> None:
        self._step.show(f"{overview.step:,}", f"{overview.step_seconds:.2f} s each, {overview.phase}")
        cut = f"saved at step {overview.cut_step:,}" if overview.cut_step >= 0 else "nothing is saved yet"
        self._loss.show(f"{overview.loss:.4f}", cut)
        num_servers = len({name for row in overview.rows for name in row.servers})
        self._shape.show(f"{overview.stages} stages", f"{num_servers} server{'s' * (num_servers != 1)}")
        slowest = [stage for stage, row in enumerate(overview.rows) if row.is_bottleneck]
        if slowest:
            rate = overview.rows[slowest[0]].samples_per_second
            self._slowest.show(f"Stage {slowest[0]}", f"{rate:,.1f} samples per second")
        else:
            self._slowest.show("–", "not measured yet")
        checks = overview.checks
        impossible = f", {checks.not_possible} not possible" if checks.not_possible else ""
        self._checks.show(str(checks.made), f"{checks.failed} failed{impossible}; rate {checks.rate:g}")


def describe_peer(overview: Overview, peer: str) -> str:
    """One peer in a line."""
    about = overview.peers[peer]
    roles = [f"serves stage {', '.join(map(str, about.serves))}"] if about.serves else []
    roles += [f"holds stage {', '.join(map(str, about.listens))}"] if about.listens else []
    roles += ["feeds"] if about.feeds else []
    roles += ["saves"] if about.saves else []
    parts = [", ".join(roles) or "waits"]
    parts += [f"{about.rate:,.1f} samples/s"] if about.rate else []
    parts += [f"{about.waiting} waiting"] if about.waiting else []
    parts += [f"loads {len(about.loading)} blocks"] if about.loading else []
    return "; ".join(parts) + (f": {about.why}" if about.why else "")


def describe_stage(overview: Overview, stage: int) -> str:
    """One stage in a line."""
    row = overview.rows[stage]
    speed = f"{row.samples_per_second:,.1f} samples/s" if row.samples_per_second else "not measured yet"
    mark = ", the bottleneck" if row.is_bottleneck else ""
    servers, copies = len(row.servers), len(row.listeners)
    holders = f"{servers} server{'s' * (servers != 1)}, {copies} cop{'y' if copies == 1 else 'ies'}"
    return f"blocks {row.first_block} to {row.last_block}; {holders}; {speed}{mark}; {row.waiting} waiting"


def _curve(overview: Overview) -> Options:
    return {
        "tooltip": {"trigger": "axis"},
        "grid": {"left": 60, "right": 20, "top": 10, "bottom": 30},
        "xAxis": {"type": "value", "name": "step", "min": "dataMin", "max": "dataMax"},
        "yAxis": {"type": "value", "scale": True},
        "series": [
            {"type": "line", "name": "loss", "showSymbol": False, "data": [list(point) for point in overview.losses]}
        ],
        "color": ["#d9480f"],
    }
