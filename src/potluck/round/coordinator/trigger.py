"""When to start a round (pure): the coordinator asks, a run's mode of training answers.

A trigger sees who is ready and who else trains, and names the time at which a round should start. It is also told when
a round begins and who came too late for it, so that it can learn how long waiting pays off. Each commit carries what it
has learnt, so that a new coordinator goes on with that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from potluck.errors import ConfigurationError
from potluck.round.plan.specs import StartSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadySender:
    """A peer that waits to contribute."""

    peer: str
    weight: float
    since: float
    """When it became ready, by the coordinator's clock."""
    start: StartSpec | None = None
    """As it would have rounds start."""
    phases: float = 0.0
    """Of paths, that its contribution stands for (paths/)."""


class Trigger(Protocol):
    """Decides when a round starts."""

    @property
    def start(self) -> StartSpec | None:
        """The same in a few words, for a coordinator that asks the trainers; None: whatever the others say."""
        ...

    @property
    def grace_seconds(self) -> float:
        """How long it waits for stragglers now."""
        ...

    def resume(self, grace_seconds: float) -> None:
        """The coordinator before waited so long. Counts until this trigger has learnt something itself."""
        ...

    def due_at(self, ready: Sequence[ReadySender], trainers: frozenset[str]) -> float | None:
        """When to start, given who is ready and which trainers are alive; None: not with these."""
        ...

    def begun(self, epoch: int, ready: Sequence[ReadySender], now: float) -> None:
        """A round for this epoch begins now, with these."""
        ...

    def came_late(self, epoch: int, peer: str, now: float) -> None:
        """A peer says now that it is ready for an epoch whose round may have begun without it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """Start when all trainers are ready; or when enough are and the others have had their time."""

    min_senders: int = 1
    """So many must be ready."""

    min_weight: float = 0.0
    """… and have so much weight together."""

    grace_seconds: float = 1.0
    """How long the others have once the quorum is reached."""

    def __post_init__(self) -> None:
        if self.min_senders < 1:
            raise ConfigurationError(f"min_senders={self.min_senders}: a round needs at least 1 peer that contributes")
        if not (self.min_weight >= 0 and self.grace_seconds >= 0):
            raise ConfigurationError("min_weight and grace_seconds must be 0 or more")

    @property
    def start(self) -> StartSpec:
        """Without the weight."""
        seconds = self.grace_seconds
        return StartSpec(min_senders=self.min_senders, least_seconds=seconds, most_seconds=seconds)

    def due_at(self, ready: Sequence[ReadySender], trainers: frozenset[str]) -> float | None:
        """When the quorum is reached, and at once when nobody is left to wait for."""
        reached_at = self._reached_at(ready)
        if reached_at is None:
            return None
        missing = trainers - {sender.peer for sender in ready}
        return reached_at + self.grace_seconds if missing else -math.inf

    def resume(self, grace_seconds: float) -> None:
        """Its window is always the same."""

    def begun(self, epoch: int, ready: Sequence[ReadySender], now: float) -> None:
        """Its window is always the same."""

    def came_late(self, epoch: int, peer: str, now: float) -> None:
        """Its window is always the same."""

    def _reached_at(self, ready: Sequence[ReadySender]) -> float | None:
        weight = 0.0
        for count, sender in enumerate(sorted(ready, key=lambda sender: sender.since), start=1):
            weight += sender.weight
            if count >= self.min_senders and weight >= self.min_weight:
                return sender.since
        return None
