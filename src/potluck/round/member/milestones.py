"""Where a member is in a round, said aloud for tests that make it fail right there (see potluck.faultpoints)."""

from __future__ import annotations

from potluck.faultpoints import reach
from potluck.round.member.lane import Letter
from potluck.round.plan.messages import Plan


class Milestones:
    """The points that one member passes in one round, each once."""

    def __init__(self, plan: Plan, me: int) -> None:
        chunks = [part.stop - part.start for part in plan.parts if part.reducer == me]
        self._labels = {
            "peer": plan.members[me].peer,
            "epoch": plan.key.epoch,
            "role": "reducer" if chunks else "sender",
        }
        self._num_contributions = plan.num_chunks - sum(chunks) if plan.members[me].sends else 0
        self._num_averages = sum(chunks) * (sum(member.receives for member in plan.members) - 1)
        self._contributions_sent = 0
        self._averages_sent = 0
        self._passed: set[str] = set()

    def planned(self) -> None:
        """It has the plan."""
        self._pass("planned")

    def sent(self, letter: Letter) -> None:
        """A letter has arrived."""
        if letter.is_average:
            self._averages_sent += 1
            if 2 * self._averages_sent >= self._num_averages:
                self._pass("half_averages_sent")
            return
        self._contributions_sent += 1
        self._pass("first_sent")
        if 2 * self._contributions_sent >= self._num_contributions:
            self._pass("half_sent")
        if self._contributions_sent >= self._num_contributions:
            self._pass("all_sent")

    def reduced(self) -> None:
        """A chunk is averaged."""
        self._pass("first_reduced")

    def complete(self) -> None:
        """All averages are here."""
        self._pass("complete")

    def reported(self) -> None:
        """The coordinator was told so."""
        self._pass("reported")

    def applying(self) -> None:
        """The epoch is committed, and its averages go into the tensors."""
        self._pass("applying")

    def _pass(self, point: str) -> None:
        if point not in self._passed:
            self._passed.add(point)
            reach(f"round.{point}", **self._labels)
