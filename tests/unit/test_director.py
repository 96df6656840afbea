"""The director by itself, report by report: whose word counts for what, and who is waited for how long."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from roundworld import KEY, make_plan

from potluck.round.coordinator.director import Decision, Director, DirectorTimeouts, Finish, GiveUp, Publish
from potluck.round.coordinator.reassignment import reassign
from potluck.round.plan.messages import Offence, Part, Plan, Report, bitmap

PATIENCE = DirectorTimeouts()
SILENT = PATIENCE.silent_seconds
STALLED = PATIENCE.stalled_seconds
STEP_SECONDS = PATIENCE.pause_seconds / 1.5


class Desk:
    """A director, and reports made up for it."""

    def __init__(self, plan: Plan, patience: DirectorTimeouts = PATIENCE, *, coordinator: str = "") -> None:
        self.director = Director(plan, patience, 0.0, coordinator=coordinator)
        self.now = 0.0

    @property
    def plan(self) -> Plan:
        return self.director.plan

    def report(self, member: int, **changes: Any) -> list[Decision]:
        values = {"key": KEY, "revision": self.plan.revision, **changes}
        return self.director.report_arrived(member, Report(**values), self.now)

    def done(self, *members: int, digest: str = "d") -> list[Decision]:
        """These hold everything."""
        held = bitmap(range(self.plan.num_chunks))
        return [decision for member in members for decision in self.report(member, held=held, digest=digest)]

    def tick(self, now: float, *, heard: tuple[int, ...] = ()) -> list[Decision]:
        """Time passes, in steps so small that we did not stand still; these have said meanwhile that they are there."""
        decisions: list[Decision] = []
        while self.now < now:
            self.now = min(now, self.now + STEP_SECONDS)
            decisions += [decision for member in heard for decision in self.report(member)]
            decisions += self.director.tick(self.now)
        return decisions

    def receivers(self) -> list[int]:
        return [index for index, member in enumerate(self.plan.members) if member.receives]

    def senders(self) -> list[int]:
        return [index for index, member in enumerate(self.plan.members) if member.sends]


def finish_of(decisions: list[Decision]) -> Finish:
    [finish] = [decision for decision in decisions if isinstance(decision, Finish)]
    return finish


def test_a_round_that_is_given_up_says_when_and_who() -> None:
    desk = Desk(make_plan(3, 3, 2))
    desk.now = 2.0
    desk.director.member_gone(0, "dead", 2.0)
    desk.director.member_gone(1, "left", 2.0)
    [decision] = [each for each in desk.director.member_gone(2, "dead", 2.0) if isinstance(each, GiveUp)]
    failure = desk.director.failure(decision.reason, 5.0)
    assert (failure.key, failure.phase, failure.seconds) == (KEY, "exchanging", 5.0)
    assert failure.members == ("peer0", "peer1", "peer2")
    assert failure.troubles == {"peer0": "dead", "peer1": "left", "peer2": "dead"}


# Whose word counts


def test_a_report_of_another_round_counts_for_nothing() -> None:
    desk = Desk(make_plan(2, 2, 2))
    other = msgspec.structs.replace(KEY, attempt=KEY.attempt + 1)
    for member in (0, 1):
        assert desk.report(member, key=other, held=bitmap(range(4)), digest="d") == []
    assert desk.director.report_of(0) is None
    assert finish_of(desk.done(0, 1)).holders == (0, 1)


def test_a_report_about_an_older_plan_does_not_replace_a_newer_one() -> None:
    desk = Desk(make_plan(3, 3, 2))
    desk.director.member_gone(2, "dead", 0.0)
    desk.report(0, held=bitmap([1]))
    desk.report(0, revision=0, held=bitmap([1, 2]))
    newest = desk.director.report_of(0)
    assert newest is not None
    assert newest.held == bitmap([1])


def test_what_comes_after_the_end_changes_nothing() -> None:
    desk = Desk(make_plan(3, 3, 2))
    finish_of(desk.done(0, 1, 2))
    assert desk.report(0, number=9, offences=(Offence(member=1, reason="bad"),)) == []
    assert desk.director.member_gone(1, "dead", 1.0) == []
    assert desk.tick(100.0) == []
    assert desk.director.expired() == []
    assert desk.plan.revision == 0


def test_only_reducers_accuse_others_and_everybody_may_accuse_itself() -> None:
    desk = Desk(make_plan(4, 2, 2, clients=2))
    assert desk.report(3, offences=(Offence(member=2, reason="bad"),)) == []
    assert desk.senders() == [0, 1, 2, 3]
    assert isinstance(desk.report(3, offences=(Offence(member=3, reason="NaN"),))[0], Publish)
    assert desk.senders() == [0, 1, 2]
    assert isinstance(desk.report(0, offences=(Offence(member=2, reason="bad"),))[0], Publish)
    assert desk.senders() == [0, 1]
    assert desk.plan.members[2].trouble == "bad (seen by peer0)"
    assert desk.receivers() == [0, 1, 2, 3]


def test_an_accusation_of_nobody_or_of_one_that_sends_no_more_changes_nothing() -> None:
    desk = Desk(make_plan(3, 3, 2))
    desk.report(0, offences=(Offence(member=1, reason="bad"),))
    revision = desk.plan.revision
    assert desk.report(2, offences=(Offence(member=1, reason="bad"), Offence(member=3, reason="who?"))) == []
    assert desk.plan.revision == revision


@pytest.mark.parametrize("lie", ["0" * 32, "f" * 32])
@pytest.mark.parametrize("coordinator", [0, 1, 3])
def test_of_equally_many_digests_the_coordinators_own_counts(coordinator: int, lie: str) -> None:
    desk = Desk(make_plan(4, 2, 1), coordinator=f"peer{coordinator}")
    desk.done(0, 1, digest="d" * 32)
    finish = finish_of(desk.done(2, 3, digest=lie))
    assert finish.digest == ("d" * 32 if coordinator < 2 else lie)
    assert finish.holders == ((0, 1) if coordinator < 2 else (2, 3))


def test_the_coordinators_own_digest_counts_for_no_more_than_any_other_where_most_hold_one() -> None:
    desk = Desk(make_plan(3, 2, 1), coordinator="peer0")
    desk.done(0, digest="a")
    assert finish_of(desk.done(1, 2, digest="b")).holders == (1, 2)


@pytest.mark.parametrize("coordinator", ["", "peer4"])
def test_where_nobody_can_tell_whose_averages_are_right_nothing_is_committed(coordinator: str) -> None:
    """The coordinator is no member, or holds what fewer hold than either of two others."""
    desk = Desk(make_plan(5 if coordinator else 4, 2, 1), coordinator=coordinator)
    if coordinator:
        desk.done(4, digest="x")
    desk.done(0, 1, digest="d" * 32)
    [end] = desk.done(2, 3, digest="0" * 32)
    assert isinstance(end, GiveUp)
    assert "peer0 holds dddddddd" in end.reason
    assert "peer3 holds 00000000" in end.reason


def test_where_an_audit_follows_it_finds_out_whose_averages_are_right() -> None:
    desk = Desk(msgspec.structs.replace(make_plan(2, 2, 1), audit=True))
    desk.done(0, digest="b")
    assert finish_of(desk.done(1, digest="a")).holders == (1,)


def test_who_holds_something_else_is_left_out_and_its_averages_are_not_done_again() -> None:
    desk = Desk(make_plan(3, 3, 2))
    desk.done(0, 1)
    finish = finish_of(desk.done(2, digest="other"))
    assert finish.holders == (0, 1)
    assert [member.receives for member in finish.plan.members] == [True, True, False]
    assert finish.plan.parts == desk.plan.parts
    assert {part.generation for part in finish.plan.parts} == {0}
    desk.director.overrule({}, {}, (0,), 1.0)
    desk.done(0, 1)
    again = [part for part in desk.plan.parts if part.generation]
    assert [(part.start, part.stop) for part in again] == [(0, 1)]  # and no more than an audit wants


# Who is out, and what that costs


def test_a_round_needs_more_holders_than_were_lost() -> None:
    desk = Desk(make_plan(2, 1, 2))
    desk.tick(SILENT + 0.1, heard=(0,))
    assert desk.receivers() == [0]
    assert desk.director.lost == ("peer1",)
    [end] = desk.done(0)
    assert isinstance(end, GiveUp)
    assert "too many members were lost" in end.reason
    assert "peer1" in end.reason


def test_who_was_lost_and_turns_out_to_be_dead_does_not_stand_in_the_way() -> None:
    desk = Desk(make_plan(2, 1, 2))
    desk.tick(SILENT + 0.1, heard=(0,))
    assert desk.director.member_gone(1, "dead", desk.now) == []
    assert desk.director.lost == ()
    assert finish_of(desk.done(0)).holders == (0,)


def test_who_did_not_testify_counts_as_lost_and_who_lied_does_not() -> None:
    for liars, missing, is_finished in (({1: "lied", 2: "lied"}, {}, True), ({}, {1: "silent", 2: "silent"}, False)):
        desk = Desk(make_plan(3, 1, 2))
        finish_of(desk.done(0, 1, 2))
        desk.now = 50.0
        desk.director.overrule(liars, missing, (), desk.now)
        assert desk.receivers() == [0]
        decisions = desk.done(0)
        assert isinstance(decisions[-1], Finish if is_finished else GiveUp)


def test_who_dies_during_an_audit_does_not_stand_in_the_way_of_the_rest() -> None:
    """A coordinator, one that lied, and one that died before it could testify: the coordinator goes on alone."""
    for missing in ({}, {2: "it did not testify"}):
        desk = Desk(make_plan(3, 3, 2))
        finish_of(desk.done(0, 1, 2))
        assert desk.director.member_gone(2, "dead", 1.0) == []
        desk.now = 2.0
        desk.director.overrule({1: "it lied"}, missing, (0, 1, 2, 3, 4, 5), desk.now)
        assert desk.receivers() == [0]
        assert [member.trouble for member in desk.plan.members] == ["", "it lied", "dead"]
        assert desk.director.lost == ()
        assert {part.reducer for part in desk.plan.parts} == {0, 1, 2}
        desk.report(0)
        assert {part.reducer for part in desk.plan.parts} == {0}
        assert finish_of(desk.done(0)).holders == (0,)


def test_who_was_dead_before_an_audit_does_not_count_as_lost_for_not_testifying() -> None:
    desk = Desk(make_plan(3, 3, 2))
    desk.director.member_gone(2, "dead", 0.5)
    desk.report(0)
    desk.report(1)
    finish_of(desk.done(0, 1))
    desk.director.overrule({1: "it lied"}, {2: "it did not testify"}, (), 2.0)
    assert desk.director.lost == ()
    assert desk.plan.members[2].trouble == "dead"


def test_after_an_audit_everybody_has_time_to_answer_again() -> None:
    desk = Desk(make_plan(3, 3, 2))
    finish_of(desk.done(0, 1, 2))
    desk.tick(50.0)
    desk.director.overrule({}, {}, (0,), desk.now)
    desk.tick(50.0 + SILENT / 2)
    assert desk.receivers() == [0, 1, 2]


def test_chunks_that_an_audit_spoilt_are_done_again_once() -> None:
    desk = Desk(make_plan(3, 3, 2))
    finish_of(desk.done(0, 1, 2))
    desk.director.overrule({}, {}, (2, 3), 1.0)
    again = [part for part in desk.plan.parts if part.generation]
    assert sorted(chunk for part in again for chunk in range(part.start, part.stop)) == [2, 3]
    assert {part.reducer for part in again} == {0, 1}
    desk.director.member_gone(1, "dead", 2.0)
    for member in (0, 2):
        decisions = desk.report(member, held=bitmap(range(6)))
    assert decisions == [], "what all hold by now stays as it is"
    assert {part.generation for part in desk.plan.parts} == {0, 1}


def test_a_round_without_anybody_who_contributes_is_given_up() -> None:
    desk = Desk(make_plan(3, 1, 2, aux=2))
    [end] = [decision for decision in desk.director.member_gone(2, "dead", 0.0) if isinstance(decision, GiveUp)]
    assert "nobody is left who could contribute" in end.reason
    desk = Desk(make_plan(3, 1, 2, aux=2))
    [end] = [d for d in desk.report(2, offences=(Offence(member=2, reason="NaN"),)) if isinstance(d, GiveUp)]
    assert "NaN" in end.reason


def test_chunks_are_taken_over_when_all_survivors_have_answered_and_not_before() -> None:
    desk = Desk(make_plan(4, 2, 2))
    desk.director.member_gone(1, "dead", 0.0)
    lost = desk.plan.parts
    for member in (0, 2):
        desk.report(member)
        assert desk.plan.parts == lost
    desk.report(3)
    assert {part.reducer for part in desk.plan.parts} <= {0, 2, 3}


def test_a_round_does_not_end_while_chunks_are_to_be_done_again() -> None:
    """All say that they are done, under a revision that already takes chunks from one of them."""
    desk = Desk(make_plan(3, 3, 2))
    finish_of(desk.done(0, 1, 2))
    decisions = desk.director.overrule({}, {}, (0,), 1.0)
    assert not [decision for decision in decisions if isinstance(decision, Finish)]
    assert not [decision for decision in desk.done(0, 1) if isinstance(decision, Finish)]


# Time


def test_how_long_a_member_took_is_counted_to_when_it_first_had_everything() -> None:
    desk = Desk(make_plan(3, 3, 2))
    assert desk.director.seconds_of(0) == 0.0
    desk.now = 1.5
    desk.done(0)
    desk.now = 4.0
    desk.report(1, offences=(Offence(member=2, reason="bad"),))
    desk.done(0)
    assert desk.director.seconds_of(0) == 1.5


def test_who_has_everything_may_be_silent() -> None:
    desk = Desk(make_plan(3, 1, 2))
    desk.done(0)
    desk.tick(SILENT + 0.1, heard=(1, 2))
    assert desk.receivers() == [0, 1, 2]
    desk.tick(2 * SILENT + 0.3, heard=(1,))
    assert desk.receivers() == [0, 1]


@pytest.mark.parametrize("lag_seconds", [0.3, 0.8, 2.0])
def test_a_coordinator_that_always_lags_finds_out_who_is_silent_all_the_same(lag_seconds: float) -> None:
    desk = Desk(make_plan(3, 1, 2))
    for _ in range(5):
        desk.now += lag_seconds
        desk.director.tick(desk.now)
        for member in (0, 1):
            desk.report(member)
    assert desk.receivers() == ([0, 1] if 5 * lag_seconds > SILENT + 0.1 else [0, 1, 2])
    for _ in range(5):
        desk.now += lag_seconds
        desk.director.tick(desk.now)
        for member in (0, 1):
            desk.report(member)
    assert desk.receivers() == [0, 1]


def test_a_coordinator_that_always_lags_waits_for_no_straggler_for_ever() -> None:
    desk = Desk(make_plan(3, 1, 2))
    desk.done(0, 1)
    for _ in range(8):
        desk.now += 0.8
        desk.report(2)
        desk.director.tick(desk.now)
        if len(desk.receivers()) < 3:
            break
    assert desk.receivers() == [0, 1]


@pytest.mark.parametrize("pause_seconds", [1.0, 5.0, 60.0])
def test_who_was_not_heard_since_the_last_pause_is_excused_for_the_next_one_too(pause_seconds: float) -> None:
    """The hub was away twice in a row, and nobody could say anything in between."""
    desk = Desk(make_plan(3, 1, 2))
    desk.tick(0.2, heard=(0, 1, 2))
    for _ in range(2):
        desk.now += pause_seconds
        desk.director.tick(desk.now)
        desk.tick(desk.now + 0.2)
    assert desk.receivers() == [0, 1, 2]


def ticking(desk: Desk, until: float, *, heard: tuple[int, ...]) -> float | None:
    """Let time pass in small steps; when somebody was left out, if anybody was."""
    while desk.now < until:
        desk.tick(desk.now + 0.25, heard=heard)
        if len(desk.receivers()) < len(desk.plan.members):
            return desk.now
    return None


@pytest.mark.parametrize(
    ("majority_at", "expected_seconds", "left_out_at"),
    [(0.0, 0.0, 2.0), (0.0, 8.0, 8.0), (5.0, 0.0, 10.0), (1.0, 0.0, 3.0)],
    ids=["a moment", "by measured speeds", "twice as long as most", "a moment from then"],
)
def test_stragglers_are_waited_for(majority_at: float, expected_seconds: float, left_out_at: float) -> None:
    desk = Desk(make_plan(4, 1, 2), DirectorTimeouts(expected_seconds=expected_seconds))
    assert ticking(desk, majority_at, heard=(0, 1, 2, 3)) is None
    desk.done(0, 1, 2)
    assert ticking(desk, 20.0, heard=(3,)) == pytest.approx(left_out_at, abs=0.3)
    assert "still lacked averages" in desk.plan.members[3].trouble


def test_half_of_the_members_are_not_most() -> None:
    desk = Desk(make_plan(4, 1, 2))
    desk.done(0, 1)
    assert ticking(desk, 20.0, heard=(2, 3)) is None


def test_with_a_new_revision_the_wait_for_stragglers_begins_anew() -> None:
    desk = Desk(make_plan(5, 1, 2))
    desk.done(0, 1, 2, 3)
    desk.tick(1.75, heard=(4,))
    desk.report(0, number=1, offences=(Offence(member=4, reason="bad"),))
    desk.now = 2.0
    desk.report(0, number=2, held=bitmap(range(2)), digest="d")
    desk.done(1, 2, 3)
    desk.tick(2.25, heard=(4,))
    assert desk.receivers() == [0, 1, 2, 3, 4]


def test_a_plan_that_somebody_has_not_answered_is_said_again() -> None:
    desk = Desk(make_plan(3, 1, 2))
    for member in (0, 1):
        desk.report(member)
    assert desk.tick(PATIENCE.repeat_seconds / 2) == []
    assert desk.tick(PATIENCE.repeat_seconds) == [Publish(desk.plan)]
    assert desk.tick(PATIENCE.repeat_seconds * 1.5) == []
    desk.report(2)
    assert desk.tick(PATIENCE.repeat_seconds * 2.5) == []


# Links that are broken


def broken(desk: Desk) -> dict[int, set[int]]:
    return desk.director._broken_links()


def test_who_has_had_nothing_for_long_blames_those_it_waits_for() -> None:
    desk = Desk(make_plan(4, 2, 2))
    for member in range(4):
        desk.report(member)
    desk.report(0, idle_seconds=STALLED - 0.1, waiting_for=(2,))
    assert broken(desk) == {}
    desk.report(0, idle_seconds=STALLED, waiting_for=(2, 9))
    assert broken(desk) == {0: {2}}
    desk.report(3, idle_seconds=STALLED, missing_from=(1, 9))
    assert broken(desk) == {0: {2}, 1: {3}}


def test_nobody_is_blamed_who_is_out_or_sends_nothing_any_more() -> None:
    desk = Desk(make_plan(4, 2, 2))
    desk.report(1, offences=(Offence(member=2, reason="bad"),))
    desk.director.member_gone(3, "dead", 0.0)
    for member in (0, 1, 2):
        desk.report(member, idle_seconds=STALLED, waiting_for=(2, 3), missing_from=(3,))
    assert broken(desk) == {}


def test_a_reducer_is_not_blamed_while_it_waits_itself_or_has_not_answered_the_plan() -> None:
    desk = Desk(make_plan(4, 2, 2))
    for member in (0, 1, 2):
        desk.report(member)
    desk.report(0, waiting_for=(3,))
    desk.report(2, idle_seconds=STALLED, missing_from=(0,))
    assert broken(desk) == {}  # its averages are missing because it waits
    desk.report(0)
    assert broken(desk) == {0: {2}}
    desk.director.member_gone(3, "dead", 0.0)
    desk.report(2, idle_seconds=STALLED, missing_from=(0,))
    assert broken(desk) == {}  # perhaps it does not know of the plan yet


def test_a_broken_link_is_dealt_with_once() -> None:
    desk = Desk(make_plan(4, 2, 2))
    for member in range(4):
        desk.report(member)
    desk.report(0, idle_seconds=STALLED, waiting_for=(2,))
    desk.tick(0.1)
    assert desk.receivers() == [0, 1, 2, 3]
    assert "nothing gets through between it and peer2" in desk.plan.members[0].trouble
    revision = desk.plan.revision
    desk.report(0, idle_seconds=STALLED, waiting_for=(2,))
    desk.tick(0.2)
    assert desk.plan.revision == revision
    for member in range(4):
        desk.report(member)
    assert {part.reducer for part in desk.plan.parts if part.generation} <= {1, 3}


# Who does lost chunks again


def test_lost_chunks_are_shared_out_and_what_all_hold_stays() -> None:
    parts = (Part(reducer=0, start=0, stop=4), Part(reducer=1, start=4, stop=8, generation=2))
    assert reassign(parts, {9}, set(), [2]) == parts
    assert reassign(parts, {1}, {5}, [0, 2, 3]) == (
        parts[0],
        Part(reducer=0, start=4, stop=5, generation=3),
        Part(reducer=1, start=5, stop=6, generation=2),
        Part(reducer=2, start=6, stop=7, generation=3),
        Part(reducer=3, start=7, stop=8, generation=3),
    )
    assert reassign(parts, {1}, set(range(4, 8)), []) == parts
    assert reassign(parts, {1}, {5}, []) is None
