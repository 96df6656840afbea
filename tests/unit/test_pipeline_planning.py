"""The planner: the simulated step, the best of all shapes, an exact global batch, and what does not fit."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from potluck.errors import ConfigurationError
from potluck.pipeline.layout import Layout
from potluck.pipeline.planning import (
    MIN_GAIN,
    BlockProfile,
    Machine,
    Profile,
    micro_batch_candidates,
    micro_batch_sizes,
    plan,
    shape_of,
    simulate,
)

blocks = st.builds(
    BlockProfile,
    forward_seconds=st.floats(1e-4, 1e-2),
    backward_seconds=st.floats(1e-4, 2e-2),
    fixed_seconds=st.floats(0, 1e-2),
    parameter_bytes=st.integers(1_000, 1_000_000),
    output_bytes=st.integers(10, 10_000),
    saved_bytes=st.integers(10, 10_000),
)
profiles = st.lists(blocks, min_size=1, max_size=5).map(lambda found: Profile(blocks=tuple(found), input_bytes=100))
machines = st.builds(
    Machine, memory_bytes=st.floats(1e6, 1e8), bytes_per_second=st.floats(1e6, 1e9), latency_seconds=st.floats(0, 0.1)
)


@given(st.integers(1, 8), st.integers(1, 20), st.floats(0.01, 1.0))
def test_equal_stages_take_what_the_formula_says(num_stages: int, num_micro: int, forward: float) -> None:
    found = simulate(
        [forward] * num_stages,
        [2 * forward] * num_stages,
        [0.0] * (num_stages - 1),
        [1.0] * num_micro,
        in_flight=num_stages,
    )
    assert found.seconds == pytest.approx((num_micro + num_stages - 1) * 3 * forward)
    assert found.bubble == pytest.approx((num_stages - 1) / (num_micro + num_stages - 1), abs=1e-9)


@given(st.data(), st.integers(1, 6), st.integers(1, 15))
def test_a_step_is_never_faster_than_its_parts(data: st.DataObject, num_stages: int, num_micro: int) -> None:
    seconds = st.floats(0.01, 1.0)
    forward, backward = (data.draw(st.lists(seconds, min_size=num_stages, max_size=num_stages)) for _ in range(2))
    sends = data.draw(st.lists(seconds, min_size=num_stages - 1, max_size=num_stages - 1))
    in_flight = data.draw(st.integers(1, 12))
    found = simulate(forward, backward, sends, [1.0] * num_micro, in_flight=in_flight)
    one_way = sum(forward) + sum(backward) + 2 * sum(sends)
    assert found.seconds >= one_way - 1e-9
    assert found.seconds >= num_micro * max(f + b for f, b in zip(forward, backward, strict=True)) - 1e-9
    assert found.seconds <= num_micro * one_way + 1e-9
    assert found.most_in_flight == min(in_flight, num_micro)
    alone = simulate(forward, backward, sends, [1.0] * num_micro, in_flight=1)
    assert alone.seconds == pytest.approx(num_micro * one_way)


@settings(max_examples=30, deadline=None)
@given(profiles, machines, st.integers(1, 24), st.integers(1, 6), st.booleans())
def test_the_chosen_shape_is_the_best_of_all(
    profile: Profile, machine: Machine, batch_size: int, max_machines: int, recompute: bool
) -> None:
    try:
        table = plan(profile, machine, batch_size=batch_size, max_machines=max_machines, recompute=recompute)
    except ConfigurationError:
        deepest = shape_of(
            profile, machine, Layout.even(len(profile.blocks), len(profile.blocks)), 1, batch_size, 1, recompute
        )
        assume(deepest.memory_bytes <= machine.memory_bytes and len(profile.blocks) <= max_machines)
        raise
    costs = [block.forward_seconds + block.backward_seconds for block in profile.blocks]
    for number, planned in table.items():
        every = [
            shape_of(profile, machine, Layout.balanced(costs, depth), replicas, batch_size, size, recompute)
            for depth in range(1, min(len(costs), number) + 1)
            for replicas in range(1, min(number // depth, batch_size) + 1)
            for size in micro_batch_candidates(batch_size, replicas)
        ]
        fitting = [shape for shape in every if shape.memory_bytes <= machine.memory_bytes]
        assert planned.chosen.seconds <= min(shape.seconds for shape in fitting) * (1 + MIN_GAIN)
        assert planned.chosen.machines <= number
        assert planned.chosen.memory_bytes <= machine.memory_bytes
        fastest = min(shape.seconds for shape in planned.shapes)
        assert all(fastest <= min(s.seconds for s in fewer.shapes) for n, fewer in table.items() if n < number)
        assert planned.reason.startswith(f"{planned.chosen.stages}×{planned.chosen.replicas}")


@given(st.integers(1, 500), st.integers(1, 64))
def test_the_global_batch_is_exact(batch_size: int, micro_batch: int) -> None:
    sizes = micro_batch_sizes(batch_size, micro_batch)
    assert sum(sizes) == batch_size
    assert all(size == micro_batch for size in sizes[:-1])
    assert 0 < sizes[-1] <= micro_batch


def model(num_blocks: int = 4) -> Profile:
    block = BlockProfile(forward_seconds=0.01, backward_seconds=0.02, parameter_bytes=1_000_000, output_bytes=1000)
    return Profile(blocks=(block,) * num_blocks)


def test_a_model_that_fits_one_machine_is_not_cut_without_need() -> None:
    slow_line = Machine(bytes_per_second=1e6, latency_seconds=0.05)
    table = plan(model(), slow_line, batch_size=64, max_machines=1)
    assert (table[1].chosen.stages, table[1].chosen.replicas) == (1, 1)


def test_a_model_that_fits_no_machine_is_cut_as_deep_as_it_takes() -> None:
    small = Machine(memory_bytes=8_500_000)  # two blocks with gradients and moments
    table = plan(model(), small, batch_size=16, max_machines=7)
    assert 1 not in table
    assert table[2].chosen.stages == 2
    assert table[7].does_not_fit == (1,)
    assert "a depth of 1 does not fit" in table[7].reason
    assert all(planned.chosen.stages >= 2 for planned in table.values())


def test_the_deepest_pipeline_is_tried_too() -> None:
    table = plan(model(), Machine(memory_bytes=4_500_000), batch_size=16, max_machines=4)
    assert set(table) == {4}
    assert table[4].chosen.stages == 4


def test_latency_wants_more_micro_batches_under_way() -> None:
    near = shape_of(model(), Machine(), Layout.even(4, 4), 1, 64, 1, False)
    far = shape_of(model(), Machine(latency_seconds=0.05), Layout.even(4, 4), 1, 64, 1, False)
    assert far.in_flight > near.in_flight
    assert near.seconds / far.seconds >= 0.85


def test_what_cannot_be_planned_says_why() -> None:
    with pytest.raises(ConfigurationError, match="bring more of them"):
        plan(model(), Machine(memory_bytes=1000), batch_size=4, max_machines=4)
    with pytest.raises(ConfigurationError, match="have at most so many"):
        plan(model(), Machine(), batch_size=4, max_machines=4, stages=5)
