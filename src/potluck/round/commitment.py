"""From the end of a round to the record of it (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from potluck.round.director import Director
from potluck.round.plan import Commit, CommittedMember, Exclusion, Plan, shortened

NOT_HELD = "it lacked averages when the epoch was committed"


def make_commit(
    plan: Plan,
    digest: str,
    holders: tuple[int, ...],
    director: Director | None,
    *,
    term: int,
    coordinator: str,
    parent: str,
    committed_at: float,
    seconds: float,
    audited: int = 0,
    excluded: Mapping[str, Exclusion] | None = None,
) -> Commit:
    """The commit of a plan's epoch; without a director, for a round that somebody else had watched over."""
    left_out = dict(plan.left_out)
    for index, member in enumerate(plan.members):
        if index not in holders:
            left_out[member.peer] = shortened(member.trouble or NOT_HELD)
    return Commit(
        epoch=plan.key.epoch,
        key=plan.key,
        term=term,
        coordinator=coordinator,
        members=tuple(_member(plan, index, index in holders, director) for index in range(len(plan.members))),
        digest=digest,
        parent=parent,
        layout=plan.layout,
        runs=plan.runs,
        aggregator=plan.aggregator,
        committed_at=committed_at,
        seconds=seconds,
        revisions=plan.revision,
        left_out=left_out,
        audited=audited,
        excluded=dict(excluded or {}),
    )


def _member(plan: Plan, index: int, holds: bool, director: Director | None) -> CommittedMember:
    member = plan.members[index]
    report = director.report_of(index) if director is not None else None
    return CommittedMember(
        peer=member.peer,
        weight=member.weight,
        holds=holds,
        seconds=director.seconds_of(index) if director is not None else 0.0,
        sent_bytes=report.sent_bytes if report is not None else 0,
        received_bytes=report.received_bytes if report is not None else 0,
    )
