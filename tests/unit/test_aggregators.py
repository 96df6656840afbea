"""Aggregators: equal to plain references, indifferent to arrival, and within their bounds under poison."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import weakref
from statistics import median_low

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from potluck import messages
from potluck.errors import ConfigurationError, PeerError, ProtocolError
from potluck.round.aggregators import AGGREGATOR_NAMES, Aggregated, AggregatorSpec, aggregator_for
from potluck.round.aggregators.order import SLICE
from potluck.round.codecs import CODEC_NAMES, CodecSpec, EncodedChunk, codec_for

every_aggregator = pytest.mark.parametrize("name", AGGREGATOR_NAMES)
ROBUST = tuple(name for name in AGGREGATOR_NAMES if name != "mean")
U = 2.0**-24


def aggregate(
    spec: AggregatorSpec | str, rows: np.ndarray, weights: np.ndarray | None = None, order: list[int] | None = None
) -> tuple[np.ndarray, Aggregated]:
    """Aggregate the rows as peers p00, p01, …, added in the given order."""
    spec = AggregatorSpec(name=spec) if isinstance(spec, str) else spec
    weights = np.ones(len(rows)) if weights is None else weights
    names = [f"p{index:02}" for index in range(len(rows))]
    accumulator = aggregator_for(spec).begin(rows.shape[1], dict(zip(names, weights.tolist(), strict=True)))
    for index in order or range(len(rows)):
        accumulator.add(names[index], torch.from_numpy(rows[index].astype(np.float32)))
    out = torch.full((rows.shape[1],), torch.nan)
    outcome = accumulator.result(out)
    return out.numpy(), outcome


# References: one coordinate at a time, in float64, by the definitions.


def reference_trimmed(column: np.ndarray, trim: float) -> float:
    starts, count = np.arange(len(column)), len(column)
    mass = np.clip(np.minimum(starts + 1, (1 - trim) * count) - np.maximum(starts, trim * count), 0, None)
    return float((mass * np.sort(column)).sum() / mass.sum())


def centers(rows: np.ndarray, spec: AggregatorSpec) -> tuple[list[np.ndarray], float]:
    """Where the center of centered clipping lies at first and after each move, and how far one may pull."""
    center = np.median(rows, axis=0)
    limit = spec.radius * median_low(np.linalg.norm(rows - center, axis=1).tolist())
    path = [center]
    for _ in range(spec.iterations):
        differences = rows - center
        lengths = np.linalg.norm(differences, axis=1)
        factors = np.divide(limit, lengths, out=np.ones_like(lengths), where=lengths > limit)
        center = center + factors @ differences / len(rows)
        path.append(center)
    return path, limit


def reference_median_norm(rows: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1)
    limit = median_low(norms.tolist())
    factors = np.divide(limit, norms, out=np.ones_like(norms), where=norms > limit)
    return factors @ rows / len(rows)


def reference(spec: AggregatorSpec, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float64)
    if spec.name == "mean":
        return weights @ rows / weights.sum()
    if spec.name == "median":
        return np.median(rows, axis=0)
    if spec.name == "trimmed_mean":
        return np.array([reference_trimmed(column, spec.trim) for column in rows.T])
    if spec.name == "centered_clipping":
        return centers(rows, spec)[0][-1]
    assert spec.name == "median_norm_clipping"
    return reference_median_norm(rows)


def contributions(elements: st.SearchStrategy[float]) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float32, st.tuples(st.integers(1, 12), st.integers(1, 20)), elements=elements)


small_values = contributions(st.floats(-1000, 1000, width=32))
any_values = contributions(st.floats(allow_nan=False, allow_infinity=False, width=32))


@every_aggregator
@settings(max_examples=100)
@given(rows=small_values, data=st.data())
def test_equals_the_plain_reference(name: str, rows: np.ndarray, data: st.DataObject) -> None:
    exponents = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
    weights = 2.0 ** np.array(exponents)
    spec = AggregatorSpec(name=name, trim=data.draw(st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.45])))
    result, outcome = aggregate(spec, rows, weights)
    scale = np.abs(rows).max() + 1e-30
    np.testing.assert_allclose(result, reference(spec, rows, weights), atol=2e-5 * scale, rtol=0)
    assert outcome.weight == weights.sum()
    assert len(outcome.contributors) == len(rows)


@settings(max_examples=200)
@given(rows=any_values, data=st.data())
def test_the_mean_stays_within_its_rounding_bound(rows: np.ndarray, data: st.DataObject) -> None:
    rows = np.clip(rows, -1e30, 1e30)
    weights = np.array(data.draw(st.lists(st.floats(0.5, 1e6), min_size=len(rows), max_size=len(rows))))
    result, _ = aggregate("mean", rows, weights)
    shares = weights / weights.sum()
    exact, magnitude = shares @ rows.astype(np.float64), shares @ np.abs(rows.astype(np.float64))
    assert (np.abs(result - exact) <= (len(rows) + 4) * U * magnitude + 1e-42).all()


@every_aggregator
@settings(max_examples=80)
@given(rows=any_values, data=st.data())
def test_the_order_of_arrival_changes_nothing(name: str, rows: np.ndarray, data: st.DataObject) -> None:
    weights = np.array(data.draw(st.lists(st.sampled_from([1.0, 3.0, 7.7]), min_size=len(rows), max_size=len(rows))))
    order = data.draw(st.permutations(range(len(rows))))
    in_order, _ = aggregate(name, rows, weights)
    shuffled, _ = aggregate(name, rows, weights, order)
    assert in_order.tobytes() == shuffled.tobytes()
    assert np.isfinite(in_order).all()


@every_aggregator
@settings(max_examples=60)
@given(rows=small_values)
def test_the_result_lies_among_the_contributions(name: str, rows: np.ndarray) -> None:
    result, _ = aggregate(name, rows)
    if name in ("median_norm_clipping", "centered_clipping"):  # these bound lengths
        assert np.linalg.norm(result) <= np.linalg.norm(rows, axis=1).max() * (1 + 1e-4) + np.ptp(rows, axis=0).sum()
    else:
        # Among the smallest numbers there are, halves are rounded to nothing.
        slack = 1e-5 * np.abs(rows).max() + len(rows) * np.finfo(np.float32).smallest_subnormal
        assert (result >= rows.min(axis=0) - slack).all()
        assert (result <= rows.max(axis=0) + slack).all()


@every_aggregator
@settings(max_examples=60)
@given(row=hnp.arrays(np.float32, 50, elements=st.floats(allow_nan=False, allow_infinity=False, width=32)))
def test_one_contribution_is_the_result(name: str, row: np.ndarray) -> None:
    result, _ = aggregate(name, row[None], np.array([4096.0]))
    # Bit for bit, but for the sign of zero.
    assert np.array_equal(result, row)
    if name == "mean":
        assert result.tobytes() == row.tobytes()


@every_aggregator
def test_equal_contributions_are_the_result(name: str) -> None:
    row = np.linspace(-2, 2, 1001, dtype=np.float32)
    result, _ = aggregate(name, np.stack([row] * 5), np.array([1.0, 2.0, 3.0, 4.0, 5.5]))
    np.testing.assert_allclose(result, row, atol=1e-6)


@every_aggregator
def test_chunks_larger_than_a_slice(name: str) -> None:
    rows = np.random.default_rng(3).standard_normal((5, SLICE + 77)).astype(np.float32)
    for weights in (np.ones(5), np.array([1.0, 2.0, 4.0, 1.0, 2.0])):
        whole, _ = aggregate(name, rows, weights)
        tail = slice(SLICE - 5, SLICE + 77)
        if name in ("mean", "median", "trimmed_mean"):  # these treat each coordinate on its own
            assert np.array_equal(whole[tail], aggregate(name, rows[:, tail], weights)[0])
        assert np.isfinite(whole).all()


DIGEST_SCRIPT = """
import hashlib, sys, torch
from potluck.round.aggregators import AGGREGATOR_NAMES, AggregatorSpec, aggregator_for
torch.set_num_threads(int(sys.argv[1]))
rows = {f"p{i}": ((torch.arange(100_001) + i) * 7919 % (10_007 + i)).float() / 1000 - i for i in range(7)}
for weights in ([1.0] * 7, [1.0, 2.0, 3.3, 0.7, 9.1, 1.1, 4.0]):
    for name in AGGREGATOR_NAMES:
        out = torch.empty(100_001)
        aggregator_for(AggregatorSpec(name=name)).aggregate(rows, dict(zip(rows, weights)), out)
        print(name, hashlib.sha256(out.numpy().tobytes()).hexdigest())
