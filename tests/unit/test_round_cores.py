"""Exchange and director together, on a network that reorders between pairs, kills, freezes and cuts."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from roundworld import KEY, World, make_plan

from potluck.round.coordinator.commitment import make_commit
from potluck.round.coordinator.director import Director, DirectorTimeouts, Finish, GiveUp
from potluck.round.coordinator.reach import Reach
from potluck.round.member.exchange import Exchange, SendContribution
from potluck.round.plan.messages import Part, Participant, Plan, Report, bitmap, from_bitmap


def test_a_round_without_trouble_averages_everybody_everywhere() -> None:
    world = World(make_plan(5, 3, 2, clients=1, aux=1), random.Random(0))
    world.settle()
    world.check()
    assert isinstance(world.outcome, Finish)
    assert world.outcome.holders == (0, 1, 2, 3, 4)
    assert {c for _g, c in world.members[0].averages.values()} == {(1, 2, 3, 4)}
    assert world.outcome.plan.revision == 0


def test_a_group_of_one() -> None:
    world = World(make_plan(1, 1, 3), random.Random(0))
    world.settle()
    assert isinstance(world.outcome, Finish)


@pytest.mark.parametrize(("num_members", "chunks_each"), [(2, 3), (5, 1), (5, 4), (8, 3)])
def test_contributions_go_to_all_reducers_in_turn_beginning_with_the_next_one(
    num_members: int, chunks_each: int
) -> None:
    """So all have something to do at once, and not all members begin with the same one."""
    plan = make_plan(num_members, num_members, chunks_each)
    for me in range(num_members):
        sends = [action for action in Exchange(plan, me).start() if isinstance(action, SendContribution)]
        others = [(me + step) % num_members for step in range(1, num_members)]
        assert [send.to for send in sends] == others * chunks_each
        for reducer in others:
            chunks = [send.chunk for send in sends if send.to == reducer]
            assert chunks == list(range(reducer * chunks_each, (reducer + 1) * chunks_each))


def test_a_reducer_with_more_chunks_than_others_gets_the_rest_of_them_at_the_end() -> None:
    plan = make_plan(4, 1, 1)
    parts = (Part(reducer=1, start=0, stop=1), Part(reducer=2, start=1, stop=5), Part(reducer=3, start=5, stop=7))
    plan = msgspec.structs.replace(plan, parts=parts)
    sends = [action for action in Exchange(plan, 0).start() if isinstance(action, SendContribution)]
    assert [(send.to, send.chunk) for send in sends] == [(1, 0), (2, 1), (3, 5), (2, 2), (3, 6), (2, 3), (2, 4)]


@pytest.mark.parametrize("when", range(0, 60, 4))
def test_a_dead_reducer_moves_only_what_not_all_hold(when: int) -> None:
    world = World(make_plan(4, 4, 3), random.Random(when))
    for _ in range(when):
        if pairs := world.movable():
            world.deliver(world.rng.choice(pairs))
    world.kill(0)
    held = [m.exchange.held for m in world.members[1:]]
    common = set.intersection(*held)
    world.settle()
    world.check()
    assert isinstance(world.outcome, Finish)
    assert world.outcome.holders == (1, 2, 3)
    redone = {chunk for _kind, chunk, generation in world.moved if generation > 0}
    assert not redone & common
    assert redone <= set(range(3))


def test_a_reducer_that_does_not_hear_a_sender_loses_its_parts_and_nobody_is_left_out() -> None:
    world = World(make_plan(4, 2, 2), random.Random(1))
    world.cut = {(3, 0)}
    world.settle()
    world.check()
    assert isinstance(world.outcome, Finish)
    assert world.outcome.holders == (0, 1, 2, 3)
    assert "nothing gets through between it and peer3" in world.outcome.plan.members[0].trouble
    assert {contributors for _, contributors in world.members[1].averages.values()} == {(0, 1, 2, 3)}
    redone = {chunk for _kind, chunk, generation in world.moved if generation > 0}
    assert redone == {0, 1}, "only the parts of the reducer that was not heard"


def test_averages_that_do_not_get_through_are_made_by_somebody_else() -> None:
    world = World(make_plan(4, 4, 2), random.Random(4))
    world.cut = {(2, 0), (2, 1)}
    for pair in world.cut:
        while world.queues[pair]:
            world.deliver(pair)  # what 2 contributes does arrive; its averages do not
    world.settle()
    world.check()
    assert isinstance(world.outcome, Finish)
    assert world.outcome.holders == (0, 1, 2, 3)
    assert {chunk for _kind, chunk, generation in world.moved if generation > 0} == {4, 5}


@pytest.mark.parametrize(
    "cuts",
    [
        [(0, 1), (0, 2)],
        [(0, 1), (2, 3)],
        [(0, 3), (1, 2)],
        [(0, 1), (1, 2)],
        [(0, 1), (0, 2), (1, 2)],
    ],
)
def test_with_broken_links_as_few_as_possible_are_left_out(cuts: list[tuple[int, int]]) -> None:
    """Whichever links of four members break, at most one is left out, and never for another's fault."""
    world = World(make_plan(4, 3, 2, clients=1), random.Random(5))
    world.cut = {(one, other) for pair in cuts for one, other in (pair, pair[::-1])}
    world.settle()
    world.check()
    if (
        len(cuts) == 3
    ):  # of any two reducers that do not reach each other only one can stay, and a client reduces nothing
        assert isinstance(world.outcome, GiveUp)
        assert "too many members were lost" in world.outcome.reason
        return
    assert isinstance(world.outcome, Finish)
    assert len(world.outcome.holders) >= 3
    for index in {0, 1, 2, 3} - set(world.outcome.holders):
        assert "nothing gets through" in world.outcome.plan.members[index].trouble


