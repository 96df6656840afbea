"""Rounds that a coordinator left complete but uncommitted (pure).

When a coordinator dies between the last report and the commit, all members hold the averages and nobody needs to move a
byte again. Each member says so in its Ready, with the plan as the dead coordinator signed it. The next one commits that
round if every member of it that is still alive holds the same averages; else it starts a new one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from potluck.errors import ProtocolError
from potluck.round.plan.messages import Completed, Plan
from potluck.round.plan.signing import read_word


@dataclass(frozen=True, slots=True)
class CompletionClaim:
    """A member says that it completed a round. The plan's signature has been checked."""

    peer: str
    plan: Plan
    digest: str


@dataclass(frozen=True, slots=True)
class Adoption:
    """A round that can be committed as it is."""

    plan: Plan
    digest: str
    holders: tuple[int, ...]


def read_claim(peer: str, completed: Completed, run: str, coordinators: Mapping[int, str]) -> CompletionClaim:
    """What a member says; ProtocolError unless one of these coordinators, by token, signed that plan in its term."""
    plan = read_word(completed.plan, completed.coordinator, run)
    if not isinstance(plan, Plan) or coordinators.get(plan.key.token) != completed.coordinator:
        raise ProtocolError(f"{completed.coordinator} is not known to have coordinated {plan.key}")
    return CompletionClaim(peer, plan, completed.digest)


def read_claims(
    said: Mapping[str, Completed], run: str, coordinators: Mapping[int, str], epoch: int
) -> tuple[list[CompletionClaim], dict[str, str]]:
    """What these members say of that epoch; and of those that do not count, why.

    A round that should have been audited is not claimed: who is bound to what, only its coordinator had heard.
    """
    claims: list[CompletionClaim] = []
    bad: dict[str, str] = {}
    for peer, completed in said.items():
        try:
            claim = read_claim(peer, completed, run, coordinators)
        except ProtocolError as error:
            bad[peer] = str(error)
            continue
        if claim.plan.key.epoch == epoch and not claim.plan.audit:
            claims.append(claim)
    return claims, bad


def find_adoption(
    claims: Sequence[CompletionClaim], *, alive: Mapping[str, str], waiting: Collection[str], is_late: bool
) -> Adoption | None:
    """The newest round that all of its living members completed alike.

    `alive` are the sessions of living peers, `waiting` who is ready for this epoch. Once it `is_late`, members that
    live and have not said that they are ready count as gone: they may have stopped waiting.
    """
    if not claims:
        return None
    key = max(claim.plan.key for claim in claims)
    claims = [claim for claim in claims if claim.plan.key == key]
    plan = max((claim.plan for claim in claims), key=lambda plan: plan.revision)
    digests = {claim.peer: claim.digest for claim in claims}
    if len(set(digests.values())) != 1:
        return None
    for member in plan.members:
        lives = member.receives and alive.get(member.peer) == member.session
        if lives and member.peer not in digests and (member.peer in waiting or not is_late):
            return None
    holders = tuple(index for index, member in enumerate(plan.members) if member.peer in digests)
    return Adoption(plan, claims[0].digest, holders) if holders else None
