"""Layouts, chunks and flat access: same model, same layout; every dtype and every way a tensor can lie in memory."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck import messages
from potluck.errors import ConfigurationError, ProtocolError
from potluck.round.codecs import CODEC_NAMES, CodecChoice, CodecRule, CodecSpec, codec_for
from potluck.round.plan.chunks import (
    FINE_CHUNKS,
    MAX_CHUNK_ELEMENTS,
    SMALLEST_CHUNK_BYTES,
    ChunkGrid,
    elements_per_chunk,
    encoded_bytes,
    fitting_chunk_bytes,
)
from potluck.round.plan.layout import Layout
from potluck.round.plan.specs import DEFAULT_CHUNK_BYTES, MAX_ELEMENTS, CodecSpan

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "head.weight": torch.randn(300, 200, generator=generator, requires_grad=True),
        "body.weight": torch.randn(70, 100, generator=generator).double(),
        "body.bias": torch.randn(70, generator=generator).half(),
        "transposed": torch.randn(50, 90, generator=generator).t(),
        "channels_last": torch.randn(2, 3, 8, 9, generator=generator).to(memory_format=torch.channels_last),
        "every_other": torch.randn(64, generator=generator)[::2],
        "brain": torch.randn(33, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 7),
        "steps": torch.tensor(17, dtype=torch.int64),
    }


def flat_reference(layout: Layout, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[slot.name].detach().reshape(-1).float() for slot in layout.slots])


def test_the_layout_covers_everything_once_and_in_order() -> None:
    tensors = model()
    layout = Layout.of(tensors)
    assert sorted(slot.name for slot in layout.slots) == sorted(tensors)
    position = 0
    for slot in layout.slots:
        assert slot.start == position
        assert slot.shape == tuple(tensors[slot.name].shape)
        position = slot.stop
    assert layout.elements == position == sum(tensor.numel() for tensor in tensors.values())
    assert sum(run.elements for run in layout.runs) == layout.elements


def test_the_layout_does_not_depend_on_the_order_of_the_mapping() -> None:
    tensors = model()
    one = Layout.of(tensors)
    other = Layout.of(dict(reversed(tensors.items())))
    assert one.slots == other.slots
    assert one.digest == other.digest
    assert one.runs == other.runs


def test_each_codec_has_one_run() -> None:
    tensors = {f"layer{i}.{kind}": torch.zeros(size) for i in range(9) for kind, size in (("w", 9000), ("b", 10))}
    layout = Layout.of(tensors)
    assert [(run.codec.name, run.elements) for run in layout.runs] == [("float16", 81_000), ("float32", 90)]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(extra=torch.zeros(1)),
        lambda t: t.pop("scalar"),
        lambda t: t.update(scalar=torch.zeros(1)),
        lambda t: t.update(brain=t["brain"].half()),
        lambda t: t.update({"body.bias": torch.zeros(71).half()}),
    ],
)
def test_another_model_has_another_digest(change) -> None:
    tensors = model()
    original = Layout.of(tensors)
    change(tensors)
    changed = Layout.of(tensors)
    assert changed.digest != original.digest
    assert changed.schema_digest != original.schema_digest


def test_values_do_not_matter_to_the_digest_but_roles_and_codecs_do() -> None:
    tensors = model()
    original = Layout.of(tensors)
    assert Layout.of({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}).digest == original.digest
    compressed = Layout.of(tensors, CodecChoice.everything("e3m0"))
    assert compressed.schema_digest == original.schema_digest
    assert compressed.digest != original.digest
    assert Layout.of(tensors, roles="parameter").schema_digest != original.schema_digest


def test_roles_choose_codecs() -> None:
    tensors = {"w": torch.zeros(5000), "w/exp_avg": torch.zeros(5000), "count": torch.zeros(5000, dtype=torch.int32)}
    layout = Layout.of(tensors, roles={"w": "gradient", "w/exp_avg": "optimizer", "count": "gradient"})
    assert {slot.name: slot.codec.name for slot in layout.slots} == {
        "w": "float16",
        "w/exp_avg": "bfloat16",
        "count": "float32",
    }
    with pytest.raises(ConfigurationError, match="'w/exp_avg' has no role"):
        Layout.of(tensors, roles={"w": "gradient"})


def test_integers_travel_in_float32_whatever_the_rules() -> None:
    layout = Layout.of({"count": torch.arange(10)}, CodecChoice.everything("e3m0"))
    assert layout.slots[0].codec.name == "float32"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, device="meta"),
        torch.zeros(3, 3).to_sparse(),
    ],
)
def test_what_has_no_average_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigurationError, match=r"'mask'.*leave it out"):
        Layout.of({"fine": torch.zeros(2), "mask": tensor})


def test_gather_and_scatter_are_inverse() -> None:
    tensors = model()
    layout = Layout.of(tensors)
    flat = layout.bind(tensors).gather()
    assert flat.dtype == torch.float32
    assert torch.equal(flat, flat_reference(layout, tensors))
    copies = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}  # keeps strides
    layout.bind(copies).scatter(flat)
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor.detach().float().to(tensor.dtype)), name
        assert copies[name].dtype == tensor.dtype


@settings(max_examples=100)
@given(data=st.data())
def test_any_range_is_read_and_written(data: st.DataObject) -> None:
    tensors = model()
    layout = Layout.of(tensors)
    flat = layout.bind(tensors)
    reference = flat_reference(layout, tensors)
    # Often near the edges of tensors, where mistakes live.
    edges = [slot.start for slot in layout.slots] + [layout.elements]
    position = st.one_of(
        st.integers(0, layout.elements),
        st.tuples(st.sampled_from(edges), st.integers(-3, 3)).map(lambda t: min(max(0, sum(t)), layout.elements)),
    )
    start, stop = sorted((data.draw(position), data.draw(position)))
    assert torch.equal(flat.read(start, stop), reference[start:stop])
    flat.write(start, torch.full((stop - start,), 3.0))
    expected = reference.clone()
    expected[start:stop] = 3.0
    assert torch.equal(flat.gather(), expected)


@st.composite
def strided_tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    storage = torch.arange(float(np.prod([size * step for size, step in zip(shape, steps, strict=True)])))
    tensor = storage.view([size * step for size, step in zip(shape, steps, strict=True)])
    tensor = tensor[tuple(slice(None, None, step) for step in steps)]
    return tensor.permute(draw(st.permutations(range(len(shape)))))


@settings(max_examples=200)
@given(tensor=strided_tensors())
def test_every_range_of_any_strided_tensor(tensor: torch.Tensor) -> None:
    layout = Layout.of({"t": tensor})
    flat = layout.bind({"t": tensor})
    reference = tensor.reshape(-1).clone()
    count = tensor.numel()
    for start, stop in itertools.islice(itertools.combinations(range(count + 1), 2), 0, None, 1 + count * count // 200):
        assert torch.equal(flat.read(start, stop), reference[start:stop])
    flat.write(1, -reference[1:])
    assert torch.equal(tensor.reshape(-1)[1:], -reference[1:])


def test_a_chunk_within_a_float32_tensor_is_not_copied() -> None:
    weight = torch.randn(10_000, requires_grad=True)
    flat = Layout.of({"w": weight}).bind({"w": weight})
    view = flat.read(100, 5000)
    assert view.data_ptr() == weight.data_ptr() + 400
    assert not view.requires_grad


def test_writing_changes_parameters_in_place_and_outside_of_the_graph() -> None:
    weight = torch.nn.Parameter(torch.zeros(10))
    pointer = weight.data_ptr()
    Layout.of({"w": weight}).bind({"w": weight}).scatter(torch.arange(10.0))
    assert weight.data_ptr() == pointer
    assert weight.requires_grad
    assert weight.grad_fn is None
    assert torch.equal(weight.detach(), torch.arange(10.0))


@pytest.mark.parametrize("dtype", FLOATS)
def test_floating_point_dtypes(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, -1.5, 3.140625, 1e-3], dtype=dtype)
    target = torch.zeros_like(tensor)
    layout = Layout.of({"t": tensor})
    layout.bind({"t": target}).scatter(layout.bind({"t": tensor}).gather())
    assert torch.equal(target, tensor.float().to(dtype))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_rounded_and_kept_in_range(dtype: torch.dtype) -> None:
    tensor = torch.zeros(6, dtype=dtype)
    Layout.of({"t": tensor}).bind({"t": tensor}).scatter(torch.tensor([0.4, 1.6, 2.5, 100.0, 1e30, -1e30]))
    limits = torch.iinfo(dtype)
    assert tensor[:4].tolist() == [0, 2, 2, 100]
    assert limits.max * (1 - 2**-20) <= tensor[4].item() <= limits.max
    assert tensor[5].item() == limits.min


def test_counters_survive_an_average_of_themselves() -> None:
    tensor = torch.tensor([0, 1, 12_345, 2**24, 2**40 + 12_345])
    Layout.of({"t": tensor}).bind({"t": tensor}).scatter(tensor.float())
    assert tensor.tolist()[:4] == [0, 1, 12_345, 2**24]
    assert tensor[4].item() == pytest.approx(2**40 + 12_345, rel=2**-24)


def test_binding_checks_names_shapes_and_dtypes() -> None:
    layout = Layout.of({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ConfigurationError, match="'b', 'c'"):
        layout.bind({"a": torch.zeros(2), "c": torch.zeros(3)})
    with pytest.raises(ConfigurationError, match=r"'b' is torch\.float32 of shape \(4,\)"):
        layout.bind({"a": torch.zeros(2), "b": torch.zeros(4)})
    with pytest.raises(ConfigurationError, match=r"'b' is torch\.float16"):
        layout.bind({"a": torch.zeros(2), "b": torch.zeros(3).half()})


def test_ranges_and_sizes_are_checked() -> None:
    tensor = torch.zeros(10)
    flat = Layout.of({"t": tensor}).bind({"t": tensor})
    for start, stop in ((-1, 3), (5, 11), (4, 2)):
        with pytest.raises(ValueError, match="out of range"):
            flat.read(start, stop)
    with pytest.raises(ValueError, match="out of range"):
        flat.write(8, torch.zeros(3))
    with pytest.raises(ConfigurationError):
        flat.gather(torch.zeros(9))
    with pytest.raises(ConfigurationError):
        flat.scatter(torch.zeros(11))


def test_a_model_of_nothing() -> None:
    for tensors in ({}, {"empty": torch.empty(0, 3)}):
        layout = Layout.of(tensors)
        flat = layout.bind(tensors)
        assert layout.elements == 0
        assert layout.runs == ()
        assert flat.gather().numel() == 0
        assert flat.read(0, 0).numel() == 0
        flat.scatter(torch.empty(0))
        assert len(ChunkGrid(runs=layout.runs)) == 0


def test_averaging_chunk_by_chunk_through_the_codecs_end_to_end() -> None:
    choice = CodecChoice(rules=(CodecRule(codec=CodecSpec(name="float16"), at_least=1000),))
    ours, theirs = model(), {name: (tensor.detach() * 3).to(tensor.dtype) for name, tensor in model().items()}
    layout = Layout.of(ours, choice)
    assert layout.digest == Layout.of(theirs, choice).digest
    expected = {name: ours[name].detach().float() * 2 for name in ours}
    flat = layout.bind(ours), layout.bind(theirs)
    for chunk in ChunkGrid(runs=layout.runs, chunk_bytes=SMALLEST_CHUNK_BYTES).chunks:
        total = torch.zeros(chunk.elements)
        for tensors in flat:
            chunk.codec.add_decoded(chunk.codec.encode(tensors.read(chunk.start, chunk.stop)), 0.5, total)
        for tensors in flat:
            tensors.write(chunk.start, total)
    for name in ours:
        assert torch.equal(ours[name], theirs[name])
        torch.testing.assert_close(ours[name].detach().float(), expected[name], rtol=2e-2, atol=1e-3)


# Chunks


run_lists = st.lists(
    st.tuples(st.sampled_from(CODEC_NAMES), st.integers(1, 3_000_000)).map(
        lambda pair: CodecSpan(codec=CodecSpec(name=pair[0]), elements=pair[1])
    ),
    max_size=4,
)


@settings(max_examples=100)
@given(runs=run_lists, chunk_bytes=st.integers(SMALLEST_CHUNK_BYTES, 2 * DEFAULT_CHUNK_BYTES))
def test_chunks_cover_the_runs_without_crossing_them(runs: list[CodecSpan], chunk_bytes: int) -> None:
    grid = ChunkGrid(runs=runs, chunk_bytes=chunk_bytes)
    ends = list(itertools.accumulate(run.elements for run in runs))
    position = 0
    for index, chunk in enumerate(grid.chunks):
        assert (chunk.index, chunk.start) == (index, position)
        run = next(i for i, end in enumerate(ends) if chunk.start < end)
        assert chunk.stop <= ends[run]
        assert chunk.codec is codec_for(runs[run].codec)
        assert 0 < chunk.elements <= MAX_CHUNK_ELEMENTS
        assert chunk.encoded_bytes <= chunk_bytes + 8
        if chunk.stop != ends[run]:
            assert chunk.elements % chunk.codec.granularity == 0
        position = chunk.stop
    assert position == grid.elements == sum(run.elements for run in runs)
    assert grid.encoded_bytes == sum(chunk.encoded_bytes for chunk in grid.chunks)
    assert abs(grid.encoded_bytes - encoded_bytes(runs)) <= 8 * len(grid)
    again = ChunkGrid(runs=messages.decode(tuple[CodecSpan, ...], messages.encode(runs)), chunk_bytes=chunk_bytes)
    assert again.chunks == grid.chunks


def test_chunks_of_the_common_codecs() -> None:
    sizes = {name: elements_per_chunk(codec_for(CodecSpec(name=name)), DEFAULT_CHUNK_BYTES) for name in CODEC_NAMES}
    assert sizes["float16"] == 262_144
    assert sizes["float32"] == 131_072
    assert sizes["e3m0"] == MAX_CHUNK_ELEMENTS


def test_parts_are_consecutive_chunks() -> None:
    grid = ChunkGrid(runs=(CodecSpan(codec=CodecSpec(name="float16"), elements=2_000_000),))
    assert len(grid) == 8
    assert grid.parts([3, 0, 5]) == [range(3), range(3, 3), range(3, 8)]
    for wrong in ([3, 4], [9, -1], []):
        with pytest.raises(ConfigurationError, match="8 chunks"):
            grid.parts(wrong)


def test_small_rounds_have_small_chunks() -> None:
    small = (CodecSpan(codec=CodecSpec(name="float16"), elements=1_000_000),)
    large = (CodecSpan(codec=CodecSpec(name="float16"), elements=25_000_000),)
    megabyte = 1e6
    assert fitting_chunk_bytes(small, 8, 5 * megabyte) == 62_500
    assert fitting_chunk_bytes(small, 64, 1 * megabyte) == SMALLEST_CHUNK_BYTES
    assert fitting_chunk_bytes(large, 4, 100 * megabyte) == DEFAULT_CHUNK_BYTES
    assert fitting_chunk_bytes((), 0, 1 * megabyte) == SMALLEST_CHUNK_BYTES


def test_a_chunk_is_worth_its_message_and_no_burden_for_the_slowest_line() -> None:
    small = (CodecSpan(codec=CodecSpec(name="float16"), elements=1_000_000),)
    assert fitting_chunk_bytes(small, 8, 20e6) == 200_000
    assert fitting_chunk_bytes(small, 8, math.inf) == DEFAULT_CHUNK_BYTES
    assert fitting_chunk_bytes(small, 1, 100e3) == SMALLEST_CHUNK_BYTES
    assert fitting_chunk_bytes(small, 1, 1e6) == 100_000
    large = (CodecSpan(codec=CodecSpec(name="float16"), elements=100_000_000),)
    assert fitting_chunk_bytes(large, 1, 1e6) == 200_000_000 // FINE_CHUNKS, "chunks are not too many"
    assert fitting_chunk_bytes(large, 1, 100e3) == 50_000, "… unless each would take too long"
    assert fitting_chunk_bytes(small, 1, 1.0) == SMALLEST_CHUNK_BYTES


def test_hostile_runs_are_refused_before_anything_is_made() -> None:
    for elements in (0, -5, MAX_ELEMENTS + 1):
        with pytest.raises(ProtocolError):
            messages.decode(CodecSpan, messages.encode({"codec": {"name": "float16"}, "elements": elements}))
    with pytest.raises(ProtocolError):
        messages.decode(CodecSpan, messages.encode({"codec": {"name": "zip"}, "elements": 5}))
    enormous = CodecSpan(codec=CodecSpec(name="float32"), elements=MAX_ELEMENTS)
    with pytest.raises(ConfigurationError, match="larger"):
        ChunkGrid(runs=(enormous,), chunk_bytes=SMALLEST_CHUNK_BYTES)
    with pytest.raises(ConfigurationError, match="runs"):
        ChunkGrid(runs=(CodecSpan(codec=CodecSpec(name="float16"), elements=1),) * 65)
    for chunk_bytes in (0, -1, 1 << 40):
        with pytest.raises(ConfigurationError, match="bytes"):
            ChunkGrid(runs=(), chunk_bytes=chunk_bytes)
