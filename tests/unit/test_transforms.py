"""Codecs with a memory: what is sent and what is owed make up what came in, and all of it goes on where it was."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from potluck.errors import ConfigurationError
from potluck.optim.methods.blocks import BLOCK, from_blocks, through, to_blocks
from potluck.optim.methods.decoupled import Demo, dct_matrix, from_frequencies, to_frequencies
from potluck.optim.methods.powersgd import PowerSGD, orthonormal
from potluck.optim.methods.quantised import Quantised
from potluck.optim.methods.sparseloco import SparseLoCo
from potluck.optim.methods.transform import ErrorFeedback, Plain, Transform
from potluck.round.aggregators import Aggregator, AggregatorSpec, aggregator_for
from potluck.round.codecs import CodecChoice, CodecSpec, EncodedChunk, codec_for
from potluck.round.member.reduction import encode_values, reduce_chunk
from potluck.round.plan.chunks import ChunkGrid
from potluck.round.plan.layout import Layout

SHAPES = {"matrix": (130, 70), "vector": (300,), "tiny": (3,), "scalar": (), "conv": (8, 4, 3, 3)}

torch.set_num_threads(1)


def some(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


FEEDBACK: dict[str, Callable[[], ErrorFeedback]] = {
    "sparseloco": lambda: SparseLoCo(k=8),
    "demo": lambda: Demo(lr=0.5, k=4, sign=False),
    "4 bits": lambda: Quantised(CodecChoice.everything("e3m0")),
    "8 bits": lambda: Quantised(CodecChoice.everything("blockwise8")),
}
ALL: dict[str, Callable[[], Transform]] = {**FEEDBACK, "plain": Plain, "powersgd": lambda: PowerSGD(2)}


@pytest.mark.parametrize("make", FEEDBACK.values(), ids=FEEDBACK.keys())
def test_what_is_sent_and_what_is_owed_make_up_what_came_in(make: Callable[[], ErrorFeedback]) -> None:
    transform = make()
    factor = transform.lr if isinstance(transform, Demo) else 1.0
    for epoch in range(4):
        values = some(epoch)
        before = {name: transform.error_of(name) for name in values}
        sent = transform.decode(transform.encode({name: value.clone() for name, value in values.items()}))
        for name, value in values.items():
            came_in = value * factor
            if (error := before[name]) is not None:
                came_in = came_in.add(error, alpha=transform.decay)
            owed = transform.error_of(name)
            assert owed is not None
            # sent + (x − sent) rounds once: at most a unit in the last place of the largest of the three
            torch.testing.assert_close(sent[name] + owed, came_in, rtol=1e-6, atol=2e-7 * float(came_in.abs().max()))


@pytest.mark.parametrize("make", ALL.values(), ids=ALL.keys())
def test_a_failed_round_leaves_no_trace(make: Callable[[], Transform]) -> None:
    undisturbed, disturbed = make(), make()
    for epoch in range(4):
        if epoch % 2:
            disturbed.encode(some(100 + epoch))
            disturbed.abandon()
        results = []
        for transform in (undisturbed, disturbed):
            sent = transform.encode(some(epoch))
            results.append(transform.decode({name: tensor.clone() for name, tensor in sent.items()}))
        for name in SHAPES:
            assert torch.equal(results[0][name], results[1][name])


@pytest.mark.parametrize("make", ALL.values(), ids=ALL.keys())
def test_a_saved_transform_goes_on_bit_for_bit(make: Callable[[], Transform]) -> None:
    one, other = make(), make()
    for epoch in range(3):
        one.decode(one.encode(some(epoch)))
    other.load_state_dict(one.state_dict())
    for epoch in range(3, 6):
        first = one.decode(one.encode(some(epoch)))
        second = other.decode(other.encode(some(epoch)))
        for name in SHAPES:
            assert torch.equal(first[name], second[name])


@pytest.mark.parametrize("make", FEEDBACK.values(), ids=FEEDBACK.keys())
def test_nothing_is_lost_for_ever(make: Callable[[], ErrorFeedback]) -> None:
    """A constant value: the sum of what was sent keeps up with the sum of what came in."""
    transform = make()
    transform.decay = 1.0
    factor = transform.lr if isinstance(transform, Demo) else 1.0
    value, total, rounds = some(1)["matrix"], torch.zeros(SHAPES["matrix"]), 60
    for _ in range(rounds):
        total += transform.decode(transform.encode({"matrix": value.clone()}))["matrix"]
    owed = transform.error_of("matrix")
    assert owed is not None
    torch.testing.assert_close(total + owed, rounds * factor * value, rtol=1e-4, atol=1e-4)


# Quantised


def test_four_bits_are_what_the_round_makes_of_them() -> None:
    """Sent through the round's own codec, in the round's own blocks, nothing changes any more."""
    choice = CodecChoice.everything("e3m0")
    sent = Quantised(choice).encode(some())
    named = {f"gradient/{name}": tensor for name, tensor in sent.items()}
    layout = Layout.of(named, choice, "gradient")
    flat = layout.bind(named).gather()
    codec = codec_for(layout.runs[0].codec)
    again = torch.empty_like(flat)
    codec.decode_into(codec.encode(flat), again)
    assert torch.equal(again, flat)


def test_codecs_with_a_scale_per_chunk_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="uniform8"):
        Quantised(CodecChoice.everything("uniform8"))


# SparseLoCo


def test_the_size_is_below_that_of_the_paper() -> None:
    """The paper's 64 indices of 12 bits and as many values of 2 are 146.3 times less than float32."""
    paper_bits = 64 * (12 + 2)
    assert 4096 * 32 / paper_bits == pytest.approx(146.3, abs=0.05)
    frame = codec_for(SparseLoCo().codec).encode(torch.randn(100 * BLOCK))
    assert 8 * frame.nbytes < 100 * paper_bits
    assert 100 * 4 * BLOCK / frame.nbytes == pytest.approx(186, abs=0.5)


