"""From the end of a round to the record of it (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from potluck.round.coordinator.director import Director
from potluck.round.plan.messages import Commit, CommittedMember, Exclusion, Plan, Restoration, RoundKey, shortened

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
    grace_seconds: float = 0.0,
    audited: int = 0,
    excluded: Mapping[str, Exclusion] | None = None,
    num_restored: int = 0,
    num_returned: int = 0,
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
        chunk_bytes=plan.chunk_bytes,
        aggregator=plan.aggregator,
        committed_at=committed_at,
        seconds=seconds,
        grace_seconds=grace_seconds,
        revisions=plan.revision,
        left_out=left_out,
        audited=audited,
        excluded=dict(excluded or {}),
        num_restored=num_restored,
        num_returned=num_returned,
    )


def make_restoration(
    restored: Restoration,
    before: Commit | None,
    *,
    key: RoundKey,
    coordinator: str,
    parent: str,
    committed_at: float,
    excluded: Mapping[str, Exclusion] | None = None,
) -> Commit:
    """The commit of an epoch whose state is an earlier one. Nobody else has it yet: everybody fetches it."""
    return Commit(
        epoch=key.epoch,
        key=key,
        term=key.token,
        coordinator=coordinator,
        members=(CommittedMember(peer=coordinator, weight=0.0, holds=True),),
        digest=restored.digest,
        parent=parent,
        layout=before.layout if before is not None else "",
        runs=before.runs if before is not None else (),
        committed_at=committed_at,
        grace_seconds=before.grace_seconds if before is not None else 0.0,
        excluded=dict(excluded or {}),
        restored=restored,
        num_restored=restored.order if not restored.cut else before.num_restored if before is not None else 0,
        num_returned=restored.order if restored.cut else before.num_returned if before is not None else 0,
    )


def _member(plan: Plan, index: int, holds: bool, director: Director | None) -> CommittedMember:
    member = plan.members[index]
    report = director.report_of(index) if director is not None else None
    return CommittedMember(
        peer=member.peer,
        weight=member.weight if member.sends else 0.0,  # who was left out has given nothing
        claimed=member.claimed,
        phases=member.phases if member.sends else 0.0,
        holds=holds,
        seconds=director.seconds_of(index) if director is not None else 0.0,
        sent_bytes=report.sent_bytes if report is not None else 0,
        received_bytes=report.received_bytes if report is not None else 0,
        trouble=member.trouble if holds else "",
    )
