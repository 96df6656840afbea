"""What happened in a fleet's demo: the curves that the jobs logged, and what they had to bear.

Figures come from the files that the jobs write, so that an outage of the hub hides nothing. Times are seconds since the
demo began.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

IncidentKind = Literal["laptop killed", "learner killed", "hub killed"]
Curve = list[tuple[float, float]]


@dataclass(slots=True, kw_only=True)
class Incident:
    """Something that the fleet has to bear."""

    kind: IncidentKind
    who: str
    at_seconds: float
    steps_before: dict[str, float]
    """Of each laptop that has to go on, when it happened."""

    steps_meanwhile: dict[str, float] = field(default_factory=dict)
    """Of the same when it was made good."""

    over_at_seconds: float | None = None
    """When all was as before; None: never."""

    note: str = ""

    @property
    def went_on(self) -> bool:
        """Whether all others trained meanwhile."""
        return bool(self.steps_meanwhile) and all(
            self.steps_meanwhile.get(name, -math.inf) > steps for name, steps in self.steps_before.items()
        )


@dataclass(slots=True, kw_only=True)
class Record:
    """All that a demo has seen."""

    curves: dict[str, Curve] = field(default_factory=dict)
    """Returns over time, by job."""

    incidents: list[Incident] = field(default_factory=list)
    restarts: dict[str, int] = field(default_factory=dict)
    """How often each job was started again, at the end."""

    steps_saved: float = 0.0
    """Of the killed laptop, at the checkpoint that it went on from."""

    steps_resumed: float = 0.0
    """Its first figure after it came back."""

    exit_codes: dict[str, int] = field(default_factory=dict)
    num_left_behind: int = 0
    """Jobs that still ran after everybody had left."""

    problem: str = ""
    """What kept the play from going on, if anything did."""


def read_curve(path: Path, figure: str, began_at: float = 0.0) -> Curve:
    """A figure of a job over time; lines that are only half written are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [*_points(lines, figure, began_at)]


def _points(lines: Iterable[str], figure: str, began_at: float) -> Iterable[tuple[float, float]]:
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if figure in values:
            yield values["at"] - began_at, values[figure]
