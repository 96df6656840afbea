"""The step's ledger in a world of virtual time: servers die, freeze, wake and answer late; every id counts once."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.pipeline.stepledger import (
    Action,
    Average,
    Commit,
    Dispute,
    Feed,
    Fence,
    Item,
    LossScale,
    Member,
    Phase,
    StageLost,
    StepLedger,
    Verify,
    agreed_norm,
    partition_error,
)


class Server:
    """A model of a stage's server: it obeys the fence, and keeps which ids it added."""

    def __init__(self, name: str, stages: tuple[int, ...]) -> None:
        self.name, self.stages = name, stages
        self.attempt = 0
        self.valid_from = 0
        self.added: dict[int, list[int]] = {stage: [] for stage in stages}


class World:
    """Carries out a ledger's actions with random delays, kills and freezes."""

    def __init__(self, seed: int, *, num_stages: int, replicas: int, num_ids: int, tied: bool, listeners: bool) -> None:
        self.random = random.Random(seed)
        names = [(f"s{stage}.{replica}", stage) for stage in range(num_stages) for replica in range(replicas)]
        self.servers = {name: Server(name, (stage,)) for name, stage in names}
        members = {name: Member((stage,)) for name, stage in names}
        for stage in range(num_stages if listeners else 0):
            self.servers[f"l{stage}"] = Server(f"l{stage}", (stage,))
            members[f"l{stage}"] = Member((stage,), listens=True)
        units = tuple((stage,) for stage in range(num_stages)) + (((0, num_stages - 1),) if tied else ())
        self.ledger = StepLedger(
            step=3,
            num_stages=num_stages,
            samples=[1 + self.random.randrange(4) for _ in range(num_ids)],
            members=members,
            feeders=["f0", "f1"],
            units=units,
        )
        self.num_stages = num_stages
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()
        self.dead: set[str] = set()
        self.frozen_until: dict[str, float] = {}
        self.commits: list[Commit] = []
        self.contributions: dict[int, dict[tuple[str, int], tuple[int, ...]]] = {}
        self.lost: StageLost | None = None
        self.routes: tuple[tuple[str, ...], ...] = ()
        self.moved_at = 0.0
        self.liar = ""
        self.tainted: set[tuple[str, int, int]] = set()  # (server, stage, id): added out of what the liar gave

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), event))

    def at(self, name: str, event: Callable[[], None]) -> None:
        """What happens at a machine: never when it is dead, late when it is frozen."""
        if name in self.dead:
            return
        if self.frozen_until.get(name, 0.0) > self.now:
            self.later(self.frozen_until[name] - self.now, lambda: self.at(name, event))
            return
        event()

    def send(self, name: str, event: Callable[[], None]) -> None:
        self.later(self.random.expovariate(10.0), lambda: self.at(name, event))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            self.moved_at = self.now
            if isinstance(action, Fence):
                self.fence(action)
            elif isinstance(action, Feed):
                for item in action.items:
                    self.send(action.feeder, lambda item=item, a=action.attempt: self.forward(item, a, 0, []))
            elif isinstance(action, Average):
                self.average(action)
            elif isinstance(action, Verify):
                self.send(action.verifier, lambda action=action: self.verify(action))
            elif isinstance(action, Commit):
                self.commits.append(action)
            elif isinstance(action, StageLost):
                self.lost = action

    def verify(self, verify: Verify) -> None:
        if verify.server == self.liar:
            self.take(self.ledger.lied(verify.server, verify.attempt, "its output differs"))
        else:
            self.take(self.ledger.checked(verify.server, verify.attempt))

    def fence(self, fence: Fence) -> None:
        self.routes = fence.servers

        def hear(server: Server) -> None:
            server.attempt = max(server.attempt, fence.attempt)
            if fence.valid_from > server.valid_from:
                server.valid_from = fence.valid_from
                server.added = {stage: [] for stage in server.stages}
            held = {stage: frozenset(ids) for stage, ids in server.added.items()}
            if server.attempt == fence.attempt:
                self.later(0.01, lambda: self.take(self.ledger.held(server.name, fence.attempt, held)))

        for name in fence.members:
            self.send(name, lambda name=name: hear(self.servers[name]))

    def forward(self, item: Item, attempt: int, stage: int, route: list[str]) -> None:
        if stage == self.num_stages:
            self.backward(item, attempt, route)
            return
        name = self.random.choice(self.routes[stage])

        def compute() -> None:
            if self.servers[name].attempt == attempt:
                self.forward(item, attempt, stage + 1, [*route, name])

        self.send(name, compute)

    def backward(self, item: Item, attempt: int, route: list[str], whole: list[str] | None = None) -> None:
        whole = whole or route
        if not route:
            self.later(0.01, lambda: self.take(self.ledger.fed(item.id, attempt)))
            return
        name, stage = route[-1], len(route) - 1

        def compute() -> None:
            server = self.servers[name]
            if server.attempt != attempt:
                return
            if stage not in item.held_by:
                server.added[stage].append(item.id)
                key = (name, stage, item.id)
                self.tainted = self.tainted | {key} if self.liar in whole else self.tainted - {key}
            self.backward(item, attempt, route[:-1], whole)

        self.send(name, compute)

    def average(self, average: Average) -> None:
        for unit, names in enumerate(average.members):
            stages = self.ledger.units[unit]

            def exchange(unit: int = unit, names: tuple[str, ...] = names, stages: tuple[int, ...] = stages) -> None:
                if any(name in self.dead for name in names):
                    return  # all or nothing
                given = {
                    (name, stage): tuple(self.servers[name].added[stage])
                    for name in names
                    for stage in stages
                    if stage in self.servers[name].stages
                }
                self.contributions[unit] = given
                for name in names:

                    def report(name: str = name) -> None:
                        self.take(
                            self.ledger.averaged(
                                name,
                                average.attempt,
                                unit,
                                digest=f"{sorted(given.items())}",
                                squared_norm=4.0,
                                contributions=given,
                            )
                        )

                    self.send(name, report)

            self.later(0.1, exchange)

    def kill(self, name: str) -> None:
        self.dead.add(name)
        self.later(0.5, lambda: self.take(self.ledger.gone(name)))

    def watch(self) -> None:
        """What the conductor does by the clock: a stall fences, and who does not answer a fence is gone."""
        if self.commits or self.lost:
            return
        if self.now - self.moved_at > 5.0:
            if self.ledger.phase in (Phase.FENCING, Phase.AVERAGING):
                for name in self.ledger.awaited:
                    self.take(self.ledger.gone(name, "no answer"))
            else:
                self.take(self.ledger.stalled())
        self.later(1.0, self.watch)

    def run(self) -> None:
        self.take(self.ledger.begin())
        self.later(1.0, self.watch)
        for _ in range(200_000):
            if not self.events:
                return
            self.now, _, event = heapq.heappop(self.events)
            event()
        raise AssertionError("the step never ended")


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_stages=st.integers(1, 5),
    replicas=st.integers(1, 3),
    num_ids=st.integers(1, 12),
    kills=st.integers(0, 4),
    freezes=st.integers(0, 2),
    tied=st.booleans(),
    listeners=st.booleans(),
)
def test_every_micro_batch_counts_once_whoever_dies(
    seed: int,
    num_stages: int,
    replicas: int,
    num_ids: int,
    kills: int,
    freezes: int,
    tied: bool,
    listeners: bool,
) -> None:
    world = World(
        seed,
        num_stages=num_stages,
        replicas=replicas,
        num_ids=num_ids,
        tied=tied and num_stages > 1,
        listeners=listeners,
    )
    victims = [*sorted(world.servers), "f0"]
    for _ in range(kills):
        victim = world.random.choice(victims)
        world.later(world.random.uniform(0, 4), lambda victim=victim: world.kill(victim))
    for _ in range(freezes):
        name = world.random.choice(sorted(world.servers))
        world.later(
            world.random.uniform(0, 3),
            lambda name=name: world.frozen_until.__setitem__(name, world.now + world.random.uniform(0, 30)),
        )
    world.run()
    if world.lost is not None:
        stage = world.lost.stages[0]
        holders = [server.name for server in world.servers.values() if stage in server.stages]
        assert all(name in world.dead or name in world.frozen_until for name in holders)
        return
    assert len(world.commits) == 1
    for unit, stages in enumerate(world.ledger.units):
        counted = Counter((stage, micro) for (_, stage), ids in world.contributions[unit].items() for micro in ids)
        assert counted == Counter((stage, micro) for stage in stages for micro in range(num_ids))
    commit = world.commits[0]
    assert commit.is_applied
    assert commit.total_norm == pytest.approx(math.sqrt(4.0 * len(world.ledger.units)))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_stages=st.integers(1, 4),
    replicas=st.integers(2, 3),
    kills=st.integers(0, 2),
    freezes=st.integers(0, 1),
)
def test_nothing_counts_that_a_liar_had_a_hand_in(
    seed: int, num_stages: int, replicas: int, kills: int, freezes: int
) -> None:
    world = World(seed, num_stages=num_stages, replicas=replicas, num_ids=6, tied=False, listeners=True)
    world.liar = "s0.0"
    world.ledger.checks = {"s0.0": "l0", f"s{num_stages - 1}.1": f"l{num_stages - 1}"}
    for _ in range(kills):
        victim = world.random.choice([name for name in sorted(world.servers) if name != "l0"])
        world.later(world.random.uniform(0, 4), lambda victim=victim: world.kill(victim))
    for _ in range(freezes):
        name = world.random.choice(sorted(world.servers))
        world.later(world.random.uniform(0, 3), lambda n=name: world.frozen_until.__setitem__(n, world.now + 20))
    world.run()
    if world.lost is not None or "l0" not in world.ledger.members:
        return  # a verifier that is gone finds nothing
    assert len(world.commits) == 1
    assert "s0.0" not in world.ledger.members
    counted = [
        (name, stage, micro)
        for unit in range(num_stages)
        for (name, stage), ids in world.contributions[unit].items()
        for micro in ids
    ]
    assert len(counted) == 6 * num_stages
    assert not world.tainted.intersection(counted)


