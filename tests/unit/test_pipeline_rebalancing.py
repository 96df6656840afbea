"""Rebalancing on preemption traces in virtual time, and its rules under hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.errors import ConfigurationError
from potluck.pipeline.rebalancing import Balancer, RebalancingConfig, best_rate_of_equals
from potluck.spot.preemption import Change, PreemptionConfig, generate

MOVE_SECONDS = 8.0  # 100 MB of a stage on a line of 100 Mbit/s


def share_of_optimum(events: Sequence[Change], num_stages: int) -> tuple[float, int]:
    """Work done on a trace over the work of the best assignment at each moment with free moves; and moves made.

    A server that has come or moved does nothing until its blocks are there; the optimum pays nothing.
    """
    balancer = Balancer([1.0] * num_stages)
    ready_at: dict[str, float] = {}
    last_moved: dict[str, float] = {}
    ours = optimum = 0.0
    num_moves = 0
    moments = [(t, list(group)) for t, group in groupby(events, key=lambda change: change.seconds)]
    for (now, changes), until in zip(moments, [t for t, _ in moments[1:]] + [moments[-1][0]], strict=True):
        for change in changes:
            if change.kind == "add":
                balancer.join(change.node, rate=1.0)
                ready_at[change.node] = now + MOVE_SECONDS
            else:
                balancer.leave(change.node)
                ready_at.pop(change.node, None)
        held = set(balancer.stages.values())
        for move in balancer.rebalance(now):
            was_empty = move.target not in held
            assert was_empty or now - last_moved.get(move.server, -1e9) >= 600.0
            last_moved[move.server] = now
            ready_at[move.server] = now + MOVE_SECONDS
            num_moves += 1
        assert held <= set(balancer.stages.values()), "a move emptied a stage"
        optimum += best_rate_of_equals(len(ready_at), 1.0, balancer.costs) * (until - now)
        ours += _work(balancer.stages, ready_at, num_stages, now, until)
    return ours / optimum, num_moves


def _work(stages: dict[str, int], ready_at: dict[str, float], num_stages: int, now: float, until: float) -> float:
    times = sorted({now, until, *(t for t in ready_at.values() if now < t < until)})
    done = 0.0
    for start, end in pairwise(times):
        rates = [0] * num_stages
        for server, stage in stages.items():
            rates[stage] += ready_at[server] <= start
        done += min(rates) * (end - start)
    return done


def overlaid(config: PreemptionConfig, num_traces: int, hours: float) -> list[Change]:
    """Several traces at once, each with machines of its own: more machines than one log has."""
    found = [
        Change(change.seconds, change.kind, f"{seed}.{change.node}")
        for seed in range(num_traces)
        for change in generate(config, hours, seed)
    ]
    return sorted(found, key=lambda change: change.seconds)


P3 = PreemptionConfig(num_machines=32, bursts_per_hour=6.9, mean_burst=2.1, mean_return_seconds=33 * 60)
G4DN = PreemptionConfig(num_machines=24, bursts_per_hour=4.5, mean_burst=1.5, mean_return_seconds=97 * 60)


@pytest.mark.parametrize(
    ("config", "num_traces", "num_stages"), [(P3, 5, 8), (P3, 12, 32), (G4DN, 8, 8), (G4DN, 16, 16)]
)
def test_98_percent_of_the_optimum_on_traces(config: PreemptionConfig, num_traces: int, num_stages: int) -> None:
    share, num_moves = share_of_optimum(overlaid(config, num_traces, hours=8), num_stages)
    assert share >= 0.98
    assert num_moves > 10


@given(st.lists(st.floats(0.5, 5.0), min_size=2, max_size=6), st.integers(1, 3))
def test_the_optimum_of_equal_servers_is_the_best_of_all_assignments(costs: list[float], more: int) -> None:
    costs = costs[:3]
    num_servers = len(costs) + more
    every = (
        min(sum(stage == s for stage in chosen) / cost for s, cost in enumerate(costs))
        for chosen in product(range(len(costs)), repeat=num_servers)
    )
    assert best_rate_of_equals(num_servers, 1.0, costs) == pytest.approx(max(every))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.5, 4.0), min_size=1, max_size=5),
    st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(0, 4)), min_size=1, max_size=25),
)
def test_moves_help_or_are_not_made(costs: list[float], servers: list[tuple[float, int]]) -> None:
    balancer = Balancer(costs)
    for number, (rate, stage) in enumerate(servers):
        balancer.place(f"s{number}", rate=rate, stage=stage % len(costs))
    before, held = balancer.rate, set(balancer.stages.values())
    moves = balancer.rebalance(0.0)
    assert held <= set(balancer.stages.values())
    assert len({move.server for move in moves}) == len(moves)
    if before > 0:
        assert balancer.rate >= before * (1.01 if moves else 1)
    if balancer.rate > 0:
        assert balancer.rebalance(1.0) == () or not moves, "a second look finds no more than the first"


def test_a_newcomer_serves_the_stage_that_needs_it_most_and_hears_why() -> None:
    balancer = Balancer([1.0, 2.0])
    assert balancer.join("a", rate=1.0) == (0, "stage 0 has no server")
    assert balancer.join("b", rate=1.0) == (1, "stage 1 has no server")
    assert balancer.join("c", rate=1.0) == (1, "stage 1 is the slowest, with 0.5 samples/s")


def test_two_last_places_are_lifted_together() -> None:
    balancer = Balancer([1.0] * 4)
    for stage, count in enumerate([1, 1, 3, 3]):
        for number in range(count):
            balancer.place(f"{stage}.{number}", rate=1.0, stage=stage)
    assert len(balancer.rebalance(0.0)) == 2
    assert balancer.rate == 2.0
    assert balancer.rebalance(0.0) == ()


def test_a_server_rests_after_a_move_unless_a_stage_is_empty() -> None:
    balancer = Balancer([1.0, 1.0])
    for number in range(4):
        balancer.place(f"s{number}", rate=1.0, stage=0)
    first = {move.server for move in balancer.rebalance(0.0)}
    assert len(first) == 2
    for server in set(balancer.stages) - first:
        balancer.leave(server)
    moves = balancer.rebalance(10.0)  # stage 0 is empty: no rest
    assert [(move.target, move.reason) for move in moves] == [(0, "stage 0 had no server")]
    balancer.place("more", rate=1.0, stage=0)
    balancer.place("most", rate=1.0, stage=0)
    resting = moves[0].server
    assert all(move.server != resting for move in balancer.rebalance(20.0))


def test_settings_that_would_never_rest_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="to and fro"):
        RebalancingConfig(min_gain=0.0)
    with pytest.raises(ConfigurationError, match="there are stages 0 to 1"):
        Balancer([1.0, 1.0]).place("a", rate=1.0, stage=2)