@pytest.mark.parametrize("make", [lambda: SparseLoCo(k=8), lambda: Demo(lr=0.5, k=4)], ids=["sparseloco", "demo"])
def test_sparse_blocks_are_what_the_round_makes_of_them(make: Callable[[], SparseLoCo | Demo]) -> None:
    """Sent through the round's own codec, in chunks that the round cuts, nothing changes any more."""
    transform = make()
    for epoch in range(3):
        sent = transform.encode(some(epoch))
        named = {f"gradient/{name}": tensor for name, tensor in sent.items()}
        layout = Layout.of(named, CodecChoice().with_gradients_in(transform.codec), "gradient")
        assert [run.codec for run in layout.runs] == [transform.codec]
        flat = layout.bind(named).gather()
        again = torch.empty_like(flat)
        codec = codec_for(transform.codec)
        for start in range(0, len(flat), 3 * BLOCK):
            piece = flat[start : start + 3 * BLOCK]
            codec.decode_into(codec.encode(piece), again[start : start + 3 * BLOCK])
        assert torch.equal(again, flat)
        transform.decode(sent)


@given(st.integers(1, 200), st.integers(1, 200), st.booleans())
@settings(max_examples=30)
def test_blocks_and_back(rows: int, columns: int, flat: bool) -> None:
    values = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    values = values.view(-1) if flat else values
    blocks = to_blocks(values)
    assert blocks.shape[1] == BLOCK
    assert torch.equal(from_blocks(blocks, tuple(values.shape)), values)


def test_the_largest_of_each_tile_are_sent() -> None:
    values = torch.randn(128, 64) * 0.01
    values[3, 5], values[70, 9] = 10.0, -20.0
    transform = SparseLoCo(k=1)
    got = transform.decode(transform.encode({"w": values}))["w"]
    assert got.nonzero().tolist() == [[3, 5], [70, 9]]
    assert got[3, 5] == 10.0
    assert got[70, 9] == -20.0


def test_who_sends_too_much_is_clipped_by_the_aggregator_that_belongs_to_it() -> None:
    clipping = aggregator_for(AggregatorSpec(name="median_norm_clipping"))
    updates = {f"peer {number}": torch.randn(64, 64) for number in range(5)}
    updates["peer 4"] *= 1000.0
    sent = {peer: SparseLoCo().encode({"w": update})["w"] for peer, update in updates.items()}
    layout = Layout.of({"gradient/w": sent["peer 0"]}, CodecChoice.everything("sparse2"))
    [chunk] = ChunkGrid(runs=layout.runs).chunks
    frames = {peer: encode_values(chunk, layout.bind({"gradient/w": blocks})) for peer, blocks in sent.items()}

    def length_of(aggregator: Aggregator) -> float:
        average = reduce_chunk(chunk, aggregator, frames, dict.fromkeys(frames, 1.0), None).frame
        assert average is not None
        out = torch.zeros_like(sent["peer 0"])
        layout.bind({"gradient/w": out}).write_encoded(chunk.start, chunk.stop, EncodedChunk(chunk.reply, average))
        return float(out.norm())

    honest = max(float(sent[f"peer {number}"].norm()) for number in range(4))
    assert length_of(clipping) <= honest
    assert length_of(aggregator_for(AggregatorSpec())) > 100 * honest


# DeMo


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_the_cosine_transform_is_orthonormal(size: int) -> None:
    matrix = dct_matrix(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), rtol=0, atol=1e-5)


