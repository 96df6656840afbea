"""Chunks packed without loss, and what comes of bytes that were never packed."""

from __future__ import annotations

import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ProtocolError
from potluck.state.inventory import Inventory, TensorSpec
from potluck.state.packing import MAX_ITEM_BYTES, pack, unpack

MIB = 1024 * 1024


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().tobytes())


@given(st.binary(max_size=3000), st.integers(1, MAX_ITEM_BYTES))
def test_whatever_was_packed_comes_out_as_it_was(data: bytes, item_bytes: int) -> None:
    packed = pack(memoryview(data), item_bytes)
    if packed is not None:
        assert len(packed) < len(data)
        assert bytes(unpack(memoryview(packed), len(data))) == data


@given(st.integers(0, 64), st.integers(1, MAX_ITEM_BYTES), st.binary(max_size=5))
def test_what_repeats_comes_out_as_it_was(count: int, item_bytes: int, tail: bytes) -> None:
    data = bytes(range(item_bytes)) * count * 50 + tail
    packed = pack(memoryview(data), item_bytes)
    assert (packed is not None) == (count > 0)
    if packed is not None:
        assert bytes(unpack(memoryview(packed), len(data))) == data


@pytest.mark.parametrize(
    ("dtype", "saved"), [(torch.float32, 0.12), (torch.bfloat16, 0.25), (torch.float16, 0.05), (torch.float64, 0.05)]
)
def test_numbers_of_one_size_get_smaller(dtype: torch.dtype, saved: float) -> None:
    values = torch.randn(MIB // 4, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    data = bytes_of(values)
    packed = pack(data, values.itemsize)
    assert packed is not None
    assert len(packed) < (1 - saved) * len(data)
    assert bytes(unpack(memoryview(packed), len(data))) == bytes(data)


def test_zeros_take_next_to_nothing_and_noise_is_left_alone() -> None:
    zeros = pack(memoryview(bytes(MIB)), 4)
    assert zeros is not None
    assert len(zeros) < MIB // 100
    noise = torch.randint(0, 256, (MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert pack(bytes_of(noise), 4) is None


@given(st.binary(max_size=200), st.integers(0, 400))
def test_bytes_that_were_never_packed_are_refused_or_have_the_size(data: bytes, num_bytes: int) -> None:
    try:
        found = unpack(memoryview(data), num_bytes)
    except ProtocolError:
        return
    assert len(found) == num_bytes


@given(st.data())
def test_what_was_packed_and_changed_is_refused_or_has_the_size(data: st.DataObject) -> None:
    packed = bytearray(pack(memoryview(bytes(400) + b"tail"), 4) or b"")
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] = data.draw(st.integers(0, 255))
    try:
        found = unpack(memoryview(packed)[: data.draw(st.integers(0, len(packed)))], 404)
    except ProtocolError:
        return
    assert len(found) == 404


def test_no_more_is_made_of_a_plane_than_stands_there() -> None:
    deflating = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    plane = deflating.compress(bytes(64 * MIB)) + deflating.flush()
    packed = b"\x01" + struct.pack(">I", len(plane)) + plane
    with pytest.raises(ProtocolError, match=f"{MIB + 1} bytes came out"):
        unpack(memoryview(packed), MIB)


def test_the_size_of_elements_is_that_of_most_of_a_chunk() -> None:
    specs = (
        TensorSpec(name="a", dtype="float64", shape=(13,)),
        TensorSpec(name="b", dtype="float32", shape=(40,)),
        TensorSpec(name="empty", dtype="float32", shape=(0,)),
        TensorSpec(name="c", dtype="bool", shape=(30,)),
    )
    inventory = Inventory(tensors=specs, chunk_bytes=64, hashes=bytes(32 * 5))
    assert [inventory.item_bytes_of(chunk) for chunk in range(inventory.num_chunks)] == [8, 8, 4, 4, 1]
