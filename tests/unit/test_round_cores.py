"""Exchange and director together, on a network that reorders between pairs, kills, freezes and cuts."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.round.commitment import make_commit
from potluck.round.director import Director, Finish, GiveUp, Patience, Publish
from potluck.round.exchange import (
    Complete,
    Discard,
    Exchange,
    Reduce,
    SendAverage,
    SendContribution,
)
from potluck.round.plan import Part, Participant, Plan, Report, RoundKey, bitmap, from_bitmap
from potluck.round.reach import Reach

KEY = RoundKey(epoch=1, token=7, attempt=0)


def make_plan(num_members: int, num_reducers: int, chunks_each: int, clients: int = 0, aux: int = 0) -> Plan:
    members = tuple(
        Participant(
            peer=f"peer{i}",
            session="s",
            weight=0.0 if i < aux else float(i + 1),
            sends=i >= aux,
            reduces=i < num_members - clients,
        )
        for i in range(num_members)
    )
    parts = tuple(Part(reducer=r, start=r * chunks_each, stop=(r + 1) * chunks_each) for r in range(num_reducers))
    return Plan(key=KEY, members=members, parts=parts, layout="x", deadline=1e9)


@dataclass
class Member:
    index: int
    exchange: Exchange
    averages: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    made: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    early: list[tuple[Any, Any]] = field(default_factory=list)  # with their senders, as the mailroom keeps them
    heard_at: float = 0.0
    alive: bool = True
    frozen: bool = False

    def digest(self) -> str:
        return str(sorted(self.averages.items())) if self.exchange.is_complete else ""

    def report(self, now: float) -> Report:
        exchange = self.exchange
        return Report(
            key=KEY,
            revision=exchange.plan.revision,
            held=bitmap(exchange.held),
            waiting_for=exchange.waiting_for,
            missing_from=exchange.missing_from,
            idle_seconds=now - self.heard_at,
            digest=self.digest(),
        )


class World:
    """A round on a virtual network; every pair is a queue, and any queue may go next."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self.rng, self.now = rng, 0.0
        self.members = [Member(i, Exchange(plan, i)) for i in range(len(plan.members))]
        self.director = Director(plan, Patience(), 0.0)
        self.queues: dict[tuple[Any, Any], deque[Any]] = defaultdict(deque)
        self.cut: set[tuple[int, int]] = set()
        self.outcome: Finish | GiveUp | None = None
        self.moved: list[tuple[str, int, int]] = []  # kind, chunk, generation
        for member in self.members:
            self.act(member, member.exchange.start())

    def act(self, member: Member, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case SendContribution(chunk, generation, to):
                    self.queues[member.index, to].append(("contribution", chunk, generation, None))
                case Reduce(chunk, generation, contributors):
                    member.made[chunk] = member.averages[chunk] = (generation, contributors)
                    self.act(member, member.exchange.reduced(chunk, generation))
                case SendAverage(chunk, generation, to):
                    for other in to:
                        self.queues[member.index, other].append(("average", chunk, generation, member.made[chunk]))
                case Discard(chunk):
                    member.averages.pop(chunk, None)
                case Complete():
                    pass
        self.queues[member.index, "director"].append(member.report(self.now))

    def decide(self, decisions: list[Any]) -> None:
        for decision in decisions:
            if isinstance(decision, Publish):
                for member in self.members:
                    self.queues["director", member.index].append(decision.plan)
            else:
                assert self.outcome is None
                self.outcome = decision

    def movable(self) -> list[tuple[Any, Any]]:
        def ready(source: Any, target: Any) -> bool:
            if (source, target) in self.cut:
                return False
            sender = self.members[source] if isinstance(source, int) else None
            receiver = self.members[target] if isinstance(target, int) else None
            return not (sender and sender.frozen) and not (receiver and receiver.frozen)

        return sorted(((s, t) for (s, t), queue in self.queues.items() if queue and ready(s, t)), key=str)

    def deliver(self, pair: tuple[Any, Any]) -> None:
        source, target = pair
        item = self.queues[pair].popleft()
        if target == "director":
            self.decide(self.director.report_arrived(source, item, self.now))
            return
        member = self.members[target]
        if not member.alive:
            return
        if source == "director":
            member.heard_at = self.now
            self.act(member, member.exchange.revise(item))
            early, member.early = member.early, []
            for sender, mail in early:
                self.take(member, sender, mail)
            return
        self.take(member, source, item)

    def take(self, member: Member, source: int, item: Any) -> None:
        kind, chunk, generation, content = item
        if generation > member.exchange.generation(chunk):
            member.early.append((source, item))
            return
        self.moved.append((kind, chunk, generation))
        member.heard_at = self.now
        if kind == "contribution":
            self.act(member, member.exchange.contribution_arrived(source, chunk, generation))
        elif member.exchange.wants_average(source, chunk, generation):
            member.averages[chunk] = content
            self.act(member, member.exchange.average_arrived(source, chunk, generation))

    def kill(self, index: int) -> None:
        member = self.members[index]
        member.alive = False
        for (source, target), queue in self.queues.items():
            if source == index and target != "director":
                for _ in range(self.rng.randint(0, len(queue))):
                    queue.pop()  # what the socket had not sent yet
            elif source == index:
                queue.clear()
        self.decide(self.director.member_gone(index, "killed", self.now))

    def settle(self, steps: int = 400) -> None:
        """Let time pass until the round is over."""
        for _ in range(steps):
            for _ in range(2_000):
                pairs = self.movable()
                if not pairs or self.outcome:
                    break
                self.deliver(self.rng.choice(pairs))
            if self.outcome:
                return
            self.now += 0.3
            for member in self.members:
                if member.alive and not member.frozen:
                    self.queues[member.index, "director"].append(member.report(self.now))
            self.decide(self.director.tick(self.now))
        pytest.fail(f"the round did not end: {self.director.describe_trouble()}")

    def check(self) -> None:
        if not isinstance(self.outcome, Finish):
            return
        contents = [self.members[index].averages for index in self.outcome.holders]
        assert contents
        assert all(content == contents[0] for content in contents)
        assert set(contents[0]) == set(range(self.outcome.plan.num_chunks))
        for _generation, contributors in contents[0].values():
            assert contributors, "an average of nobody"


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
    director = Director(make_plan(2, 1, 1), Patience(), 0.0)
    director.report_arrived(0, Report(key=KEY, number=1, revision=0, held=b"\x01", digest="d"), 0.1)
    [finish] = [
        *director.report_arrived(1, Report(key=KEY, number=2, revision=0, held=b"\x01", digest="d"), 0.2),
    ]
    assert isinstance(finish, Finish)
    director = Director(make_plan(2, 1, 1), Patience(), 0.0)
    director.report_arrived(1, Report(key=KEY, number=2, revision=0, held=b"\x01", digest="d"), 0.1)
    director.report_arrived(1, Report(key=KEY, number=1, revision=0), 0.2)  # over a link that works again
    [finish] = director.report_arrived(0, Report(key=KEY, number=1, revision=0, held=b"\x01", digest="d"), 0.3)
    assert isinstance(finish, Finish)


def test_a_frozen_reducer_is_replaced() -> None:
    world = World(make_plan(4, 4, 2), random.Random(2))
    world.members[2].frozen = True
    world.settle()
    world.check()
    assert isinstance(world.outcome, Finish)
    assert world.outcome.holders == (0, 1, 3)


def test_silence_counts_only_while_the_coordinator_itself_was_listening() -> None:
    director = Director(make_plan(3, 3, 1), Patience(), 0.0)

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
    director = Director(plan, Patience(), 0.0)
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
    director = Director(make_plan(2, 2, 1), Patience(), 0.0)
    director.report_arrived(0, Report(key=KEY, revision=0, waiting_for=(1,), missing_from=(1,)), 0.1)
    [give_up] = director.expired()
    assert "averages are missing at peer0, peer1; waited for peer1" in give_up.reason


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2), st.integers(0, 1)),
    faults=st.lists(
        st.tuples(st.integers(0, 80), st.sampled_from(["kill", "freeze", "thaw", "cut", "wait"]), st.integers(0, 5)),
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
            world.members[who].frozen = fault == "freeze"
        elif fault == "cut":
            world.cut.add((who, (who + 1) % num_members))
        elif fault == "wait":
            world.now += 0.4
            world.decide(world.director.tick(world.now))
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
