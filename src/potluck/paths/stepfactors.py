"""By what the mean of a round is multiplied, as its commit says: all members, and all who replay it, know the same."""

from __future__ import annotations

from potluck.paths.weighing import Alpha, step_factor
from potluck.round.plan.messages import Commit

REMEMBERED_COMMITS = 256


class StepFactors:
    """The factors of one module's epochs."""

    def __init__(self, num_paths: int, alpha: Alpha) -> None:
        """`num_paths` go through the module."""
        self._num_paths = num_paths
        self._alpha = alpha
        self._commits: dict[int, tuple[float, float]] = {}  # phases and weight of each epoch

    def committed(self, commit: Commit) -> None:
        """An epoch is final."""
        given = [member for member in commit.members if member.weight > 0]
        self._commits[commit.epoch] = (sum(m.phases for m in given), sum(m.weight for m in given))
        while len(self._commits) > REMEMBERED_COMMITS:
            self._commits.pop(next(iter(self._commits)))

    def of(self, epoch: int) -> float:
        """The factor of an epoch; of one that was not heard of, as if all paths were in it."""
        phases, weight = self._commits.get(epoch, (float(self._num_paths), 0.0))
        return step_factor(phases=phases, round_weight=weight, num_paths=self._num_paths, kind=self._alpha)
