"""What is told at the end of a fleet's demo: promises, and a plot of the four learning curves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from potluck.cli import console
from potluck.cli.demo.promises import Promise
from potluck.cli.demo.summary import show_promises
from potluck.cli.fleetdemo.promises import check
from potluck.cli.fleetdemo.record import Record
from potluck.monitor.lossplot import Mark, plot_curves

PLOT_FILE = "returns.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDemoResult:
    """All that a demo came to."""

    record: Record
    promises: list[Promise]
    plot: Path
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every promise was kept."""
        return all(promise.kept for promise in self.promises)


def conclude(record: Record, folder: Path, seconds: float) -> FleetDemoResult:
    """Judge, and draw the plot."""
    marks = [Mark(incident.at_seconds, f"{incident.who} killed") for incident in record.incidents]
    path = folder / PLOT_FILE
    title = "return of each laptop's policy, mean of 20 episodes"
    path.write_bytes(plot_curves(record.curves, marks, title=title, x_label="seconds"))
    return FleetDemoResult(record=record, promises=check(record), plot=path, seconds=seconds)


def as_json(outcome: FleetDemoResult) -> dict[str, Any]:
    """For a program."""
    return {
        "ok": outcome.ok,
        "broken": [promise.promise for promise in outcome.promises if not promise.kept],
        "promises": [asdict(promise) for promise in outcome.promises],
        "seconds": outcome.seconds,
        "incidents": [asdict(incident) for incident in outcome.record.incidents],
        "returns": {job: curve[-1][1] for job, curve in outcome.record.curves.items() if curve},
        "plot": str(outcome.plot),
    }


def show(outcome: FleetDemoResult) -> None:
    """For a person."""
    show_promises(outcome.promises)
    console.out.print(f"It took {outcome.seconds:.0f} s. The curves are in {outcome.plot}", highlight=False)
    console.out.print(
        "Now your own fleet: [bold]potluck fleet init my-fleet[/bold], and its README", highlight=False, soft_wrap=True
    )