def test_many_stages_and_servers() -> None:
    world = World(7, num_stages=16, replicas=8, num_ids=256, tied=True, listeners=False)
    for index in range(20):
        world.later(0.3 * index, lambda index=index: world.kill(f"s{index % 16}.{index // 16}"))
    world.run()
    assert len(world.commits) == 1
    assert len(world.dead) == 20
    assert world.ledger.num_replayed > 0


def begun(num_ids: int = 2) -> tuple[StepLedger, Fence]:
    members = {"a": Member((0,)), "b": Member((1,)), "c": Member((1,))}
    ledger = StepLedger(step=0, num_stages=2, samples=[1] * num_ids, members=members, feeders=["f"])
    (fence,) = ledger.begin()
    assert isinstance(fence, Fence)
    return ledger, fence


def answer_all(ledger: StepLedger, held: dict[str, dict[int, frozenset[int]]]) -> list[Action]:
    actions: list[Action] = []
    for name in sorted(ledger.members):
        actions += ledger.held(name, ledger.attempt, held.get(name, {}))
    return actions


def test_only_what_was_lost_is_sent_again_and_names_who_has_it() -> None:
    ledger, _ = begun(3)
    (feed,) = answer_all(ledger, {})
    assert isinstance(feed, Feed)
    assert [item.held_by for item in feed.items] == [(), (), ()]
    ledger.gone("b")
    (again,) = answer_all(ledger, {"a": {0: frozenset({0, 1})}, "c": {1: frozenset({1, 2})}})
    assert isinstance(again, Feed)
    assert again.items == (Item(0, 1, (0,)), Item(2, 1, (1,)))  # 1 is with both stages


