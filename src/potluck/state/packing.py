"""Chunks packed for a slow way, without loss (pure): what arrives is checked by its hash like any other.

The values of a trained tensor lie within a few powers of two, so the byte that holds sign and exponent says little: of
float32 about a sixth can be saved, of bfloat16 a third, and nearly all of what is zero. The other bytes are noise.
Elements are taken apart into planes, the first bytes of all, the second bytes of all …; each plane is deflated if a
sample of it promises a gain, and left as it is otherwise. Only runs and frequencies are looked at (`Z_RLE`): a search
for repeats finds none in numbers, and takes ten times as long.

    item bytes (1) | for each plane: its size here (4, big endian) | the planes | what is left over

A plane that is as long as it was is not deflated.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from potluck.errors import ProtocolError

MAX_ITEM_BYTES = 16  # complex128
SAMPLE_BYTES = 4096
WORTHWHILE = 0.95  # of its size, or less: a plane is then worth deflating
_SIZE = struct.Struct(">I")


def pack(data: memoryview, item_bytes: int) -> bytes | None:
    """The data in fewer bytes; None where there is nothing to gain. `item_bytes` is what most of its elements have."""
    count = len(data) // item_bytes
    elements = np.frombuffer(data, dtype=np.uint8, count=count * item_bytes).reshape(count, item_bytes)
    planes = [_deflated(np.ascontiguousarray(elements[:, number])) for number in range(item_bytes)]
    head = bytes([item_bytes]) + b"".join(_SIZE.pack(len(plane)) for plane in planes)
    packed = b"".join([head, *planes, data[count * item_bytes :]])
    return packed if len(packed) < len(data) else None


def unpack(packed: memoryview, num_bytes: int) -> memoryview:
    """The data, which has that size; ProtocolError for what `pack` would not make of it."""
    item_bytes = packed[0] if len(packed) else 0
    if not 1 <= item_bytes <= MAX_ITEM_BYTES:
        raise ProtocolError(f"a packed chunk with elements of {item_bytes} bytes: refused")
    count = num_bytes // item_bytes
    position = 1 + _SIZE.size * item_bytes
    if len(packed) < position:
        raise ProtocolError(f"a packed chunk ends after {len(packed)} bytes: refused")
    data = np.empty(num_bytes, dtype=np.uint8)
    elements = data[: count * item_bytes].reshape(count, item_bytes)
    for number, (size,) in enumerate(_SIZE.iter_unpack(packed[1:position])):
        elements[:, number] = np.frombuffer(_inflated(packed[position : position + size], size, count), dtype=np.uint8)
        position += size
    rest = packed[position:]
    if len(rest) != num_bytes - count * item_bytes:
        raise ProtocolError(f"a packed chunk has {len(rest)} bytes left over: refused")
    data[count * item_bytes :] = np.frombuffer(rest, dtype=np.uint8)
    return data.data


def _deflated(plane: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bytes:
    start = (len(plane) - SAMPLE_BYTES) // 2  # not the beginning: another tensor may end there
    sample = plane[start : start + SAMPLE_BYTES] if start > 0 else plane
    if len(_deflate(sample.tobytes())) > WORTHWHILE * len(sample):
        return plane.tobytes()
    deflated = _deflate(plane.tobytes())
    return deflated if len(deflated) < len(plane) else plane.tobytes()


def _deflate(data: bytes) -> bytes:
    deflating = zlib.compressobj(level=1, wbits=-zlib.MAX_WBITS, strategy=zlib.Z_RLE)
    return deflating.compress(data) + deflating.flush()


def _inflated(plane: memoryview, size: int, count: int) -> bytes | memoryview:
    if len(plane) != size or size > count:
        raise ProtocolError(f"a packed chunk has {len(plane)} of {size} bytes where {count} stand: refused")
    if size == count:
        return plane
    inflating = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    try:
        data = inflating.decompress(plane, count + 1)  # no more than that is ever made of it
    except zlib.error as error:
        raise ProtocolError(f"a packed chunk cannot be unpacked ({error}): refused") from error
    if len(data) != count or not inflating.eof or inflating.unused_data:
        raise ProtocolError(f"{len(data)} bytes came out of a packed chunk where {count} stand: refused")
    return data
