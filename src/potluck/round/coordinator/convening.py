"""What comes before a round: whether it is due, with which peers, and what a coordinator before us left complete.

Nothing is sent or written here. The coordinator says what it hears, and asks what to do next: commit a round that was
complete when its coordinator went, begin one by this plan, tell everybody why no plan is possible, or wait.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from potluck.errors import PotluckError
from potluck.peer.groupsession import GroupSession
from potluck.peer.lease import LeaseView
from potluck.round.audit.exclusions import Absences
from potluck.round.coordinator.adoption import Adoption, CompletionClaim, find_adoption, read_claims
from potluck.round.coordinator.gathering import (
    Candidate,
    GatherConfig,
    Gathering,
    Proposal,
    alive_trainers,
    present_trainers,
    senders,
)
from potluck.round.coordinator.trigger import ReadySender, Trigger
from potluck.round.lineage import Lineage
from potluck.round.plan.messages import Commit, Ready, RoundKey

logger = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS = 0.1
ADOPT_SECONDS = 1.0  # how long a new coordinator waits for members that may have completed the round before
RETURN_SECONDS = 7.5  # after an outage of the hub its peers try every 2 s, and may be held up until the guard is there


@dataclass(slots=True)
class Term:
    """One term of holding the lease."""

    token: int
    since: float
    attempt: int = 0  # the next round's; counted by the coordinator that begins it
    not_before: float = 0.0  # no new round before this


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is to be done before something happens, or this time has passed (None: it is not known how long)."""

    seconds: float | None


@dataclass(frozen=True, slots=True)
class NoPlan:
    """A round is due, and no plan is possible."""

    key: RoundKey
    reason: str


NextStep = Adoption | Proposal | NoPlan | Wait


class Convener:
    """Who is ready, and what follows."""

    def __init__(
        self,
        session: GroupSession,
        leases: LeaseView,
        lineage: Lineage,
        barred: Callable[[Commit | None], dict[str, str]],
        gather: GatherConfig,
        trigger: Trigger,
        counts: Counter[str],
    ) -> None:
        """`barred` names the members that audits exclude, and why; `counts` are the coordinator's."""
        self._session = session
        self._leases = leases
        self._lineage = lineage
        self._found_out = barred
        self._trigger = trigger
        self._counts = counts
        self._gathering = Gathering(gather)
        self._absences = Absences()
        self._hub_back_at = -math.inf

    def configure(self, gather: GatherConfig, trigger: Trigger) -> None:
        """Plan and start the next rounds by this."""
        self._gathering.config = gather
        self._trigger = trigger
        self.resume()

    def resume(self) -> None:
        """Wait for stragglers as the coordinator before did, until it is known better."""
        if (head := self._lineage.head) is not None and head.grace_seconds > 0:
            self._trigger.resume(head.grace_seconds)

    # What happens

    def ready_came(self, peer: str, ready: Ready) -> None:
        """A peer says that it is ready, or that it is not any more."""
        now = self._session.clock.monotonic()
        self._gathering.take(peer, ready, now)
        if ready.sends and ready.weight > 0 and not ready.withdrawn:
            self._trigger.came_late(ready.epoch, peer, now)

    def gone(self, peer: str) -> None:
        """A peer is dead, or has left."""
        self._gathering.forget(peer)

    def given_up(self, lost: Iterable[str]) -> None:
        """An attempt came to nothing, in which these were lost."""
        self._absences.note(lost)

    def committed(self, commit: Commit) -> None:
        """The head of the lineage has moved."""
        self._gathering.committed(commit)
        self._absences.clear()

    def measured(self, allowances: Mapping[str, float]) -> None:
        """How many medians each peer may give to an epoch over time, by its measured speed (weights.py)."""
        self._gathering.weights.allowances = allowances

    def hub_came_back(self) -> None:
        """The hub was away, for the others too."""
        self._hub_back_at = self._session.clock.monotonic()

    # What to do

    def next_step(self, term: Term) -> NextStep:
        """What to do while no round is under way."""
        now = self._session.clock.monotonic()
        epoch = self._lineage.epoch + 1
        hub_now = self._session.now()
        candidates = self._gathering.candidates(
            self._session.roster, epoch=epoch, token=term.token, now=now, hub_now=hub_now
        )
        claims = self._claims(candidates, epoch)
        if claims:
            is_late = now - term.since > ADOPT_SECONDS
            alive = {presence.peer: presence.card.session for presence in self._session.roster}
            waiting = {candidate.peer for candidate in candidates}
            adoption = find_adoption(claims, alive=alive, waiting=waiting, is_late=is_late)
            if adoption is not None:
                return adoption
            if not is_late:
                return Wait(LOOK_AGAIN_SECONDS)
        barred = self._barred(candidates)
        ready = senders(candidate for candidate in candidates if candidate.peer not in barred)
        due_at = self._due_at(candidates, ready, barred)
        if due_at is None:
            return Wait(None)
        wait_seconds = max(due_at, term.not_before) - now
        if wait_seconds > 0:
            return Wait(wait_seconds)
        key = RoundKey(epoch=epoch, token=term.token, attempt=term.attempt)
        try:
            proposal = self._gathering.propose(candidates, key, hub_now=hub_now, barred=barred)
        except PotluckError as error:
            return NoPlan(key, str(error))
        self._trigger.begun(epoch, ready, now)
        return proposal

    def _due_at(self, candidates: list[Candidate], ready: list[ReadySender], barred: dict[str, str]) -> float | None:
        """When to start; None: that depends on who else comes."""
        roster = self._session.roster
        listening = {candidate.peer for candidate in candidates if not candidate.sends}
        due_at = self._trigger.due_at(ready, alive_trainers(roster) - barred.keys() - listening)
        return max(due_at, self._returned_by(ready)) if due_at is not None else None

    def _barred(self, candidates: list[Candidate]) -> dict[str, str]:
        """Who may not take part in the next attempt, and why."""
        barred = self._found_out(self._lineage.head)
        return barred | self._absences.barred([c.peer for c in candidates if c.peer not in barred])

    def _returned_by(self, ready: list[ReadySender]) -> float:
        """Until when to wait for trainers that were there before the hub was away."""
        missing = present_trainers(self._session.roster) - {sender.peer for sender in ready}
        return self._hub_back_at + RETURN_SECONDS if missing else -math.inf

    def _claims(self, candidates: list[Candidate], epoch: int) -> list[CompletionClaim]:
        """What members say that they completed under a coordinator before us."""
        said = {c.peer: c.ready.completed for c in candidates if c.ready.completed is not None}
        claims, bad = read_claims(said, self._session.subjects.scope, self._leases.past_holders, epoch)
        self._counts["bad_claims"] += len(bad)
        for peer, why in bad.items():
            logger.debug("what %s says that it completed does not count: %s", peer, why)
        return claims
