"""Sketches tell rounding from damage: for any state, and any seed."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from potluck.errors import ProtocolError
from potluck.state.chunkpool import ChunkPool
from potluck.state.sketch import TOLERANCE, Difference, Sketch, camps, difference, read_sketch, sketch
from potluck.state.snapshot import stage

SEED = bytes(16)
POOL = ChunkPool(64 * 1024)  # several chunks even of a small state

seeds = st.binary(min_size=16, max_size=16)
sizes = st.integers(1, 40_000)
scales = st.sampled_from([1e-20, 1e-6, 1.0, 1e10])


def sketch_of(tensors: Mapping[str, Tensor], metadata: dict[str, object] | None = None, seed: bytes = SEED) -> Sketch:
    snapshot = stage(tensors, metadata or {}, POOL, own=["own"]).hashed()
    try:
        return sketch(snapshot, seed)
    finally:
        snapshot.release()


def values(size: int, scale: float, number: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(number)) * scale


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor], seed: bytes = SEED) -> Difference:
    return difference(sketch_of(one, seed=seed), sketch_of(other, seed=seed))


@given(sizes, scales, seeds, st.integers(0, 1000))
@settings(max_examples=40)
def test_rounding_is_never_taken_for_damage(size: int, scale: float, seed: bytes, number: int) -> None:
    before = values(size, scale, number)
    for units in (1, 100, 4000):  # in the last place, of each value
        noise = torch.randn(size, generator=torch.Generator().manual_seed(number + 1)).clamp(-3, 3)
        after = before * (1 + units * 2.0**-23 * noise)
        assert apart({"weight": before}, {"weight": after}, seed).is_rounding


@given(sizes, scales, seeds, st.data())
@settings(max_examples=40)
def test_damage_above_the_bound_is_always_found(size: int, scale: float, seed: bytes, data: st.DataObject) -> None:
    before = values(size, scale, 3)
    place = data.draw(st.integers(0, size - 1))
    # One value tells d/4 or more in every sum; the bound of its piece is three times the tolerance of the piece's size.
    piece = 64 * 1024 // 4
    start = place // piece * piece
    least = 4 * 3 * (TOLERANCE * float(before[start : start + piece].norm()) + 1e-30) * 1.01
    after = before.clone()
    after[place] += least * data.draw(st.floats(1.0, 1e6)) * data.draw(st.sampled_from([-1, 1]))
    assert not apart({"weight": before}, {"weight": after}, seed).is_rounding


@pytest.mark.parametrize("bit", [28, 29, 30])
def test_a_flipped_high_bit_is_found_and_a_low_one_is_known_to_be_in_one_place(bit: int) -> None:
    before = values(200_000, 0.02, 1)
    after = before.clone()
    after.view(torch.int32)[77] ^= 1 << bit
    assert (before[77] - after[77]).abs() > 0.01
    low = before.clone()
    low.view(torch.int32)[77] ^= 1
    found = difference(*(sketch_of({"weight": tensor}) for tensor in (before, low)))
    assert found.is_rounding
    pool = ChunkPool()  # chunks of full size

    def full(tensor: Tensor) -> Sketch:
        return sketch(stage({"weight": tensor}, {}, pool).hashed(), SEED)

    assert difference(full(before), full(low)) == Difference(pytest.approx(0.0, abs=1e-6), is_confined=True)
    everywhere = difference(full(before), full(before * (1 + 2.0**-22)))
    assert (everywhere.is_rounding, everywhere.is_confined) == (True, False)
    if abs(after[77]) > 1:
        assert not difference(full(before), full(after)).is_rounding


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_what_is_not_finite_is_damage(value: float) -> None:
    before = values(1000, 1.0, 1)
    after = before.clone()
    after[5] = value
    assert not apart({"weight": before}, {"weight": after}).is_rounding


def test_integers_and_what_else_a_state_consists_of_are_exact_and_own_tensors_do_not_count() -> None:
    state = {"weight": values(10, 1.0, 1), "step": torch.tensor(7), "own": torch.zeros(3)}
    assert apart(state, {**state, "own": torch.ones(3)}).excess == 0.0
    assert apart(state, {**state, "step": torch.tensor(8)}).excess == math.inf
    assert apart(state, {**state, "weight": state["weight"].reshape(2, 5)}).excess == math.inf
    assert apart(state, {**state, "another": torch.zeros(1)}).excess == math.inf


def test_numbers_may_differ_in_their_last_digits() -> None:
    state = {"weight": values(10, 1.0, 1)}
    one = sketch_of(state, {"lr": 0.1, "schedule": [1, {"x": 2.0}], "own": {"seen": 1}})
    close = sketch_of(state, {"lr": 0.1 + 1e-9, "schedule": [1, {"x": 2.0}], "own": {"seen": 2}})
    assert difference(one, close) == Difference(0.0, is_confined=False)
    for other in ({"lr": 0.11, "schedule": [1, {"x": 2.0}]}, {"lr": 0.1, "schedule": [2, {"x": 2.0}]}, {"lr": 0.1}):
        assert difference(one, sketch_of(state, other)) == Difference(0.0, is_confined=False, has_other_numbers=True)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_all_kinds_of_numbers_are_compared(dtype: torch.dtype) -> None:
    before = values(500, 1.0, 1).to(dtype)
    damaged = before.clone()
    damaged[3] = 40.0
    assert apart({"weight": before}, {"weight": before}).excess == 0.0
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):  # whose rounding is nearly as large as they are
        assert not apart({"weight": before}, {"weight": damaged}).is_rounding


def test_a_sketch_travels_and_what_is_none_is_refused() -> None:
    made = sketch_of({"weight": values(3000, 1.0, 1), "bias": values(5, 1.0, 2)}, {"lr": 0.1})
    frames = [memoryview(frame) for frame in made.frames()]
    assert difference(made, read_sketch(made.exact, made.numbers, frames)).excess == 0.0
    for bad in (frames[:2], [frames[0][:-1], *frames[1:]], [frames[0], frames[1][:-8], frames[2]], [frames[2]] * 3):
        with pytest.raises(ProtocolError):
            read_sketch(made.exact, made.numbers, bad)


@given(st.permutations(range(6)))
@settings(max_examples=20)
def test_camps_are_of_those_near_to_one_of_them(order: list[int]) -> None:
    # Each a little further, so that neighbours are near: a chain of small steps must not lead far away.
    base = values(2000, 1.0, 1)
    step = 3 * TOLERANCE * float(base.norm()) / math.sqrt(2000) * 0.6
    pattern = torch.from_numpy(np.random.default_rng(0).standard_normal(2000).astype(np.float32))
    sketches = {f"p{number}": sketch_of({"weight": base + number * step * pattern}) for number in order}
    found = camps(sketches)
    assert set(found) == set(sketches)
    assert found["p0"] != found["p5"]
    assert max(list(found.values()).count(camp) for camp in found.values()) == 3