@given(
    pairs=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda pair: pair[0] < pair[1]), max_size=6),
    candidates=st.sets(st.integers(0, 5), min_size=1),
)
def test_no_other_reducers_would_lose_fewer(pairs: set[tuple[int, int]], candidates: set[int]) -> None:
    reach = Reach()
    for one, other in pairs:
        reach.broke(one, other)
    choice = reach.choose(candidates, dict.fromkeys(range(6), 1.0))
    assert choice.reducers <= candidates - choice.lost
    assert choice.reducers
    kept = set(range(6)) - choice.lost
    assert not [pair for pair in pairs if set(pair) <= kept and set(pair) & choice.reducers]
    for reducer in candidates:
        assert len(choice.lost) <= sum(reducer in pair for pair in pairs)


def test_an_older_report_that_comes_late_changes_nothing() -> None:
    director = Director(make_plan(2, 1, 1), DirectorTimeouts(), 0.0)
    director.report_arrived(0, Report(key=KEY, number=1, revision=0, held=b"\x01", digest="d"), 0.1)
    [finish] = [
        *director.report_arrived(1, Report(key=KEY, number=2, revision=0, held=b"\x01", digest="d"), 0.2),
    ]
    assert isinstance(finish, Finish)
    director = Director(make_plan(2, 1, 1), DirectorTimeouts(), 0.0)
    director.report_arrived(1, Report(key=KEY, number=2, revision=0, held=b"\x01", digest="d"), 0.1)
    director.report_arrived(1, Report(key=KEY, number=1, revision=0), 0.2)  # over a link that works again
    [finish] = director.report_arrived(0, Report(key=KEY, number=1, revision=0, held=b"\x01", digest="d"), 0.3)
    assert isinstance(finish, Finish)


def test_a_frozen_reducer_is_replaced() -> None:
    world = World(make_plan(4, 4, 2), random.Random(2))
    world.freeze(2)
    world.settle()
    world.check()
    assert isinstance(world.outcome, Finish)
    assert world.outcome.holders == (0, 1, 3)


def test_silence_counts_only_while_the_coordinator_itself_was_listening() -> None:
    director = Director(make_plan(3, 3, 1), DirectorTimeouts(), 0.0)

    def heard(*members: int, at: float) -> None:
        for index in members:
            director.report_arrived(index, Report(key=KEY, number=round(at * 10), revision=0), at)

    heard(0, 1, 2, at=0.1)
    director.tick(0.1)
    director.tick(2.6)  # its own loop stood still, and the reports of that time wait to be read
    assert [member.receives for member in director.plan.members] == [True, True, True]
    for tenth in range(27, 45):
        heard(0, 1, at=tenth / 10)
        director.tick(tenth / 10)
    assert [member.receives for member in director.plan.members] == [True, True, False]


