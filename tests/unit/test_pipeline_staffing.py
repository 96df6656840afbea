"""Who does what in a pipeline: every stage has a server where there are enough, and a second holder if one offers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.pipeline.layout import Layout
from potluck.pipeline.staffing import Offer, Staff, is_ready, servers_now

NUM_BLOCKS = 8


def staff(num_stages: int) -> Staff:
    return Staff([1.0] * NUM_BLOCKS, [100] * NUM_BLOCKS, lambda _count: Layout.even(NUM_BLOCKS, num_stages))


@settings(max_examples=60, deadline=None)
@given(
    num_stages=st.integers(1, 6),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.floats(0.1, 10.0)), min_size=1, max_size=30),
)
def test_every_stage_has_a_server_whoever_comes_and_goes(
    num_stages: int, events: list[tuple[bool, int, float]]
) -> None:
    made = staff(num_stages)
    for now, (comes, number, rate) in enumerate(events):
        if comes:
            made.offer(f"s{number}", Offer(serves=True, rate=rate))
        else:
            made.gone(f"s{number}")
        plan = made.plan(float(now))
        if plan is None:
            assert not made.servers
            continue
        assert set(plan.serves) == set(made.servers), "everybody has something to do"
        assert {stage for stages in plan.serves.values() for stage in stages} == set(range(num_stages))
        assert all(plan.why[peer] for peer in plan.serves)
        standing = {peer: plan.blocks_of(peer) for peer in plan.serves}
        assert is_ready(plan, standing)
        serving = servers_now(plan.layout, plan, standing, frozenset(made.servers))
        assert serving is not None
        assert Counter(p for names in serving for p in names) == Counter(
            {peer: len(stages) for peer, stages in plan.serves.items()}
        )


def test_a_stage_with_one_server_has_a_listener_where_memory_allows() -> None:
    made = staff(2)
    for name in ("a", "b", "c"):
        made.offer(name, Offer(serves=True))
    made.offer("feeder", Offer(feeds=True, listens=True, room_bytes=10_000))
    plan = made.plan(0.0)
    assert plan is not None
    alone = [stage for stage in range(2) if sum(stage in stages for stages in plan.serves.values()) == 1]
    assert plan.listens == {"feeder": tuple(alone)}
    made.offer("feeder", Offer(feeds=True, listens=True, room_bytes=1_000))
    plan = made.plan(1.0)
    assert plan is not None
    assert not plan.listens, "four blocks with all that training adds are 1,600 bytes"


def test_whoever_insists_on_a_stage_serves_it_and_is_never_moved() -> None:
    made = staff(3)
    for name in ("a", "b", "c"):
        made.offer(name, Offer(serves=True))
    made.plan(0.0)
    made.offer("d", Offer(serves=True, stages=(2,), rate=1.0))
    plan = made.plan(1.0)
    assert plan is not None
    assert plan.serves["d"] == (2,)
    assert plan.why["d"] == "it was started with --stage 2"


def test_whoever_leaves_is_not_planned_but_serves_until_others_can() -> None:
    made = staff(2)
    made.offer("a", Offer(serves=True))
    made.offer("b", Offer(serves=True))
    before = made.plan(0.0)
    assert before is not None
    standing = {peer: before.blocks_of(peer) for peer in before.serves}
    made.offer("b", Offer(serves=True, is_leaving=True))
    plan = made.plan(1.0)
    assert plan is not None
    assert plan.serves == {"a": (0, 1)}
    assert not is_ready(plan, standing)
    assert servers_now(plan.layout, plan, standing, frozenset(made.servers)) is not None, "b goes on meanwhile"
