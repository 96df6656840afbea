"""The paths of a sparse model: who trains what, how far, how well; and its modules."""

from __future__ import annotations

from typing import Any

from potluck.monitor.dashboard.frame import Page
from potluck.monitor.dashboard.parts import Chart, Figure, Items, box, card
from potluck.monitor.pathview import PathRow, PathView, view_paths
from potluck.paths.grid import path_name

EVERY_SECONDS = 2.0
SHOWN = 64  # paths and modules that are listed; the picture has all
LABELLED = 64  # losses that are written into the picture, if there are no more


class PathsPage:
    """Paths × modules."""

    def __init__(self, page: Page) -> None:
        self._dashboard = page.dashboard
        with box("grid five"):
            self._phases = Figure("Phases of each path")
            self._trained = Figure("Trained now")
            self._tokens = Figure("Tokens so far")
            self._stopped = Figure("Stopped early")
            self._returned = Figure("Came back")
        with card("Paths", "validation loss; rows and columns are the modules that a path takes"):
            self._picture = Chart({})
        with box("grid two"):
            with card("Who trains what"):
                self._paths = Items("This run has no paths.")
            with card("Modules", "each has outer steps of its own"):
                self._modules = Items("No module has taken a step yet.")
        page.live(self.refresh, EVERY_SECONDS)

    def refresh(self) -> None:
        """Show how it is now."""
        follower = self._dashboard.follower
        manifest = follower.manifest
        if manifest is None or manifest.paths is None:
            return
        names = {row.peer: row.name or row.peer[:12] for row in self._dashboard.rows()}
        view = view_paths(
            manifest.paths.grid(),
            follower.phases,
            follower.view.groups(),
            lambda peer: names.get(peer, peer[:12]),
            follower.session.now(),
        )
        done = [row.phases for row in view.paths]
        self._phases.show(f"{min(done)} to {max(done)}" if min(done) != max(done) else str(min(done)))
        self._trained.show(f"{sum(bool(row.trainers) for row in view.paths)} of {len(view.paths)}")
        self._tokens.show(f"{sum(row.tokens for row in view.paths):,}")
        self._stopped.show(str(sum(row.is_over for row in view.paths)))
        self._returned.show(str(sum(row.returned for row in view.paths)))
        self._picture.show(picture(view), tuple(done))
        self._paths.show([(f"Path {path_name(row.path)}", describe(row)) for row in view.paths[:SHOWN]])
        told = [(row.module, row.as_table()) for row in view.modules[:SHOWN]]
        self._modules.show(
            [
                (name, f"{row['outer steps']} outer steps, the last {row['last']}; {row['paths']} paths, "
                 f"coordinated by {row['coordinator'] or 'nobody'}")
                for name, row in told
            ]
        )  # fmt: skip


def describe(row: PathRow) -> str:
    """One path in a line."""
    table = row.as_table()
    loss = f", loss {table['loss']}" if table["loss"] else ""
    validation = f", validation {table['validation']}" if table["validation"] else ""
    return f"{row.phases} phases, {table['tokens']} tokens{loss}{validation}; trained by {table['trained by']}"


def picture(view: PathView) -> dict[str, Any]:
    """A field for each path: its last level's module across, the others down."""
    down = list(dict.fromkeys(path_name(row.path[:-1]) if row.path[:-1] else "" for row in view.paths))
    across = sorted({row.path[-1] for row in view.paths})
    known = [row.validation for row in view.paths if row.validation is not None]
    fields = [
        [row.path[-1], down.index(path_name(row.path[:-1]) if row.path[:-1] else ""), round(row.validation, 3)]
        for row in view.paths
        if row.validation is not None
    ]
    return {
        "tooltip": {},
        "grid": {"left": 60, "right": 20, "top": 10, "bottom": 60},
        "xAxis": {"type": "category", "data": [f"… {number})" for number in across]},
        "yAxis": {"type": "category", "data": [name.removesuffix(")") + " …" for name in down]},
        "visualMap": {
            "min": min(known, default=0.0),
            "max": max(known, default=1.0),
            "orient": "horizontal",
            "left": "center",
            "bottom": 0,
            "text": [f"{max(known):.3f}", f"{min(known):.3f}"] if known else ["", ""],
        },
        "series": [{"type": "heatmap", "data": fields, "label": {"show": len(fields) <= LABELLED, "color": "#111827"}}],
    }
