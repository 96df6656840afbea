"""Items as bytes: any value that msgspec encodes, with arrays as raw frames behind it.

    4 bytes    PQ, the version, a zero
    4 bytes    length of the head
    head       msgpack: the value, with a placeholder for each array, and each array's type and shape
    arrays     their bytes one after the other, each at a multiple of 8

No pickle: what comes from a queue was written by somebody else. Arrays come back as numpy arrays that share the item's
memory (read-only). A torch tensor comes back as a tensor where torch is imported already, else as an array; this module
never imports torch.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from potluck.errors import ConfigurationError, ProtocolError

Array = npt.NDArray[Any]

MAGIC = b"PQ\x01\x00"
MAX_HEAD_BYTES = 16 * 1024 * 1024
MAX_ARRAYS = 65_536
MAX_DIMENSIONS = 32
_ALIGNMENT = 8
_ARRAY_EXTENSION = 1
_KINDS = "biufc"  # truth values, integers, floats, complex numbers

T = TypeVar("T")


class _Frame(msgspec.Struct, array_like=True, frozen=True):
    """One array: numpy's name of its type, its shape, and whether it was a tensor."""

    dtype: str
    shape: tuple[int, ...]
    is_tensor: bool = False


class _Head(msgspec.Struct, array_like=True, frozen=True):
    value: msgspec.Raw
    frames: tuple[_Frame, ...] = ()


_head_decoder = msgspec.msgpack.Decoder(_Head)


def encode_item(value: Any) -> bytes:
    """A value as bytes; ConfigurationError when something in it is neither plain nor an array."""
    frames: list[_Frame] = []
    buffers: list[memoryview] = []

    def replace(thing: Any) -> Any:
        if isinstance(thing, np.generic):
            return thing.item()
        array, is_tensor = _as_array(thing)
        frames.append(_Frame(array.dtype.str, array.shape, is_tensor))
        buffers.append(memoryview(array.reshape(-1).view(np.uint8).data) if array.size else memoryview(b""))
        return msgspec.msgpack.Ext(_ARRAY_EXTENSION, struct.pack("<I", len(frames) - 1))

    try:
        raw = msgspec.msgpack.Encoder(enc_hook=replace).encode(value)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ConfigurationError(f"this cannot be put into a queue: {error}") from error
    head = msgspec.msgpack.encode(_Head(msgspec.Raw(raw), tuple(frames)))
    if len(head) > MAX_HEAD_BYTES:
        raise ConfigurationError(
            f"an item has {len(head)} bytes beside its arrays, and {MAX_HEAD_BYTES} are allowed: use arrays for numbers"
        )
    pieces: list[bytes | memoryview] = [MAGIC, struct.pack("<I", len(head)), head]
    size = len(MAGIC) + 4 + len(head)
    for buffer in buffers:
        padding = -size % _ALIGNMENT
        pieces += [bytes(padding), buffer]
        size += padding + buffer.nbytes
    return b"".join(pieces)


def decode_item(data: bytes | bytearray | memoryview, kind: type[T] | Any = Any) -> T:
    """The value in an item, checked against `kind`; ProtocolError when the bytes are no such item."""
    view = memoryview(data).toreadonly()
    if view[: len(MAGIC)] != MAGIC or len(view) < len(MAGIC) + 4:
        raise ProtocolError("this is not an item of a queue")
    (head_bytes,) = struct.unpack_from("<I", view, len(MAGIC))
    begin = len(MAGIC) + 4
    if head_bytes > MAX_HEAD_BYTES or begin + head_bytes > len(view):
        raise ProtocolError(f"an item whose head should have {head_bytes} bytes is cut off")
    try:
        head = _head_decoder.decode(view[begin : begin + head_bytes])
        arrays = _read_arrays(view, begin + head_bytes, head.frames)

        def fill_in(code: int, content: memoryview) -> Any:
            (number,) = struct.unpack("<I", content)
            if code != _ARRAY_EXTENSION or number >= len(arrays):
                raise ProtocolError("an item refers to an array that it does not have")
            return arrays[number]

        value: T = msgspec.msgpack.Decoder(kind, ext_hook=fill_in).decode(head.value)
    except (msgspec.MsgspecError, struct.error, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"an item cannot be read: {error}") from error
    return value


def _as_array(thing: Any) -> tuple[Array, bool]:
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(thing, torch.Tensor)
    if is_tensor:
        thing = thing.detach().cpu()
        if thing.dtype == torch.bfloat16:  # type: ignore[union-attr]  # numpy has no such type
            thing = thing.float()
        thing = thing.numpy()
    if not isinstance(thing, np.ndarray):
        raise TypeError(f"a {type(thing).__name__} is neither a plain value nor an array")
    if thing.dtype.kind not in _KINDS:
        raise TypeError(f"an array of {thing.dtype} cannot travel: use numbers or truth values")
    return np.ascontiguousarray(thing.astype(thing.dtype.newbyteorder("<"), copy=False)).reshape(thing.shape), is_tensor


def _read_arrays(view: memoryview, offset: int, frames: Sequence[_Frame]) -> list[Any]:
    if len(frames) > MAX_ARRAYS:
        raise ProtocolError(f"an item with {len(frames)} arrays has too many")
    arrays: list[Any] = []
    for frame in frames:
        dtype = _dtype(frame.dtype)
        if len(frame.shape) > MAX_DIMENSIONS or any(length < 0 for length in frame.shape):
            raise ProtocolError(f"an array of shape {frame.shape} in an item makes no sense")
        count = math.prod(frame.shape)
        offset += -offset % _ALIGNMENT
        if offset + count * dtype.itemsize > len(view):
            raise ProtocolError("an item's arrays are cut off")
        array = (
            np.frombuffer(view, dtype, count, offset).reshape(frame.shape) if count else np.empty(frame.shape, dtype)
        )
        offset += count * dtype.itemsize
        arrays.append(_as_tensor(array) if frame.is_tensor else array)
    return arrays


def _dtype(name: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"an item has an array of an unknown type {name[:40]!r}") from error
    if dtype.kind not in _KINDS or dtype.itemsize == 0:
        raise ProtocolError(f"an item has an array of {name[:40]!r}, which is not allowed")
    return dtype


def _as_tensor(array: Array) -> Any:
    torch = sys.modules.get("torch")
    return array if torch is None else torch.from_numpy(array.copy())
