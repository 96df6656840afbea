"""Where the values of a sparse frame stand: increasing positions in a few bits each (Elias–Fano), and bits in general.

A position below `universe` is split into `low_bits` lower bits, which are written as they are, and the rest, which
grows slowly from one position to the next: the i-th sets bit (rest + i) of a bitmap. So c positions take

    c·low_bits bits  +  c + ⌈universe / 2^low_bits⌉ bits

which is within half a bit per position of what any code needs. 64 of 4,096 cost 8 bits each, where an index would
be 12; and the more there are, the less each costs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from potluck.errors import ProtocolError
from potluck.round.codecs.base import Bytes
from potluck.round.codecs.memory import Buffer

Positions = npt.NDArray[np.int64]


def best_low_bits(count: int, universe: int) -> int:
    """The split that takes the fewest bits, nearly."""
    return max(0, (universe // max(1, count)).bit_length() - 1)


def positions_bytes(count: int, universe: int, low_bits: int) -> int:
    """The size of so many positions; it grows with their number."""
    return bits_bytes(count, low_bits) + _bitmap_bytes(count, universe, low_bits)


def write_positions(positions: Positions, universe: int, low_bits: int) -> list[Bytes]:
    """Increasing positions, as pieces of a frame."""
    bits = np.zeros(8 * _bitmap_bytes(len(positions), universe, low_bits), dtype=np.uint8)
    bits[(positions >> low_bits) + np.arange(len(positions))] = 1
    return [pack_bits(positions & ((1 << low_bits) - 1), low_bits), np.packbits(bits, bitorder="little")]


def read_positions(frame: Buffer, offset: int, count: int, universe: int, low_bits: int) -> Positions:
    """The positions that begin at `offset`. ProtocolError unless they increase and stay below `universe`."""
    low = unpack_bits(frame, offset, count, low_bits)
    offset += bits_bytes(count, low_bits)
    bitmap = np.frombuffer(frame, np.uint8, offset=offset, count=_bitmap_bytes(count, universe, low_bits))
    high = np.flatnonzero(np.unpackbits(bitmap, bitorder="little"))
    if len(high) != count:
        raise ProtocolError(f"a sparse frame names {len(high)} positions and has {count} values: dropped")
    positions: Positions = ((high - np.arange(count)) << low_bits) | low
    if count and not (positions[-1] < universe and (np.diff(positions) > 0).all()):
        raise ProtocolError(f"the positions of a sparse frame do not increase up to {universe}: dropped")
    return positions


def bits_bytes(count: int, width: int) -> int:
    """The size of so many numbers of `width` bits."""
    return (count * width + 7) // 8


def pack_bits(numbers: npt.NDArray[Any], width: int) -> Bytes:
    """Numbers of `width` bits, one after the other."""
    bits = (numbers[:, None] >> np.arange(width)) & 1
    return np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little")


def unpack_bits(frame: Buffer, offset: int, count: int, width: int) -> Positions:
    """The other way round."""
    packed = np.frombuffer(frame, np.uint8, offset=offset, count=bits_bytes(count, width))
    bits = np.unpackbits(packed, count=count * width, bitorder="little").reshape(count, width)
    numbers: Positions = bits.astype(np.int64) @ (1 << np.arange(width, dtype=np.int64))
    return numbers


def _bitmap_bytes(count: int, universe: int, low_bits: int) -> int:
    return (count + -(-universe >> low_bits) + 7) // 8
