"""Codecs: error bounds as documented, hostile frames, determinism, and which tensor takes which."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from potluck import messages
from potluck.errors import ConfigurationError, NotFiniteError, ProtocolError
from potluck.round.codecs import (
    CODEC_NAMES,
    LARGEST,
    SMALLEST,
    Codec,
    CodecChoice,
    CodecRule,
    CodecSpec,
    codec_for,
    is_finite,
)
from potluck.round.codecs.base import Fixed
from potluck.round.codecs.reductions import norm, tree_sum

U = 2.0**-24
SPECS = [CodecSpec(name=name) for name in CODEC_NAMES] + [
    CodecSpec(name="blockwise8", block=64),
    CodecSpec(name="e3m0", block=16),
]
SPARSE = ("sparse2", "sparse16")  # leave values out: see test_sparse_codecs.py
every_codec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.name}{spec.block or ''}")
every_dense_codec = pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if spec.name not in SPARSE], ids=lambda spec: f"{spec.name}{spec.block or ''}"
)


def block_scales(values: np.ndarray, block: int) -> np.ndarray:
    """The largest magnitude of each value's block, per value."""
    largest = [np.abs(values[i : i + block]).max() for i in range(0, len(values), block)]
    return np.repeat(largest, block)[: len(values)]


def expected_and_bound(codec: Codec, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What each value should come back as, in float64, and by how much it may miss, as the docstrings state."""
    name, absolute = codec.name, np.abs(x)
    if name == "float32":
        return x, np.zeros_like(x)
    if name == "float16":
        clipped = np.clip(x, -65504, 65504)
        return clipped, np.maximum(2.0**-11 * np.abs(clipped), 2.0**-25)
    if name == "bfloat16":
        limit = torch.finfo(torch.bfloat16).max
        clipped = np.clip(x, -limit, limit)
        return clipped, np.maximum(2.0**-8 * np.abs(clipped), 2.0**-134)
    x = np.clip(x, -LARGEST, LARGEST)
    absolute = np.abs(x)
    if name == "scaled_float16":
        mean = x.mean()
        # The codec's mean is a float32 sum: allow for where it lies, then apply the bound to that distance.
        slack = 32 * U * absolute.mean()
        distance = np.abs(x - mean) + slack
        bound = 2.0**-11 * distance + 2.0**-39 * distance.max() + 2 * U * (distance + absolute + abs(mean))
        return x, bound + 2.0**-140
    if name == "uniform8":
        low, high = x.min(), x.max()
        bound = (high - low) / 255 / 2 + 2.0**-22 * max(abs(low), abs(high)) + 128 * SMALLEST
        return x, np.full_like(x, bound)
    scales = block_scales(x, codec.block)  # type: ignore[attr-defined]
    if name in ("blockwise8", "sparse8"):
        return x, scales / 254 + 2.0**-22 * scales + SMALLEST
    assert name == "e3m0"
    return x, np.maximum(0.334 * absolute, scales / 127) + SMALLEST


def round_trip(codec: Codec, values: np.ndarray) -> np.ndarray:
    frame = codec.encode(torch.from_numpy(values))
    assert codec.fits(frame.nbytes, len(values))
    out = torch.full((len(values),), torch.nan)
    codec.decode_into(frame.toreadonly(), out)
    return out.numpy().astype(np.float64)


def check_bound(codec: Codec, values: np.ndarray) -> None:
    decoded = round_trip(codec, values)
    expected, bound = expected_and_bound(codec, values.astype(np.float64))
    excess = np.abs(decoded - expected) - bound
    worst = int(excess.argmax()) if len(values) else 0
    assert (excess <= 0).all(), f"{values[worst]} came back as {decoded[worst]}, allowed {bound[worst]}"


finite_chunks = hnp.arrays(
    np.float32,
    st.integers(1, 300),
    elements=st.floats(allow_nan=False, allow_infinity=False, width=32),
    fill=st.floats(-1, 1, width=32),
)


@every_dense_codec
@settings(max_examples=150)
@given(values=finite_chunks)
def test_the_error_stays_within_the_documented_bound(spec: CodecSpec, values: np.ndarray) -> None:
    check_bound(codec_for(spec), values)


@every_dense_codec
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 20_000),
    exponent=st.integers(-40, 40),
    shift=st.sampled_from([0.0, 1.0, -100.0]),
)
def test_the_bound_holds_for_normal_values_of_any_scale(
    spec: CodecSpec, seed: int, count: int, exponent: int, shift: float
) -> None:
    values = np.random.default_rng(seed).standard_normal(count) * 2.0**exponent + shift
    check_bound(codec_for(spec), values.astype(np.float32))


@every_dense_codec
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, -3e38, 65519.0, 65520.0, 1e-30, 1e30])
@pytest.mark.parametrize("count", [1, 2, 511, 4097])
def test_constant_chunks(spec: CodecSpec, value: float, count: int) -> None:
    check_bound(codec_for(spec), np.full(count, value, dtype=np.float32))


@every_codec
def test_nothing_takes_no_bytes(spec: CodecSpec) -> None:
    codec = codec_for(spec)
    empty = torch.empty(0)
    frame = codec.encode(empty)
    assert frame.nbytes == codec.encoded_bytes(0) == 0
    codec.decode_into(frame, empty)
    codec.decode_into(b"", empty)
    codec.add_decoded(b"", 0.5, empty)


@every_codec
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 4500, 5000])
def test_encoding_refuses_what_is_not_finite(spec: CodecSpec, poison: float, position: int) -> None:
    values = torch.linspace(-1, 1, 5001)
    values[position] = poison
    with pytest.raises(NotFiniteError):
        codec_for(spec).encode(values)


def test_opposite_infinities_do_not_cancel() -> None:
    values = torch.tensor([1.0, torch.inf, -torch.inf])
    for spec in SPECS:
        with pytest.raises(NotFiniteError):
            codec_for(spec).encode(values)


@every_codec
@settings(max_examples=150)
@given(data=st.data(), count=st.integers(0, 200))
def test_any_bytes_decode_to_finite_values_or_raise(spec: CodecSpec, data: st.DataObject, count: int) -> None:
    codec = codec_for(spec)
    size = codec.encoded_bytes(count)
    frame = data.draw(st.binary(min_size=size, max_size=size))
    out = torch.zeros(count)
    try:
        codec.decode_into(frame, out)
    except (NotFiniteError, ProtocolError):
        before = torch.ones(count)
        with pytest.raises((NotFiniteError, ProtocolError)):
            codec.add_decoded(frame, 0.5, before)
        assert torch.equal(before, torch.ones(count)), "a refused frame must leave the sum as it was"
        with pytest.raises((NotFiniteError, ProtocolError)):
            codec.check(frame, count)
    else:
        assert torch.isfinite(out).all()
        codec.check(frame, count)


@every_codec
@settings(max_examples=50)
@given(count=st.integers(0, 5000), difference=st.integers(-9, 9).filter(bool))
def test_a_frame_of_the_wrong_length_is_a_protocol_error(spec: CodecSpec, count: int, difference: int) -> None:
    codec = codec_for(spec)
    frame = b"\xff" * max(0, codec.encoded_bytes(count) + difference)  # zeros would be a right frame of no values
    if len(frame) == codec.encoded_bytes(count):
        return
    with pytest.raises(ProtocolError, match="bytes"):
        codec.decode_into(frame, torch.zeros(count))
    with pytest.raises(ProtocolError, match="bytes"):
        codec.add_decoded(frame, 1.0, torch.zeros(count))


@pytest.mark.parametrize("name", ["scaled_float16", "uniform8", "blockwise8", "e3m0"])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, 3e38])
def test_a_scale_that_no_encoder_writes_is_a_protocol_error(name: str, scale: float) -> None:
    codec = codec_for(CodecSpec(name=name))
    frame = bytearray(codec.encode(torch.linspace(-1, 1, 9000)))
    header_of_two = name in ("scaled_float16", "uniform8")
    frame[4:8] = np.float32(scale).tobytes()  # the second field, or the second block's scale
    with pytest.raises(ProtocolError):
        codec.decode_into(frame, torch.zeros(9000))
    if header_of_two:
        frame = bytearray(codec.encode(torch.linspace(-1, 1, 9000)))
        frame[0:4] = np.float32(scale).tobytes()
        if scale != -1.0:
            with pytest.raises(ProtocolError):
                codec.decode_into(frame, torch.zeros(9000))


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0xFFFF])
def test_a_float16_frame_with_infinity_or_nan_is_refused(bits: int) -> None:
    frame = bytearray(2 * 1000)
    frame[1000:1002] = bits.to_bytes(2, "little")
    for name in ("float16", "scaled_float16"):
        codec = codec_for(CodecSpec(name=name))
        head = np.array([0.0, 1.0], dtype=np.float32).tobytes() if name == "scaled_float16" else b""
        with pytest.raises(NotFiniteError):
            codec.decode_into(head + frame, torch.zeros(1000))


@every_codec
@settings(max_examples=60)
@given(values=finite_chunks, weight=st.floats(0.0, 2.0**20, width=32))
def test_adding_decoded_is_decoding_then_multiplying_then_adding(
    spec: CodecSpec, values: np.ndarray, weight: float
) -> None:
    codec = codec_for(spec)
    values = np.clip(values, -1e30, 1e30)
    frame = codec.encode(torch.from_numpy(values))
    decoded = torch.empty(len(values))
    codec.decode_into(frame, decoded)
    start = np.linspace(-1, 1, len(values), dtype=np.float32)
    out = torch.from_numpy(start.copy())
    codec.add_decoded(frame, weight, out)
    expected = start + decoded.numpy() * np.float32(weight)  # two roundings, not a fused one
    assert out.numpy().tobytes() == expected.tobytes()


@every_codec
def test_every_kind_of_buffer_at_any_alignment(spec: CodecSpec) -> None:
    codec = codec_for(spec)
    values = torch.linspace(-3, 3, 1001)
    frame = bytes(codec.encode(values))
    expected = torch.empty(1001)
    codec.decode_into(frame, expected)
    for offset in range(4):
        shifted = bytes(offset) + frame
        for buffer in (bytearray(shifted), shifted):
            out = torch.empty(1001)
            codec.decode_into(memoryview(buffer)[offset:], out)
            assert torch.equal(out, expected)
        if not isinstance(codec, Fixed):
            continue
        target = bytearray(offset + len(frame))
        codec.encode_into(values, memoryview(target)[offset:])
        assert target[offset:] == frame


@every_codec
def test_zero_and_sign_survive(spec: CodecSpec) -> None:
    values = torch.tensor([0.0, 0.0, 1.0, -1.0])
    out = torch.empty(4)
    codec = codec_for(spec)
    codec.decode_into(codec.encode(values), out)
    assert out[2] > 0.9
    assert out[3] < -0.9
    assert out[:2].abs().max() <= 1 / 255


def test_only_chunks_are_encoded() -> None:
    codec = codec_for(CodecSpec(name="float16"))
    assert isinstance(codec, Fixed)
    for wrong in (
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(2, 2),
        torch.zeros(8)[::2],
        torch.zeros(4, requires_grad=True),
    ):
        with pytest.raises(ValueError, match="chunk"):
            codec.encode(wrong)
    with pytest.raises(ValueError, match="bytes"):
        codec.encode_into(torch.zeros(4), bytearray(7))


DIGEST_SCRIPT = """
import hashlib, sys, torch
from potluck.round.codecs import CODEC_NAMES, CodecSpec, codec_for
torch.set_num_threads(int(sys.argv[1]))
values = (torch.arange(300_001) * 7919 % 10_007).float() / 1000 - 4.7
for name in CODEC_NAMES:
    codec = codec_for(CodecSpec(name=name))
    frame = codec.encode(values)
    total = torch.full((300_001,), 0.1)
    codec.add_decoded(frame, 0.3, total)
    print(hashlib.sha256(bytes(frame) + total.numpy().tobytes()).hexdigest())
"""


def test_same_values_same_bytes_whatever_the_process_its_threads_and_its_vector_unit() -> None:
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
    assert len(outputs.pop().split()) == len(CODEC_NAMES)


def test_threads_do_not_share_scratch() -> None:
    start = threading.Barrier(4)

    def work(seed: int) -> str:
        values = torch.randn(40_000, generator=torch.Generator().manual_seed(seed))
        digest = hashlib.sha256()
        start.wait(timeout=30)
        for _ in range(5):
            for spec in SPECS:
                out = torch.zeros(40_000)
                codec_for(spec).add_decoded(codec_for(spec).encode(values), 0.5, out)
                digest.update(out.numpy().tobytes())
        return digest.hexdigest()

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(work, range(4)))
    start = threading.Barrier(1)
    assert together == [work(seed) for seed in range(4)]


@settings(max_examples=100)
@given(values=finite_chunks, poison=st.sampled_from([None, np.nan, np.inf, -np.inf]), data=st.data())
def test_is_finite_agrees_with_numpy(values: np.ndarray, poison: float | None, data: st.DataObject) -> None:
    if poison is not None:
        values[data.draw(st.integers(0, len(values) - 1))] = poison
    assert is_finite(torch.from_numpy(values)) == bool(np.isfinite(values).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_is_finite_for_every_dtype(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    overflowing = torch.full((64,), largest, dtype=dtype)  # the sum is infinite, the values are not
    assert is_finite(overflowing)
    assert is_finite(torch.empty(0, dtype=dtype))
    assert is_finite(torch.tensor(1.0, dtype=dtype, requires_grad=True))
    overflowing[5] = torch.nan
    assert not is_finite(overflowing)
    assert not is_finite(torch.tensor(torch.inf, dtype=dtype))


def test_integers_are_always_finite() -> None:
    assert is_finite(torch.tensor([2**62, -5]))


@settings(max_examples=100)
@given(values=finite_chunks)
def test_sums_and_norms_match_float64(values: np.ndarray) -> None:
    values = np.clip(values, -1e36, 1e36)
    wide = values.astype(np.float64)
    assert abs(tree_sum(torch.from_numpy(values)) - wide.sum()) <= 16 * U * np.abs(wide).sum() + 1e-40
    exact = np.linalg.norm(wide)
    assert norm(torch.from_numpy(values)) == pytest.approx(exact, rel=1e-5, abs=1e-40)


def test_norm_does_not_overflow() -> None:
    assert norm(torch.full((4,), 3e38)) == pytest.approx(6e38)
    assert norm(torch.zeros(4)) == 0.0
    assert norm(torch.empty(0)) == 0.0


def test_unknown_codecs_and_parameters_say_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="float16"):
        codec_for(CodecSpec(name="zip"))
    with pytest.raises(ConfigurationError, match="no blocks"):
        codec_for(CodecSpec(name="float16", block=64))
    with pytest.raises(ConfigurationError, match="leaves nothing out"):
        codec_for(CodecSpec(name="float16", keep=64))
    for keep in (-1, 4097):
        with pytest.raises(ConfigurationError, match="1 to 4096"):
            codec_for(CodecSpec(name="sparse2", keep=keep))
    for block in (-4096, 8, 100, 2**17):
        with pytest.raises(ConfigurationError, match="power of two"):
            codec_for(CodecSpec(name="blockwise8", block=block))


def test_sizes_on_the_wire() -> None:
    sizes = {name: codec_for(CodecSpec(name=name)).encoded_bytes(2**20) for name in CODEC_NAMES}
    assert sizes == {
        "float32": 2**22,
        "float16": 2**21,
        "bfloat16": 2**21,
        "scaled_float16": 2**21 + 8,
        "uniform8": 2**20 + 8,
        "blockwise8": 2**20 + 4 * 256,
        "e3m0": 2**19 + 4 * 2048,
        "sparse2": 4 + 256 * (8 + 64 + 16),
        "sparse8": 4 + 2**20 + 4 * 256,
        "sparse16": 4 + 256 * (64 + 36),
    }


def test_the_default_choice() -> None:
    choice = CodecChoice()
    assert choice.codec_of("h.weight", "gradient", 10**6).name == "float16"
    assert choice.codec_of("h.bias", "gradient", 768).name == "float32"
    assert choice.codec_of("h.weight", "parameter", 10**6).name == "float32"
    assert choice.codec_of("h.weight/exp_avg_sq", "optimizer", 10**6).name == "bfloat16"
    assert choice.codec_of("running_mean", "buffer", 10**6).name == "float32"
    assert choice.codec_of("steps", "gradient", 10**6, integer=True).name == "float32"


def test_the_first_rule_that_fits_decides() -> None:
    four_bit = CodecSpec(name="e3m0")
    choice = CodecChoice(
        rules=(
            CodecRule(codec=CodecSpec(name="float32"), pattern="*.norm.*"),
            CodecRule(codec=four_bit, pattern="layers.[0-3].*", role="gradient", at_least=1000),
            CodecRule(codec=CodecSpec(name="blockwise8", block=256)),
        )
    )
    assert choice.codec_of("layers.1.norm.weight", "gradient", 5000).name == "float32"
    assert choice.codec_of("layers.1.w", "gradient", 5000) == four_bit
    assert choice.codec_of("layers.1.w", "gradient", 999).name == "blockwise8"
    assert choice.codec_of("layers.7.w", "gradient", 5000).block == 256
    assert choice.codec_of("layers.1.w", "parameter", 5000).name == "blockwise8"
    assert CodecChoice(rules=()).codec_of("x", "gradient", 10**9).name == "float32"


def test_choices_by_role_and_for_everything() -> None:
    choice = CodecChoice.by_role({"gradient": "e3m0", "parameter": "float16"}, small="float16", small_elements=10)
    assert choice.codec_of("w", "gradient", 11).name == "e3m0"
    assert choice.codec_of("w", "gradient", 10).name == "float16"
    assert choice.codec_of("w", "buffer", 11).name == "float32"
    assert CodecChoice.everything("uniform8").codec_of("w", "buffer", 1).name == "uniform8"


def test_a_choice_travels_as_a_message() -> None:
    choice = CodecChoice(rules=(CodecRule(codec=CodecSpec(name="blockwise8", block=128), role="buffer", at_most=7),))
    assert messages.decode(CodecChoice, messages.encode(choice)) == choice


def test_wrong_rules_are_refused_when_they_are_made() -> None:
    with pytest.raises(ConfigurationError, match="codec"):
        CodecRule(codec=CodecSpec(name="zip"))
    with pytest.raises(ConfigurationError, match="fits no tensor"):
        CodecRule(codec=CodecSpec(name="float16"), at_least=5, at_most=4)
    with pytest.raises(ConfigurationError, match="pattern"):
        CodecRule(codec=CodecSpec(name="float16"), pattern="")
    hostile = msgspec.msgpack.encode({"rules": [{"codec": {"name": "zip"}}]})
    with pytest.raises(ProtocolError):
        messages.decode(CodecChoice, hostile)
