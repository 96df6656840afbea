"""Items as bytes: what goes in comes out, and what nobody encoded is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as some

from potluck.errors import ConfigurationError, ProtocolError
from potluck.fleet.items import MAGIC, decode_item, encode_item

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
ARRAYS = some.arrays(
    st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_, np.complex64, ">f4"]),
    some.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


class Fragment(msgspec.Struct):
    """A user's own type of item."""

    laptop: str
    rewards: np.ndarray
    version: int = 0


@given(PLAIN, st.lists(ARRAYS, max_size=3))
def test_what_goes_in_comes_out(value: Any, arrays: list[Any]) -> None:
    back: Any = decode_item(encode_item({"value": value, "arrays": arrays}))
    assert back["value"] == value
    for before, after in zip(arrays, back["arrays"], strict=True):
        assert after.shape == before.shape
        assert after.dtype == before.dtype.newbyteorder("<")
        np.testing.assert_array_equal(after, before)
        assert not after.size or not after.flags.writeable


def test_a_type_is_checked() -> None:
    fragment = Fragment("one", np.arange(3.0))
    back: Fragment = decode_item(encode_item(fragment), Fragment)
    assert back.laptop == "one"
    assert back.rewards.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ProtocolError, match="rewards"):
        decode_item(encode_item({"rewards": 1}), Fragment)


def test_tensors_come_back_as_tensors_and_numbers_as_numbers() -> None:
    back: Any = decode_item(encode_item([torch.arange(4), torch.ones(2, dtype=torch.bfloat16), np.float32(0.5)]))
    assert torch.equal(back[0], torch.arange(4))
    assert back[1].dtype == torch.float32
    assert back[2] == 0.5


@pytest.mark.parametrize("value", [object(), np.array([object()]), np.array(["text"]), {1: lambda: None}, 2**70])
def test_what_is_neither_plain_nor_an_array_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be put into a queue"):
        encode_item(value)


@given(st.binary(max_size=200), st.integers(0, 200))
def test_bytes_that_nobody_encoded_are_refused(noise: bytes, cut: int) -> None:
    good = encode_item({"a": np.arange(7.0), "b": [1, "x"]})
    torn = good[: len(good) - 1 - cut % (len(good) - 1)]
    for data in (noise, MAGIC + noise, torn):
        with pytest.raises(ProtocolError):
            decode_item(data)


@pytest.mark.parametrize("dtype", ["O", "|O8", "U4", "M8[s]", "V8", "nonsense", "f4,f4"])
def test_arrays_of_objects_are_refused(dtype: str) -> None:
    raw = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, (0).to_bytes(4, "little")))
    head = msgspec.msgpack.encode([msgspec.Raw(raw), [[dtype, [1], False]]])
    with pytest.raises(ProtocolError):
        decode_item(MAGIC + len(head).to_bytes(4, "little") + head + bytes(64))


def test_an_item_that_claims_too_much_takes_no_memory() -> None:
    raw = msgspec.msgpack.encode(None)
    head = msgspec.msgpack.encode([msgspec.Raw(raw), [["<f8", [2**40, 2**10], False]]])
    with pytest.raises(ProtocolError, match="cut off"):
        decode_item(MAGIC + len(head).to_bytes(4, "little") + head)


def test_the_fleet_needs_no_torch() -> None:
    program = "import potluck.fleet, potluck.cli.queue, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
