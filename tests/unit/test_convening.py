"""What comes before a round: when it is due, with whom, and what a coordinator before left complete."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from gatheringroom import commit_of, presence, ready

from potluck.hub.subjects import Subjects
from potluck.optim.methods.quorum import AdaptiveQuorum, ByMost
from potluck.peer.identity import Identity
from potluck.peer.lease import LeaseView
from potluck.peer.roster import Roster
from potluck.round.audit.exclusions import PATIENT_ATTEMPTS
from potluck.round.coordinator.adoption import Adoption
from potluck.round.coordinator.convening import ADOPT_SECONDS, RETURN_SECONDS, Convener, NoPlan, Term, Wait
from potluck.round.coordinator.gathering import GatherConfig, Proposal
from potluck.round.coordinator.trigger import Quorum, Trigger
from potluck.round.lineage import Lineage
from potluck.round.plan.messages import Completed, RoundKey
from potluck.round.plan.signing import sign_word
from potluck.sim.memoryhub import MemoryHub
from potluck.sim.virtualclock import VirtualClock

FORMER = Identity.temporary()
GRACE_SECONDS = 1.0


class Hall:
    """A convener, and all that it looks at: it stands for the session too."""

    def __init__(self, **gather: Any) -> None:
        self.clock = VirtualClock()
        self.roster = Roster()
        self.excluded: dict[str, str] = {}
        self.lineage = Lineage(MemoryHub("run").connect("HOST").store("lineage"), "run")
        self.leases = LeaseView()
        self.subjects = Subjects("run")
        self.counts: Counter[str] = Counter()
        self.convener = Convener(
            self,  # type: ignore[arg-type]
            self.leases,
            self.lineage,
            lambda _head: dict(self.excluded),
            GatherConfig(**gather),
            Quorum(grace_seconds=GRACE_SECONDS),
            self.counts,
        )
        self.term = Term(7, self.clock.monotonic())

    def now(self) -> float:
        """Of the hub."""
        return self.clock.wall()

    def come(self, peer: str, **card: Any) -> None:
        self.roster.apply(presence(peer, **card))

    def is_ready(self, *peers: str, **changes: Any) -> None:
        for peer in peers:
            if peer not in self.roster:
                self.come(peer)
            self.convener.ready_came(peer, ready(peer, **changes))

    def step(self, after_seconds: float = 0.0) -> Any:
        self.clock.advance(after_seconds)
        return self.convener.next_step(self.term)

    def members(self, after_seconds: float = 0.0) -> list[str] | None:
        """Who takes part, if a round begins now."""
        step = self.step(after_seconds)
        return [member.peer for member in step.plan.members] if isinstance(step, Proposal) else None


# When it is due


def test_a_round_begins_when_all_trainers_are_ready() -> None:
    hall = Hall()
    hall.come("A")
    assert hall.step() == Wait(None)
    hall.is_ready("A")
    proposal = hall.step()
    assert isinstance(proposal, Proposal)
    assert proposal.plan.key == RoundKey(epoch=1, token=7, attempt=0)
    assert proposal.plan.deadline > hall.clock.wall()


def test_the_plan_is_for_the_epoch_after_the_head_and_for_the_terms_attempt() -> None:
    hall = Hall()
    hall.lineage.head = commit_of(4)
    hall.term.attempt = 3
    hall.is_ready("A", epoch=5)
    assert hall.step().plan.key == RoundKey(epoch=5, token=7, attempt=3)


def test_others_are_waited_for_until_their_time_is_over() -> None:
    hall = Hall()
    hall.come("B")
    hall.is_ready("A")
    assert hall.step() == Wait(GRACE_SECONDS)
    assert hall.step(GRACE_SECONDS / 2) == Wait(GRACE_SECONDS / 2)
    assert hall.members(GRACE_SECONDS / 2) == ["A"]


def test_no_round_begins_before_its_time() -> None:
    hall = Hall()
    hall.is_ready("A")
    hall.term.not_before = hall.clock.monotonic() + 2.0
    assert hall.step() == Wait(2.0)
    hall.is_ready("A")
    assert hall.members(2.0) == ["A"]


@pytest.mark.parametrize("role", ["aux", "observer"])
def test_who_contributes_nothing_is_not_waited_for(role: str) -> None:
    hall = Hall()
    hall.come("B", role=role)
    hall.is_ready("A")
    assert hall.members() == ["A"]


def test_a_trainer_that_only_listens_this_time_is_not_waited_for() -> None:
    hall = Hall()
    hall.is_ready("B", sends=False, weight=0.0, layout="", runs=())
    hall.is_ready("A")
    assert hall.members() == ["A", "B"]


def test_after_an_outage_who_was_there_before_has_time_to_come_back() -> None:
    hall = Hall()
    hall.come("B", state="suspect")  # not alive: no trigger waits for it
    hall.is_ready("A")
    hall.convener.hub_came_back()
    assert hall.step() == Wait(RETURN_SECONDS)
    hall.clock.advance(RETURN_SECONDS - 1.0)
    hall.is_ready("A")
    assert hall.step() == Wait(pytest.approx(1.0))
    assert hall.members(1.0) == ["A"]


def test_after_an_outage_nobody_is_waited_for_if_all_are_back() -> None:
    hall = Hall()
    hall.convener.hub_came_back()
    hall.is_ready("A", "B")
    assert hall.members() == ["A", "B"]


def test_another_trigger_and_another_way_to_plan_count_from_the_next_round_on() -> None:
    hall = Hall()
    hall.is_ready("A")
    hall.convener.configure(GatherConfig(), Quorum(min_senders=2))
    assert hall.step() == Wait(None)
    hall.convener.configure(GatherConfig(trusted_reducers=True), Quorum())
    hall.is_ready("B")
    assert isinstance(hall.step(), NoPlan)


@pytest.mark.parametrize("trigger", [AdaptiveQuorum(), ByMost(AdaptiveQuorum().start)])
def test_a_new_coordinator_waits_for_stragglers_as_the_one_before_had_learnt(trigger: Trigger) -> None:
    hall = Hall()
    hall.convener.configure(GatherConfig(), trigger)
    hall.come("B")
    hall.is_ready("A")
    assert hall.step() == Wait(30.0)  # nothing is known
    hall.lineage.head = msgspec.structs.replace(commit_of(0), grace_seconds=2.5)
    hall.convener.resume()
    assert hall.step() == Wait(2.5)
    assert trigger.grace_seconds == 2.5  # for the next commit


# With whom


def test_who_is_gone_or_was_ready_for_an_epoch_that_is_committed_is_ready_no_more() -> None:
    hall = Hall()
    hall.is_ready("A", "B")
    hall.convener.gone("B")
    hall.clock.advance(GRACE_SECONDS)
    assert hall.members() == ["A"]
    hall.convener.committed(commit_of(1))
    assert hall.step() == Wait(None)


def test_who_is_excluded_has_no_part_and_is_not_waited_for() -> None:
    hall = Hall()
    hall.excluded = {"B": "it lied"}
    hall.come("B")
    hall.is_ready("A")
    assert hall.members() == ["A"]
    hall.is_ready("B")
    proposal = hall.step()
    assert [member.peer for member in proposal.plan.members] == ["A"]
    assert proposal.plan.left_out == {"B": "it lied"}
    hall.convener.gone("A")
    hall.roster.apply(presence("A", state="left"))
    assert hall.step() == Wait(None)  # an excluded peer alone is no quorum


def test_who_was_lost_again_and_again_is_done_without_until_an_epoch_is_committed() -> None:
    hall = Hall()
    for _ in range(PATIENT_ATTEMPTS):
        assert "B" not in hall.excluded
        hall.is_ready("A", "B", "C")
        assert hall.members() == ["A", "B", "C"]
        hall.convener.given_up(["B"])
    proposal = hall.step()
    assert [member.peer for member in proposal.plan.members] == ["A", "C"]
    assert "attempts" in proposal.plan.left_out["B"]
    hall.convener.committed(commit_of(1))
    hall.lineage.head = commit_of(1)
    hall.is_ready("A", "B", "C", epoch=2)
    assert hall.members() == ["A", "B", "C"]


def test_the_excluded_do_not_count_among_those_who_would_go_on() -> None:
    hall = Hall()
    hall.excluded = {"X": "it lied", "Y": "it lied"}
    for _ in range(PATIENT_ATTEMPTS):
        hall.convener.given_up(["A", "B"])
    hall.is_ready("A", "B", "C", "X", "Y")
    # Of A, B and C two were lost each time: that is most of them, and nobody is done without.
    assert hall.members() == ["A", "B", "C"]


def test_why_no_plan_is_possible_is_said_with_its_round() -> None:
    hall = Hall(trusted_reducers=True)
    hall.is_ready("A", "B")
    step = hall.step()
    assert isinstance(step, NoPlan)
    assert step.key == RoundKey(epoch=1, token=7, attempt=0)
    assert "trusted" in step.reason


# What was left complete


def completed(hall: Hall, *members: str, epoch: int = 1, digest: str = "d") -> Completed:
    """What a member says of a round of the coordinator before."""
    other = Hall()
    other.lineage.head = commit_of(epoch - 1) if epoch > 1 else None
    other.term.token = 6
    other.is_ready(*members, epoch=epoch, token=6)
    for member in members:
        other.roster.apply(presence(member, trusted=True))  # no audit
    hall.leases.past_holders[6] = FORMER.peer_id
    plan = other.step().plan
    return Completed(coordinator=FORMER.peer_id, plan=sign_word(plan, FORMER, "run"), digest=digest)


def test_what_all_members_completed_is_adopted_at_once() -> None:
    hall = Hall()
    hall.is_ready("A", "B", completed=completed(hall, "A", "B"))
    step = hall.step()
    assert isinstance(step, Adoption)
    assert (step.plan.key, step.digest, step.holders) == (RoundKey(epoch=1, token=6, attempt=0), "d", (0, 1))


def test_members_that_have_not_spoken_yet_are_waited_for_and_then_not() -> None:
    hall = Hall()
    said = completed(hall, "A", "B")
    hall.come("B")
    hall.is_ready("A", completed=said)
    step = hall.step(ADOPT_SECONDS)
    assert isinstance(step, Wait)
    assert step.seconds is not None
    assert 0 < step.seconds < ADOPT_SECONDS
    adopted = hall.step(0.01)
    assert isinstance(adopted, Adoption)
    assert adopted.holders == (0,)


def test_when_they_disagree_a_new_round_begins_after_that_time() -> None:
    hall = Hall()
    hall.is_ready("A", completed=completed(hall, "A", "B"))
    hall.is_ready("B", completed=completed(hall, "A", "B", digest="other"))
    assert isinstance(hall.step(), Wait)
    assert hall.members(ADOPT_SECONDS + 0.01) == ["A", "B"]


def test_what_does_not_count_is_counted_and_a_round_begins_at_once() -> None:
    hall = Hall()
    said = completed(hall, "A")
    hall.leases.past_holders.clear()
    hall.is_ready("A", completed=said)
    assert hall.members() == ["A"]
    assert hall.counts["bad_claims"] == 1