def test_a_member_with_another_digest_is_left_out() -> None:
    plan = make_plan(3, 1, 1)
    director = Director(plan, DirectorTimeouts(), 0.0)
    decisions: list[Any] = []
    for index, digest in enumerate(["right", "wrong", "right"]):
        decisions += director.report_arrived(index, Report(key=KEY, revision=0, held=b"\x01", digest=digest), 0.1)
    [finish] = decisions
    assert finish.digest == "right"
    assert finish.holders == (0, 2)
    assert finish.plan.members[1].trouble == "its averages have another digest"


def test_when_only_clients_are_left_the_round_says_so() -> None:
    world = World(make_plan(3, 1, 2, clients=2), random.Random(3))
    world.kill(0)
    world.settle()
    assert isinstance(world.outcome, GiveUp)
    assert "no member is left that could reduce" in world.outcome.reason


def test_the_deadline_names_the_peers_and_what_is_missing() -> None:
    director = Director(make_plan(2, 2, 1), DirectorTimeouts(), 0.0)
    director.report_arrived(0, Report(key=KEY, revision=0, waiting_for=(1,), missing_from=(1,)), 0.1)
    [give_up] = director.expired()
    assert "averages are missing at peer0, peer1; waited for peer1" in give_up.reason


FAULTS = ["kill", "freeze", "thaw", "cut", "poison", "lie", "repeat", "lose", "wait"]


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2), st.integers(0, 1)),
    faults=st.lists(
        st.tuples(st.integers(0, 80), st.sampled_from(FAULTS), st.integers(0, 5)),
        max_size=6,
    ),
)
def test_whatever_happens_the_holders_hold_the_same(
    seed: int, shape: tuple[int, int, int, int, int], faults: list[tuple[int, str, int]]
) -> None:
    num_members, num_reducers, chunks, clients, aux = shape
    clients, aux = min(clients, num_members - 1), min(aux, num_members - 1)
    plan = make_plan(num_members, min(num_reducers, max(1, num_members - clients)), chunks, clients, aux)
    world = World(plan, random.Random(seed))
    for steps, fault, who in faults:
        for _ in range(steps):
            if (pairs := world.movable()) and not world.outcome:
                world.deliver(world.rng.choice(pairs))
        if world.outcome:
            break
        who %= num_members
        if fault == "kill" and world.members[who].alive:
            world.kill(who)
        elif fault in ("freeze", "thaw"):
            world.freeze(who, frozen=fault == "freeze")
        elif fault == "cut":
            world.cut.add((who, (who + 1) % num_members))
        elif fault == "poison":
            world.members[who].poisoned = True
        elif fault == "lie":
            world.members[who].lies = not any(member.lies for member in world.members)
        elif fault == "repeat":
            world.repeat_report(who)
        elif fault == "lose":
            world.lose_report(who)
        elif fault == "wait":
            world.wait(0.4)
    if not world.outcome:
        world.settle()
    world.check()


def test_bitmaps_round_trip_and_ignore_what_does_not_exist() -> None:
    assert from_bitmap(bitmap({0, 3, 17}), 18) == {0, 3, 17}
    assert from_bitmap(b"\xff\xff\xff", 10) == set(range(10))
    assert from_bitmap(b"", 5) == set()


def test_a_plan_with_gaps_or_doubles_is_refused() -> None:
    members = (Participant(peer="a", session="s", weight=1.0),)
    for parts in [(Part(reducer=0, start=1, stop=2),), (Part(reducer=1, start=0, stop=2),)]:
        with pytest.raises(ValueError, match="does not continue"):
            Plan(key=KEY, members=members, parts=parts, layout="", deadline=0.0)
    with pytest.raises(ValueError, match="twice"):
        Plan(key=KEY, members=members * 2, parts=(), layout="", deadline=0.0)


def test_who_was_left_out_has_given_nothing() -> None:
    plan = make_plan(3, 1, 1)
    members = list(plan.members)
    members[2] = msgspec.structs.replace(members[2], sends=False, trouble="its values hold NaN")
    plan = msgspec.structs.replace(plan, members=tuple(members))
    commit = make_commit(
        plan, "digest", (0, 1), None, term=7, coordinator="peer0", parent="", committed_at=1.0, seconds=0.5
    )
    assert [member.weight for member in commit.members] == [1.0, 2.0, 0.0]
    assert commit.left_out == {"peer2": "its values hold NaN"}