def test_an_old_attempt_is_not_heard() -> None:
    ledger, fence = begun()
    ledger.stalled()
    assert ledger.held("a", fence.attempt, {}) == []
    assert ledger.awaited == ("a", "b", "c")
    answer_all(ledger, {})
    assert ledger.fed(0, fence.attempt) == []


def test_who_claims_what_another_holds_is_excluded_and_its_ids_are_replayed() -> None:
    ledger, _ = begun(1)
    actions = answer_all(ledger, {"a": {0: frozenset({0})}, "b": {1: frozenset({0})}, "c": {1: frozenset({0})}})
    assert "c" not in ledger.members
    assert any(isinstance(action, Fence) for action in actions)


def average_all(
    ledger: StepLedger,
    *,
    norm: float = 9.0,
    digests: dict[str, str] | None = None,
    norms: dict[str, float] | None = None,
) -> list[Action]:
    shares = {("a", 0): (0, 1), ("b", 1): (0,), ("c", 1): (1,)}
    actions: list[Action] = []
    for name, member in sorted(ledger.members.items()):
        unit = member.stages[0]
        given = {key: ids for key, ids in shares.items() if key[1] == unit}
        digest = (digests or {}).get(name, f"d{unit}")
        own = (norms or {}).get(name, norm)
        actions += ledger.averaged(name, ledger.attempt, unit, digest=digest, squared_norm=own, contributions=given)
    return actions


def averaging() -> StepLedger:
    ledger, _ = begun()
    answer_all(ledger, {})
    ledger.fed(0, ledger.attempt)
    (average,) = ledger.fed(1, ledger.attempt)
    assert average == Average(ledger.attempt, (("a",), ("b", "c")))
    return ledger


def test_the_commit_names_all_digests_and_the_total_norm() -> None:
    ledger = averaging()
    assert average_all(ledger) == [Commit(0, ledger.attempt, ("d0", "d1"), math.sqrt(18.0), True)]
    assert ledger.stalled() == []
    assert [type(action).__name__ for action in ledger.gone("c")] == ["Exclude"]  # no second attempt after it


