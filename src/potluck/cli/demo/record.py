"""What happened in a demo, and the figures that follow from it (pure).

All times are seconds since the demo began. Commits carry the hub's own time, so that a figure does not depend on when
the observer heard of it; hub and observer share one machine here, and so one clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

IncidentKind = Literal["trainer killed", "coordinator killed", "newcomer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCommit:
    """One epoch that became final."""

    at_seconds: float
    epoch: int
    term: int
    """Of the coordinator's lease: a later coordinator has a larger one."""

    weights: dict[str, float]
    """How many samples each contributor gave, by name."""

    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLoss:
    """What the trainers said of their loss, all together."""

    at_seconds: float
    epoch: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something that a run has to bear."""

    kind: IncidentKind
    who: str
    at_seconds: float
    epoch: int
    """Committed by then."""

    term: int = 0

    def is_over(self, commit: SeenCommit) -> bool:
        """Whether this commit shows that the run has recovered."""
        if commit.epoch <= self.epoch or commit.at_seconds < self.at_seconds:
            return False
        if self.kind == "newcomer":
            return self.who in commit.weights
        if self.kind == "coordinator killed":
            return commit.term > self.term
        return self.who not in commit.weights

    def recovery_seconds(self, commits: Sequence[SeenCommit]) -> float | None:
        """Until the first epoch that shows it; None: never."""
        over = next((commit for commit in commits if self.is_over(commit)), None)
        return None if over is None else over.at_seconds - self.at_seconds


@dataclass(slots=True, kw_only=True)
class DemoRecord:
    """All that a demo has seen."""

    trainers: list[str] = field(default_factory=list)
    """All that were to train, the newcomer included."""

    commits: list[SeenCommit] = field(default_factory=list)
    losses: list[SeenLoss] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    alone_until_seconds: float = -math.inf
    together_from_seconds: float = math.inf
    bad_heads: int = 0
    """Heads of the lineage that did not follow from the one before."""

    exit_codes: dict[str, int] = field(default_factory=dict)
    """Of everybody who was asked to leave."""

    checkpoint_epoch: int | None = None
    loss_before: float | None = None
    loss_after: float | None = None
    """On text that nobody trains on: of the untrained model, and of the checkpoint."""

    problem: str = ""
    """What kept the play from going on, if anything did."""

    @property
    def epoch(self) -> int:
        """The newest."""
        return self.commits[-1].epoch if self.commits else 0

    @property
    def term(self) -> int:
        """Of the newest commit."""
        return self.commits[-1].term if self.commits else 0

    @property
    def sent_bytes(self) -> int:
        """Of all rounds that were committed."""
        return sum(commit.sent_bytes for commit in self.commits)

    def alone(self) -> list[SeenCommit]:
        """The epochs that one peer made, before anybody else was even starting."""
        return [commit for commit in self.commits if commit.at_seconds <= self.alone_until_seconds]

    def together(self) -> list[SeenCommit]:
        """The epochs that all made who came at first, until the first incident."""
        end = min((incident.at_seconds for incident in self.incidents), default=math.inf)
        return [commit for commit in self.commits if self.together_from_seconds <= commit.at_seconds < end]

    def has_epoch_of(self, names: Iterable[str]) -> bool:
        """Whether the newest epoch has samples of all of these."""
        return bool(self.commits) and set(names) <= set(self.commits[-1].weights)


def samples_per_second(commits: Sequence[SeenCommit]) -> float | None:
    """What was given between the first and the last of these commits; None where they are too few."""
    if len(commits) < 2:
        return None
    seconds = commits[-1].at_seconds - commits[0].at_seconds
    return sum(sum(commit.weights.values()) for commit in commits[1:]) / seconds if seconds > 0 else None
