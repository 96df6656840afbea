"""When the round of a module starts (pure): it counts phases, not peers.

A module is done with an epoch when each path through it has given a phase. A peer that carries several paths comes
once, with all of them. So a round starts at once when the phases that are ready are as many as the module has paths;
otherwise when enough are, and the others have had their grace. The grace adapts as that of DiLoCo does: a path that is
late by more than its neighbours work is not waited for, and its phase counts in a later epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from potluck.errors import ConfigurationError
from potluck.optim.methods.quorum import AdaptiveGrace, AdaptiveQuorum
from potluck.round.coordinator.trigger import ReadySender

ROUNDING = 1e-6  # shares of a phase add up to 1, nearly


class PhaseQuorum(AdaptiveQuorum):
    """A trigger for the group of a module."""

    def __init__(self, *, num_paths: int, min_phases: float = 1.0, grace: AdaptiveGrace | None = None) -> None:
        if not 0 < min_phases <= num_paths:
            raise ConfigurationError(f"min_phases={min_phases}: choose 1 to {num_paths}, the paths through the module")
        super().__init__(min_senders=1, grace=grace)
        self.num_paths = num_paths
        self.min_phases = min_phases

    def due_at(self, ready: Sequence[ReadySender], trainers: frozenset[str]) -> float | None:
        """At once when all phases are there."""
        self._num_trainers = len(trainers)
        phases, reached_at = 0.0, None
        for sender in sorted(ready, key=lambda sender: sender.since):
            phases += sender.phases
            if reached_at is None and phases + ROUNDING >= min(self.min_phases, self.num_paths):
                reached_at = sender.since
        if reached_at is None:
            return None
        return -math.inf if phases + ROUNDING >= self.num_paths else reached_at + self.grace.seconds