def test_a_total_that_is_not_finite_skips_the_step_everywhere() -> None:
    (commit,) = average_all(averaging(), norm=math.inf)
    assert isinstance(commit, Commit)
    assert not commit.is_applied
    scale = LossScale(scale=8.0, grow_after=2)
    scale.update(is_finite=commit.is_applied)
    assert scale.scale == 4.0
    scale.update(is_finite=True)
    scale.update(is_finite=True)
    assert scale.scale == 8.0


def test_a_member_lost_while_averaging_has_its_ids_replayed() -> None:
    ledger = averaging()
    ledger.gone("b")
    (feed,) = answer_all(ledger, {"a": {0: frozenset({0, 1})}, "c": {1: frozenset({1})}})
    assert isinstance(feed, Feed)
    assert feed.items == (Item(0, 1, (0,)),)


def test_an_average_that_is_not_of_the_whole_step_is_refused() -> None:
    ledger = averaging()
    actions = ledger.averaged(
        "b", ledger.attempt, 1, digest="x", squared_norm=1.0, contributions={("b", 1): (0,), ("c", 1): (0,)}
    )
    assert "b" not in ledger.members
    assert any(isinstance(action, Fence) for action in actions)


def test_who_has_another_average_is_excluded_before_the_commit() -> None:
    ledger = averaging()
    actions = average_all(ledger, digests={"c": "other"})
    assert [type(action).__name__ for action in actions] == ["Exclude", "Commit"]
    assert "c" not in ledger.members


def test_of_two_norms_of_one_average_the_larger_counts_and_both_members_are_suspects() -> None:
    ledger = averaging()
    dispute, commit = average_all(ledger, norms={"c": 0.0})
    assert isinstance(dispute, Dispute)
    assert dispute.suspects == {"b", "c"}
    assert commit == Commit(0, ledger.attempt, ("d0", "d1"), math.sqrt(18.0), True)


def test_a_trusted_member_says_whose_norm_is_false() -> None:
    ledger = averaging()
    ledger.trusted = frozenset({"b"})
    dispute, excluded, commit = average_all(ledger, norms={"c": math.inf})
    assert isinstance(dispute, Dispute)
    assert dispute.suspects == {"c"}
    assert type(excluded).__name__ == "Exclude"
    assert isinstance(commit, Commit)
    assert commit.is_applied


@given(
    st.integers(0, 8).flatmap(
        lambda liars: st.tuples(st.integers(liars + 1, 9), st.lists(st.floats(), min_size=liars, max_size=liars))
    ),
    st.floats(1e-6, 1e6),
)
def test_fewer_than_half_cannot_change_a_norm(given_norms: tuple[int, list[float]], honest: float) -> None:
    num_honest, lies = given_norms
    norms = {f"h{n}": honest * (1 + 1e-6 * n) for n in range(num_honest)} | {f"l{n}": lie for n, lie in enumerate(lies)}
    found, suspects = agreed_norm(norms)
    assert found == pytest.approx(honest, rel=2e-3)
    assert not any(name.startswith("h") for name in suspects)


def test_a_listener_takes_over_a_stage_that_has_nobody_else() -> None:
    members = {"a": Member((0,)), "listener": Member((0,), listens=True)}
    ledger = StepLedger(step=0, num_stages=1, samples=[1], members=members, feeders=["f"])
    ledger.begin()
    *_, fence = ledger.gone("a")
    assert isinstance(fence, Fence)
    assert fence.servers == (("listener",),)
    assert ledger.gone("listener")[-1] == StageLost((0,))


@pytest.mark.parametrize(
    ("given_ids", "words"),
    [
        ({("a", 0): (0, 1)}, ""),
        ({("a", 0): (0,), ("b", 0): (0, 1)}, "2 times"),
        ({("a", 0): (0,)}, "lacks micro-batch 1"),
        ({("a", 0): (0, 1, 2)}, "not in this step"),
    ],
)
def test_contributions_must_partition_the_step(given_ids: dict[tuple[str, int], tuple[int, ...]], words: str) -> None:
    error = partition_error({(0, 0), (0, 1)}, given_ids)
    assert (words in error) if words else error == ""


def test_a_listener_that_leaves_costs_no_attempt() -> None:
    """As one that has handed over does, in the step after."""
    members = {"a": Member((0,)), "leaving": Member((), units=frozenset({0}))}
    ledger = StepLedger(step=0, num_stages=1, samples=[1, 1], members=members, feeders=["f"])
    ledger.begin()
    ledger.held("a", ledger.attempt, {})
    excluded, feed = ledger.gone("leaving")
    assert (type(excluded).__name__, type(feed).__name__) == ("Exclude", "Feed")
    assert ledger.num_attempts == 1
    assert ledger.fed(0, ledger.attempt) == []
    (average,) = ledger.fed(1, ledger.attempt)
    assert average == Average(ledger.attempt, (("a",),))