"""


def test_an_audit_on_another_machine_reaches_the_same_bits() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", DIGEST_SCRIPT, threads],
            check=True,
            capture_output=True,
            text=True,
            # torch then takes its kernels for a machine without vector instructions
            env=os.environ | ({"ATEN_CPU_CAPABILITY": "default"} if plain else {}),
        ).stdout
        for threads, plain in (("2", False), ("1", True))
    }
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == 2 * len(AGGREGATOR_NAMES)


# Weights: what senders say of themselves.


def claimed_weights(count: int) -> st.SearchStrategy[np.ndarray]:
    """From one sample to a billion, as anybody may claim."""
    return hnp.arrays(np.float64, count, elements=st.sampled_from([1.0, 16.0, 77.7, 1e9, 1e12]))


@pytest.mark.parametrize("name", ROBUST)
@settings(max_examples=60)
@given(rows=any_values, data=st.data())
def test_weights_buy_no_influence_on_a_robust_aggregator(name: str, rows: np.ndarray, data: st.DataObject) -> None:
    claimed, outcome = aggregate(name, rows, data.draw(claimed_weights(len(rows))))
    equal, _ = aggregate(name, rows)
    assert claimed.tobytes() == equal.tobytes()
    assert len(outcome.contributors) == len(rows)


@settings(max_examples=150)
@given(
    name=st.sampled_from(["median_norm_clipping", "centered_clipping"]),
    honest=hnp.arrays(np.float32, (3, 6), elements=st.floats(-100, 100, width=32)),
    direction=hnp.arrays(np.float32, 6, elements=st.floats(-1, 1, width=32)),
    size=st.sampled_from([1.0, 1e3, 1e9, 1e30]),
    weights=claimed_weights(4),
)
def test_one_poisoner_of_four_pulls_no_further_than_the_honest_reach(
    name: str, honest: np.ndarray, direction: np.ndarray, size: float, weights: np.ndarray
) -> None:
    """Whatever it sends and claims: the bounds of clipping.py in which nothing but honest quantities stands."""
    spec = AggregatorSpec(name=name)
    result, _ = aggregate(name, np.concatenate([honest, (direction * size)[None]]), weights)
    exact = honest.astype(np.float64)
    mean, longest = exact.mean(axis=0), np.linalg.norm(exact, axis=1).max()
    if name == "median_norm_clipping":
        bound = longest
        error = float(np.linalg.norm(result))
    else:
        first = float(np.linalg.norm(np.ptp(exact, axis=0)))
        bound = first + spec.iterations * spec.radius * (first + np.linalg.norm(exact - mean, axis=1).max())
        error = float(np.linalg.norm(result - mean))
    assert error <= bound * (1 + 1e-4) + 1e-4


# Poison: three of ten.


def honest_rows(seed: int, elements: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    truth = generator.standard_normal(elements)
    return truth + 0.5 * generator.standard_normal((7, elements))


def sign_flip(honest: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    return np.tile(-100 * honest.mean(axis=0), (3, 1))


def random_noise(honest: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    return 100 * generator.standard_normal((3, honest.shape[1]))


def constant(honest: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    return np.full((3, honest.shape[1]), 1000.0)


def huge(honest: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    return np.full((3, honest.shape[1]), -3e38)


def error_and_bound(
    spec: AggregatorSpec, honest: np.ndarray, poison: np.ndarray, result: np.ndarray
) -> tuple[float, float]:
    """How far the result is from the honest mean, and how far the docstrings allow it to be; equal weights."""
    mean, share = honest.mean(axis=0), len(poison) / (len(honest) + len(poison))
    error = float(np.linalg.norm(result - mean))
    spread = np.ptp(honest, axis=0)
    everybody = np.concatenate([honest, poison])
    if spec.name in ("median", "trimmed_mean"):
        assert (result >= honest.min(axis=0) - 1e-5).all()
        assert (result <= honest.max(axis=0) + 1e-5).all()
        return error, float(np.linalg.norm(spread))
    if spec.name == "median_norm_clipping":
        norms = np.linalg.norm(honest, axis=1)
        limit = median_low(np.linalg.norm(everybody, axis=1).tolist())
        cut = np.clip(norms - limit, 0, None).mean()
        return error, float((1 - share) * cut + share * (limit + np.linalg.norm(mean)))
    assert spec.name == "centered_clipping"
    path, limit = centers(everybody, spec)
    first = np.linalg.norm(path[0] - mean)
    assert first <= np.linalg.norm(spread)
    assert limit <= spec.radius * (first + np.linalg.norm(honest - mean, axis=1).max())
    assert error <= first + spec.iterations * limit
    for center in path[:-1]:
        assert np.linalg.norm(honest - center, axis=1).max() <= limit, (
            "the bound is for honest peers that are not clipped"
        )
    return error, float(share**spec.iterations * first + limit * share / (1 - share))


@pytest.mark.parametrize("attack", [sign_flip, random_noise, constant, huge])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ROBUST)
def test_three_poisoned_of_ten_stay_within_the_bound(name: str, attack, seed: int) -> None:
    honest = honest_rows(seed, 5000)
    poison = attack(honest, np.random.default_rng(seed + 100))
    rows = np.concatenate([poison, honest])[np.random.default_rng(seed + 200).permutation(10)]
    spec = AggregatorSpec(name=name)
    result, outcome = aggregate(spec, rows)
    assert len(outcome.contributors) == 10, "the poison is finite: it is withstood, not refused"
    error, bound = error_and_bound(spec, honest, poison, result.astype(np.float64))
    assert error <= bound * (1 + 1e-4)
    assert bound <= 3 * np.linalg.norm(honest.mean(axis=0)), "a bound that says something"
    mean_result, _ = aggregate("mean", rows)
    mean_error = float(np.linalg.norm(mean_result.astype(np.float64) - honest.mean(axis=0)))
    assert mean_error > 5 * bound, "the mean does not withstand it"


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
@settings(max_examples=150)
@given(
    honest=hnp.arrays(np.float32, (7, 6), elements=st.floats(-100, 100, width=32)),
    poison=hnp.arrays(np.float32, (3, 6), elements=st.floats(allow_nan=False, allow_infinity=False, width=32)),
    weights=claimed_weights(10),
)
def test_no_poison_moves_a_rank_out_of_the_honest_range(
    name: str, honest: np.ndarray, poison: np.ndarray, weights: np.ndarray
) -> None:
    rows = np.concatenate([honest, poison])
    result, _ = aggregate(name, rows, weights)
    slack = 1e-4 * np.abs(honest).max() + 1e-37
    assert (result >= honest.min(axis=0) - slack).all()
    assert (result <= honest.max(axis=0) + slack).all()


# What is not usable is left out and named.


@every_aggregator
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out_and_named(name: str, poison: float) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
    expected, _ = aggregate(name, rows[1:])
    spoilt = rows.copy()
    spoilt[0, 50] = poison
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        result, outcome = aggregate(name, spoilt, order=order)
        assert np.array_equal(result, expected)
        assert outcome.contributors == ("p01", "p02", "p03")
        assert outcome.weight == 3.0
        assert list(outcome.rejected) == ["p00"]
        assert "NaN or infinity" in outcome.rejected["p00"]


@every_aggregator
@pytest.mark.parametrize("codec_name", CODEC_NAMES)
def test_encoded_contributions_equal_their_decoded_values(name: str, codec_name: str) -> None:
    codec = codec_for(CodecSpec(name=codec_name))
    rows = np.random.default_rng(1).standard_normal((4, 3000)).astype(np.float32)
    encoded = {f"p{i:02}": EncodedChunk(codec, codec.encode(torch.from_numpy(row))) for i, row in enumerate(rows)}
    decoded = np.empty_like(rows)
    for row, chunk in zip(decoded, encoded.values(), strict=True):
        chunk.decode_into(torch.from_numpy(row))
    weights = np.array([1.0, 2.0, 1.0, 5.0])
    out = torch.empty(3000)
    aggregator = aggregator_for(AggregatorSpec(name=name))
    aggregator.aggregate(encoded, dict(zip(encoded, weights.tolist(), strict=True)), out)
    assert out.numpy().tobytes() == aggregate(name, decoded, weights)[0].tobytes()


@every_aggregator
def test_frames_that_do_not_decode_are_left_out_and_named(name: str) -> None:
    codec = codec_for(CodecSpec(name="blockwise8"))
    good = EncodedChunk(codec, codec.encode(torch.ones(10)))
    short = EncodedChunk(codec, bytes(3))
    broken = EncodedChunk(codec, b"\xff" * 14)
    out = torch.empty(10)
    outcome = aggregator_for(AggregatorSpec(name=name)).aggregate(
        {"a": short, "b": good, "c": broken}, {"a": 1.0, "b": 1.0, "c": 1.0}, out
    )
    assert outcome.contributors == ("b",)
    assert sorted(outcome.rejected) == ["a", "c"]
    assert torch.allclose(out, torch.ones(10))


@every_aggregator
def test_a_chunk_that_nobody_contributes_to_is_an_error(name: str) -> None:
    accumulator = aggregator_for(AggregatorSpec(name=name)).begin(3, {"a": 1.0, "b": 1.0})
    accumulator.add("a", torch.tensor([1.0, math.nan, 2.0]))
    accumulator.drop("b")
    with pytest.raises(PeerError, match="a: NaN"):
        accumulator.result(torch.empty(3))


@every_aggregator
def test_missing_and_dropped_senders_are_not_in_the_result(name: str) -> None:
    accumulator = aggregator_for(AggregatorSpec(name=name)).begin(2, {"a": 1.0, "b": 3.0, "c": 1.0, "d": 2.0})
    accumulator.add("d", torch.tensor([4.0, 0.0]))
    accumulator.drop("b")
    accumulator.add("a", torch.tensor([4.0, 0.0]))
    accumulator.drop("a")  # too late: it is in
    out = torch.empty(2)
    outcome = accumulator.result(out)
    assert outcome == Aggregated(contributors=("a", "d"), weight=3.0, rejected={})
    assert torch.equal(out, torch.tensor([4.0, 0.0]))


@every_aggregator
def test_strangers_and_repetitions_are_refused(name: str) -> None:
    accumulator = aggregator_for(AggregatorSpec(name=name)).begin(1, {"a": 1.0, "b": 1.0})
    accumulator.add("a", torch.zeros(1))
    with pytest.raises(ValueError, match="already"):
        accumulator.add("a", torch.zeros(1))
    with pytest.raises(ValueError, match="not among"):
        accumulator.add("z", torch.zeros(1))
    accumulator.drop("b")
    with pytest.raises(ValueError, match="already"):
        accumulator.add("b", torch.zeros(1))


@every_aggregator
def test_empty_chunks(name: str) -> None:
    result, outcome = aggregate(name, np.zeros((3, 0), dtype=np.float32))
    assert result.shape == (0,)
    assert len(outcome.contributors) == 3


def test_the_mean_holds_only_what_came_before_its_turn() -> None:
    accumulator = aggregator_for(AggregatorSpec()).begin(1, {"a": 1.0, "b": 1.0, "c": 1.0})
    first, last = torch.ones(1), torch.ones(1)
    first_is_held, last_is_held = weakref.ref(first), weakref.ref(last)
    accumulator.add("a", first)
    accumulator.add("c", last)
    del first, last
    assert first_is_held() is None
    assert last_is_held() is not None
    accumulator.drop("b")
    assert last_is_held() is None


@every_aggregator
def test_sums_beyond_float32_saturate(name: str) -> None:
    largest = np.finfo(np.float32).max
    rows = np.stack([np.full(4, largest), np.full(4, largest), np.full(4, largest)]).astype(np.float32)
    result, _ = aggregate(name, rows, np.array([1.0, 1.0, 3.0]))
    assert np.isfinite(result).all()
    assert (result > 0.99 * largest).all()


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_weights_must_be_positive(weight: float) -> None:
    with pytest.raises(ConfigurationError, match="positive"):
        aggregator_for(AggregatorSpec()).begin(1, {"a": 1.0, "b": weight})


@pytest.mark.parametrize(
    "wrong",
    [{"trim": 0.5}, {"trim": -0.1}, {"radius": 0.0}, {"radius": math.nan}, {"iterations": 0}, {"iterations": 1000}],
)
def test_wrong_parameters_say_what_to_do(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="take"):
        AggregatorSpec(name="mean", **wrong)


def test_specs_travel_as_messages() -> None:
    spec = AggregatorSpec(name="trimmed_mean", trim=0.2)
    assert messages.decode(AggregatorSpec, messages.encode(spec)) == spec
    with pytest.raises(ProtocolError):
        messages.decode(AggregatorSpec, messages.encode({"name": "trimmed_mean", "trim": 3.0}))
    with pytest.raises(ConfigurationError, match="centered_clipping"):
        aggregator_for(AggregatorSpec(name="vote"))
