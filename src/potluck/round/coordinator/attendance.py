"""What the members of one round say of themselves, as far as the coordinator has heard it (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from potluck.round.plan.messages import Report, from_bitmap


@dataclass(slots=True)
class _Known:
    """What is known of one member."""

    heard_at: float
    report: Report | None = None
    revision: int = -1  # of the plan that its newest report answers
    done_at: float | None = None  # when it first had all averages
    excused: bool = False  # since it was last heard


class Attendance:
    """The newest report of each member, and when it came."""

    def __init__(self, num_members: int, num_chunks: int, now: float) -> None:
        self._num_chunks = num_chunks
        self._members = [_Known(heard_at=now) for _ in range(num_members)]

    def take(self, member: int, report: Report, now: float) -> bool:
        """Take in a report; False if it is older than what is known."""
        known = self._members[member]
        is_old = known.report is not None and report.number < known.report.number  # reports come on two ways
        if report.revision < known.revision or is_old:
            return False
        known.heard_at, known.excused = now, False
        known.report, known.revision = report, report.revision
        if report.digest and known.done_at is None:
            known.done_at = now
        return True

    def excuse(self, seconds: float, now: float) -> None:
        """For so long until now nobody could be heard. Their silence begins anew; if it was excused before, it goes on.

        So one that says nothing is found out, however often its coordinator stands still.
        """
        for known in self._members:
            known.heard_at = min(now, known.heard_at + seconds) if known.excused else now
            known.excused = True

    def report_of(self, member: int) -> Report | None:
        """The newest report of a member."""
        return self._members[member].report

    def done_at(self, member: int) -> float | None:
        """When a member first had all averages."""
        return self._members[member].done_at

    def silent_seconds(self, member: int, now: float) -> float:
        """For how long nothing has been heard from a member."""
        return now - self._members[member].heard_at

    def idle_seconds(self, member: int) -> float:
        """For how long a member has had nothing of what it waits for, as it says itself."""
        report = self._members[member].report
        return report.idle_seconds if report is not None else 0.0

    def is_current(self, member: int, revision: int) -> bool:
        """Whether its newest report answers this revision of the plan."""
        return self._members[member].revision >= revision

    def is_done(self, member: int, revision: int) -> bool:
        """Whether it holds all averages of this revision."""
        return self.is_current(member, revision) and bool(self.digest(member))

    def digest(self, member: int) -> str:
        """The digest of the averages that it holds; empty while it lacks some."""
        report = self._members[member].report
        return report.digest if report is not None else ""

    def held_by_all(self, members: Iterable[int]) -> set[int]:
        """The chunks whose averages all of these members hold."""
        return set.intersection(*(self._held(member) for member in members))

    def waits_for(self, member: int) -> tuple[int, ...]:
        """The members whose contributions it waits for, as a reducer."""
        return self._known_members(report.waiting_for) if (report := self._members[member].report) else ()

    def lacks_from(self, member: int) -> tuple[int, ...]:
        """The reducers whose averages it lacks."""
        return self._known_members(report.missing_from) if (report := self._members[member].report) else ()

    def waited_for(self) -> set[int]:
        """All peers that are waited for."""
        return {other for member in range(len(self._members)) for other in self.waits_for(member)}

    def _held(self, member: int) -> set[int]:
        report = self._members[member].report
        return from_bitmap(report.held, self._num_chunks) if report is not None else set()

    def _known_members(self, named: Collection[int]) -> tuple[int, ...]:
        return tuple(index for index in named if index < len(self._members))