def test_the_cosine_transform_is_scipys() -> None:
    fft = pytest.importorskip("scipy.fft")
    values = torch.randn(64)
    torch.testing.assert_close(
        dct_matrix(64) @ values, torch.from_numpy(fft.dct(values.numpy(), norm="ortho")), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("shape", [(96, 128), (130, 70), (300,), (5000,), (8, 4, 3, 3), ()])
def test_all_frequencies_are_the_values(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    torch.testing.assert_close(from_frequencies(to_frequencies(values), shape), values, rtol=1e-4, atol=1e-5)


def test_few_frequencies_are_enough_for_what_is_smooth() -> None:
    position = torch.linspace(0, math.pi, 64)
    smooth = torch.cos(position).unsqueeze(0) * torch.cos(2 * position).unsqueeze(1)
    rough = torch.randn(64, 64)
    codec = codec_for(CodecSpec(name="sparse16", keep=32))
    for values, most in ((smooth, 0.05), (rough, 1.0)):
        missing = values - from_frequencies(through(codec, to_frequencies(values)), (64, 64))
        assert float(missing.norm() / values.norm()) <= most


def test_a_vector_has_the_frequencies_of_its_rows() -> None:
    """Sixty-four values in a row, whatever stands beside them."""
    values = torch.zeros(256)
    values[64:128] = torch.randn(64)
    frequencies = to_frequencies(values).view(64, 64)
    torch.testing.assert_close(frequencies[1], dct_matrix(64) @ values[64:128], rtol=1e-4, atol=1e-5)
    assert frequencies[0].count_nonzero() == frequencies[2:].count_nonzero() == 0


def test_demo_steps_by_the_sign_of_the_mean() -> None:
    peers = [Demo(lr=0.1, k=4096) for _ in range(2)]
    gradients = [torch.randn(16, 16) for _ in peers]
    sent = [peer.encode({"w": gradient})["w"] for peer, gradient in zip(peers, gradients, strict=True)]
    mean = torch.stack(sent).mean(0)
    for peer in peers:
        assert torch.equal(peer.decode({"w": mean})["w"], from_frequencies(mean, (16, 16)).sign())
    expected = 0.1 * torch.stack(gradients).mean(0)
    torch.testing.assert_close(from_frequencies(mean, (16, 16)), expected, rtol=0.02, atol=2e-3)


# PowerSGD


def test_orthonormal_columns() -> None:
    basis = orthonormal(torch.randn(20, 4))
    torch.testing.assert_close(basis.T @ basis, torch.eye(4), rtol=0, atol=1e-5)
    degenerate = orthonormal(torch.zeros(20, 3))
    torch.testing.assert_close(degenerate.T @ degenerate, torch.eye(3), rtol=0, atol=1e-5)


def test_a_matrix_of_low_rank_is_found() -> None:
    transform = PowerSGD(2)
    matrix = torch.randn(60, 2) @ torch.randn(2, 50)
    for _ in range(8):
        got = transform.decode(transform.encode({"w": matrix}))["w"]
        transform.forget()  # what was missing in earlier rounds is beside the point here
    torch.testing.assert_close(got, matrix, rtol=1e-3, atol=1e-3)


def test_factors_are_smaller_and_small_tensors_go_whole() -> None:
    transform = PowerSGD(2)
    sent = transform.encode(some())
    assert sent["matrix"].shape == (130, 2)
    assert sent["vector"].shape == SHAPES["vector"]
    transform.decode(sent)
    assert transform.encode(some())["matrix"].shape == (70, 2)


def test_peers_with_other_gradients_decode_the_same_mean() -> None:
    peers = [PowerSGD(3) for _ in range(3)]
    for epoch in range(4):
        gradients = [some(10 * epoch + number)["matrix"] for number in range(3)]
        owed = [peer.state_dict()["error"].get("w", torch.zeros(130, 70)) for peer in peers]
        mean = torch.stack([gradients[n] + owed[n] for n in range(3)]).mean(0)
        sent = [peer.encode({"w": gradient})["w"] for peer, gradient in zip(peers, gradients, strict=True)]
        average = torch.stack(sent).mean(0)
        decoded = [peer.decode({"w": average.clone()})["w"] for peer in peers]
        assert torch.equal(decoded[0], decoded[1])
        still_owed = torch.stack([peer.state_dict()["error"]["w"] for peer in peers]).mean(0)
        torch.testing.assert_close(decoded[0] + still_owed, mean, rtol=1e-4, atol=1e-4)


def test_a_newcomer_takes_over_the_factors() -> None:
    old, new = PowerSGD(2), PowerSGD(2)
    for epoch in range(3):
        old.decode(old.encode(some(epoch)))
    new.load_shared(old.shared(), old.shared_numbers())
    average = torch.randn(70, 2)
    old.encode(some(9)), new.encode(some(9))
    assert torch.equal(old.decode({"matrix": average})["matrix"], new.decode({"matrix": average})["matrix"])
