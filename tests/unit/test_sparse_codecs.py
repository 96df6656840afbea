"""Sparse codecs: what is sent, where it stands, what comes back, and what hostile frames come to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from roundlab import assert_same_average, lab

from potluck.errors import NotFiniteError, ProtocolError
from potluck.round.codecs import CodecChoice, CodecRule, CodecSpec, codec_for
from potluck.round.codecs.positions import (
    best_low_bits,
    positions_bytes,
    read_positions,
    write_positions,
)
from potluck.round.codecs.sparse import BLOCK, choose, into_bins
from potluck.round.plan.chunks import ChunkGrid, largest_reply_bytes, traffic_bytes
from potluck.round.plan.specs import CodecSpan
from potluck.sim.virtualloop import in_virtual_time

TWO, SIXTEEN, EIGHT = (CodecSpec(name=name) for name in ("sparse2", "sparse16", "sparse8"))


def decoded(spec: CodecSpec, values: torch.Tensor) -> torch.Tensor:
    codec = codec_for(spec)
    out = torch.full_like(values, torch.nan)
    codec.decode_into(codec.encode(values), out)
    return out


def normal(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


# Positions


@settings(max_examples=100)
@given(
    universe=st.integers(1, 5000), share=st.floats(0, 1), seed=st.integers(0, 2**32 - 1), low_bits=st.integers(0, 12)
)
def test_positions_come_back(universe: int, share: float, seed: int, low_bits: int) -> None:
    count = round(share * universe)
    positions = np.sort(np.random.default_rng(seed).choice(universe, count, replace=False))
    frame = b"".join(piece.tobytes() for piece in write_positions(positions, universe, low_bits))
    assert len(frame) == positions_bytes(count, universe, low_bits)
    assert read_positions(frame, 0, count, universe, low_bits).tolist() == positions.tolist()


def test_positions_take_about_as_few_bits_as_possible() -> None:
    assert 8 * positions_bytes(64, 4096, best_low_bits(64, 4096)) == 64 * 8
    assert 8 * positions_bytes(256, 4096, best_low_bits(256, 4096)) == 256 * 6
    assert 8 * positions_bytes(2048, 4096, best_low_bits(2048, 4096)) == 2048 * 3


@settings(max_examples=300)
@given(data=st.binary(min_size=64, max_size=64), count=st.integers(0, 64))
def test_positions_of_any_bytes_increase_or_are_refused(data: bytes, count: int) -> None:
    universe, low_bits = 300, 3
    if positions_bytes(count, universe, low_bits) > len(data):
        return
    try:
        positions = read_positions(data, 0, count, universe, low_bits)
    except ProtocolError:
        return
    assert len(positions) == count
    assert (np.diff(positions) > 0).all()
    assert all(0 <= position < universe for position in positions)


# What is sent


@pytest.mark.parametrize("count", [1, 40, BLOCK, BLOCK + 1, 3 * BLOCK - 7])
def test_the_largest_of_each_block_are_chosen(count: int) -> None:
    values = normal(count)
    chosen = set(choose(values, 5).tolist())
    for start in range(0, count, BLOCK):
        block = values[start : start + BLOCK].abs()
        best = block.topk(min(5, block.numel())).indices + start
        assert set(best.tolist()) == {position for position in chosen if start <= position < start + BLOCK}


def test_of_equal_values_the_first_are_chosen_and_of_zeros_none() -> None:
    values = torch.zeros(2 * BLOCK)
    values[100:110] = 1.0
    values[105] = -3.0
    assert choose(values, 4).tolist() == [100, 101, 102, 105]
    assert choose(torch.zeros(BLOCK), 4).tolist() == []
    assert decoded(TWO, torch.zeros(BLOCK)).count_nonzero() == 0


@pytest.mark.parametrize("spec", [TWO, SIXTEEN])
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 3 * BLOCK),
    exponent=st.integers(-90, 90),
    density=st.sampled_from([0.001, 0.01, 1.0]),
)
def test_encoding_what_was_encoded_changes_nothing(
    spec: CodecSpec, seed: int, count: int, exponent: int, density: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * 2.0**exponent
    values *= torch.rand(count, generator=generator) < density
    once = decoded(spec, values)
    assert torch.equal(decoded(spec, once), once)
    chosen = torch.from_numpy(choose(values, codec_for(spec).keep))  # type: ignore[attr-defined]
    assert set(once.nonzero().flatten().tolist()) <= set(chosen.tolist())


def test_sixteen_bits_are_those_of_bfloat16() -> None:
    values = normal(BLOCK)
    got = decoded(SIXTEEN, values)
    chosen = torch.from_numpy(choose(values, 32))
    assert torch.equal(got[chosen], values[chosen].bfloat16().float())
    assert got.count_nonzero() == 32


def test_bins_are_around_the_mean_and_come_back_as_their_means() -> None:
    values = torch.tensor([-4.0, -3.8, -1.0, -1.2, 1.0, 1.4, 4.0, 3.6])
    tables, codes = into_bins(values, np.arange(8), 1, 8)
    sigma = values.std()
    expected = ((values - values.mean()) / (6 * sigma / 4) + 2).floor().clamp(0, 3)
    assert codes.tolist() == expected.tolist()
    for code in set(codes.tolist()):
        assert tables[0, code] == values[codes == code].mean().bfloat16()


def test_each_block_has_its_own_bins() -> None:
    values = torch.cat([normal(BLOCK), 1e-6 * normal(BLOCK, 1)])
    got = decoded(TWO, values)
    for block in range(2):
        part = got[block * BLOCK : (block + 1) * BLOCK]
        assert part.count_nonzero() == 64
        assert len(part[part != 0].unique()) <= 4
        assert 0.5 < part.abs().max() / values[block * BLOCK : (block + 1) * BLOCK].abs().max() <= 1.01


# Averages


def test_a_reply_is_as_small_as_it_can_be() -> None:
    codec = codec_for(TWO)
    contributions = [decoded(TWO, normal(20 * BLOCK, seed)) for seed in range(4)]
    for number in (1, 2, 4):
        mean = torch.stack(contributions[:number]).mean(0)
        frame = codec.reply.encode(mean)
        assert frame.nbytes <= codec.reply_bytes(20 * BLOCK, number)
        assert frame.nbytes > 0.9 * codec.reply_bytes(20 * BLOCK, number)
    dense = codec.reply.encode(normal(20 * BLOCK))
    assert dense.nbytes == codec.reply.encoded_bytes(20 * BLOCK) == codec.reply_bytes(20 * BLOCK, 1000)


def test_a_plan_knows_what_goes_and_what_comes_back() -> None:
    runs = (CodecSpan(codec=TWO, elements=100 * BLOCK), CodecSpan(codec=CodecSpec(name="float32"), elements=1000))
    there, back = 100 * 88, codec_for(TWO).reply_bytes(100 * BLOCK, 4)
    assert traffic_bytes(runs, 4) == pytest.approx((there + back) / 2 + 4000, rel=0.01)
    assert traffic_bytes(runs[1:], 4) == 4000
    chunk = ChunkGrid(runs=runs).chunks[0]
    assert largest_reply_bytes(runs, 32 * 1024, 4) >= chunk.reply.encode(decoded(TWO, normal(chunk.elements))).nbytes


# Hostile frames


@pytest.mark.parametrize("spec", [TWO, SIXTEEN, EIGHT])
@settings(max_examples=150)
@given(data=st.data())
def test_a_frame_that_was_tampered_with_decodes_to_finite_values_or_is_refused(
    spec: CodecSpec, data: st.DataObject
) -> None:
    codec = codec_for(spec)
    count = data.draw(st.sampled_from([1, 100, BLOCK, 2 * BLOCK + 5]))
    values = normal(count) * (normal(count, 1) > 2.0)
    frame = bytearray(codec.encode(values))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        frame = frame[: data.draw(st.integers(0, len(frame)))] + data.draw(st.binary(max_size=5))
    out = torch.zeros(count)
    try:
        codec.decode_into(frame, out)
    except (NotFiniteError, ProtocolError):
        return
    assert out.isfinite().all()


@pytest.mark.parametrize("spec", [TWO, SIXTEEN, EIGHT])
def test_a_frame_that_claims_too_much_is_refused_before_anything_is_allocated(spec: CodecSpec) -> None:
    codec = codec_for(spec)
    frame = bytearray(codec.encode(decoded(TWO, normal(BLOCK))))
    for claimed in (0xFFFFFFFF, BLOCK + 1, 65, 0):
        frame[:4] = claimed.to_bytes(4, "little")
        with pytest.raises(ProtocolError, match="no sparse"):
            codec.decode_into(frame, torch.zeros(BLOCK))
    with pytest.raises(ProtocolError, match="bytes"):
        codec.decode_into(bytes(codec.encoded_bytes(BLOCK) + 1), torch.zeros(BLOCK))
    with pytest.raises(ProtocolError, match="head"):
        codec.decode_into(b"abc", torch.zeros(BLOCK))


@pytest.mark.parametrize("spec", [TWO, SIXTEEN])
def test_a_frame_with_infinity_is_refused(spec: CodecSpec) -> None:
    frame = bytearray(codec_for(spec).encode(normal(BLOCK)))
    frame[4:12] = 4 * (0x7F80).to_bytes(2, "little")
    with pytest.raises(NotFiniteError):
        codec_for(spec).decode_into(frame, torch.zeros(BLOCK))


# Rounds


@pytest.mark.parametrize("spec", [TWO, SIXTEEN])
@in_virtual_time
async def test_a_sparse_round_gives_all_the_same_bits_for_a_fraction_of_the_bytes(spec: CodecSpec) -> None:
    choice = CodecChoice(rules=(CodecRule(codec=spec),))
    sent = {}
    for name, codecs in (("sparse", choice), ("dense", CodecChoice.everything("float16"))):
        async with lab(3, choice=codecs) as there:
            expected = torch.zeros(len(there.members[0].values), dtype=torch.float64)
            for member in there.members:
                member.fill = lambda: None  # type: ignore[method-assign]
                member.values.copy_(normal(len(member.values), member.number))
                expected += decoded(spec, member.values).double() / 3
            results = await there.average()
            assert_same_average(there.members)
            sent[name] = sum(m.sent_bytes for m in results[0].commit.members)
            if name == "sparse":
                torch.testing.assert_close(there.members[0].values.double(), expected, rtol=0, atol=0.02)
    assert sent["dense"] > 20 * sent["sparse"]


@in_virtual_time
async def test_who_sends_a_sparse_frame_of_nonsense_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choice = CodecChoice(rules=(CodecRule(codec=TWO),))
    async with lab(3, choice=choice) as there:
        liar = there.members[2]
        for member in there.members:
            member.fill = lambda: None  # type: ignore[method-assign]
            member.values.copy_(normal(len(member.values), 7))
        codec = type(codec_for(TWO))
        honest = codec._encode_varying

        def nonsense(self: object, values: torch.Tensor) -> list[np.ndarray]:
            pieces = honest(codec_for(TWO), values)  # type: ignore[arg-type]
            if values.data_ptr() in range(liar.values.data_ptr(), liar.values.data_ptr() + liar.values.nbytes):
                pieces[-2] = np.full_like(pieces[-2], 255)  # the positions
            return pieces

        monkeypatch.setattr(codec, "_encode_varying", nonsense)
        await there.average()
        assert_same_average(there.members)
        got, expected = there.members[0].values, decoded(TWO, normal(len(liar.values), 7))
        torch.testing.assert_close(got, expected, rtol=0, atol=0.02)
        assert any(liar.id in record.message and "positions" in record.message for record in caplog.records)
