"""Whether two states are the same but for rounding, told from a few numbers of each (pure).

Machines that compute differently (a CPU and a GPU, processors with other vector instructions) take the same averages
and end within a few units in the last place of each other. Their digests have nothing in common. A *sketch* tells such
states from damaged ones: for every piece of the state (where a tensor and a chunk overlap) it has the sums of the
piece's values under random weights, and the piece's own size. The weights come from a seed that is drawn after the
state's digest was announced, so that nobody can choose a state to fit them.

Two pieces x and y are the same but for rounding where the sums of x − y stay below `BOUND · tolerance · min(|x|, |y|)`,
as the root of their mean square. The mean square of such a sum is |x − y|² times 1.17, whatever x − y is; one value
that is off by d adds d/4 at least to every sum. Measured over 400 steps between two instruction sets of one processor
(see docs/design/state.md), |x − y| is 5 units in the last place of |x| at most with AdamW, LAMB, SGD, RMSprop, Adagrad,
RAdam and Adafactor, and does not grow, since all take the same averages; with Muon, which multiplies matrices in
bfloat16, it is 4,200. The tolerance, 2⁻⁹, is four times that.

Hashes of blocks tell how far a difference is spread: rounding is everywhere in a piece, a flipped bit is in one place.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from potluck.errors import ProtocolError
from potluck.state.inventory import MAX_CHUNK_BYTES, OWN, cut, decode_metadata, encode_metadata
from potluck.state.snapshot import DTYPES, Snapshot

SEED_BYTES = 16
NUM_SUMS = 8
BOUND = 3.0
TOLERANCE = 2.0**-9
LEAST_SIZE = 1e-30  # of a piece: below, zero and what some processors flush to zero are the same
NUMBERS_TOLERANCE = 1e-6  # of a learning rate and the like
MAX_PIECES = 1_000_000

BLOCKS = 64  # of a piece, at most
LEAST_BLOCK = 1024  # values
CONFINED_BLOCKS = 32  # a piece with fewer does not tell how far a difference is spread
CONFINED_SHARE = 1 / 16  # of the blocks of all pieces that differ

_COLUMNS = 1024
_ROWS = MAX_CHUNK_BYTES // _COLUMNS  # values of one byte each
_FLOATS = {"float64": np.float64, "float32": np.float32, "complex128": np.float64, "complex64": np.float32}

Floats = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """What tells a state from others, under one seed."""

    exact: str
    """SHA-256 of what rounding never changes: names, types and shapes of the tensors, and integers."""

    numbers: bytes
    """The metadata, but for what is each peer's own."""

    sums: Floats
    """One row for each piece: its sums, and how far rounding may take it."""

    blocks: np.ndarray[Any, np.dtype[np.uint64]]
    """Hashes of the blocks of all pieces, in order."""

    num_blocks: np.ndarray[Any, np.dtype[np.uint32]]
    """How many of them each piece has."""

    def frames(self) -> list[bytes]:
        """As it travels."""
        return [self.sums.tobytes(), self.blocks.tobytes(), self.num_blocks.tobytes()]


@dataclass(frozen=True, slots=True)
class Difference:
    """How two states differ."""

    excess: float
    """How many times more than rounding explains; infinite where they are states of different things."""

    is_confined: bool
    """Whether all of it is in a few places, as a flipped bit is and rounding is not."""

    has_other_numbers: bool = False
    """Whether learning rates, counters and the like differ, by more than their last digits."""

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains the values of the tensors."""
        return self.excess <= 1.0


class Weights:
    """The random weights of one seed, each ± 0.5 to 1.5: so no single value can hide."""

    def __init__(self, seed: bytes) -> None:
        drawn = hashlib.shake_256(b"potluck sketch " + seed).digest(2 * NUM_SUMS * (_ROWS + _COLUMNS))
        numbers = np.frombuffer(drawn, "<u2").astype(np.int64)
        weights = (1 - 2 * (numbers & 1)) * (0.5 + (numbers >> 1) / 32767.0)
        self._rows = weights[: NUM_SUMS * _ROWS].reshape(_ROWS, NUM_SUMS)
        self._columns = weights[NUM_SUMS * _ROWS :].reshape(_COLUMNS, NUM_SUMS)

    def sums(self, values: Floats) -> Floats:
        """The sums of a piece: each value is weighted by its row and its column."""
        num_rows, rest = divmod(len(values), _COLUMNS)
        columns = self._columns.astype(values.dtype)  # float32 is exact enough by far: it adds 1e-7 of what is told
        by_row = values[: num_rows * _COLUMNS].reshape(num_rows, _COLUMNS) @ columns
        total: Floats = (by_row * self._rows[:num_rows]).sum(axis=0)
        if rest:
            total = total + (values[-rest:] @ columns[:rest]) * self._rows[num_rows]
        return total


def sketch(snapshot: Snapshot, seed: bytes) -> Sketch:
    """The sketch of a state. Takes about as long as hashing it: for a worker."""
    inventory, own, weights = snapshot.inventory, frozenset(snapshot.inventory.own), Weights(seed)
    exact = hashlib.sha256()
    rows, blocks, num_blocks = [], [], []
    for number, spec in enumerate(inventory.tensors):
        if number not in own:
            exact.update(f"{spec.name} {spec.dtype} {spec.shape}\n".encode())
    with np.errstate(all="ignore"):  # what is not finite is found by comparing
        for piece in cut(inventory.tensors, inventory.chunk_bytes):
            if piece.tensor in own:
                continue
            data = snapshot.view(piece.chunk)[piece.chunk_start : piece.chunk_start + piece.num_bytes]
            dtype = inventory.tensors[piece.tensor].dtype
            if (values := _values(data, dtype)) is None:
                exact.update(data)
                continue
            size = _tolerance(dtype) * float(np.linalg.norm(values)) + LEAST_SIZE
            rows.append(np.append(weights.sums(values), size))
            hashes = _block_hashes(data, len(values))
            blocks += hashes
            num_blocks.append(len(hashes))
    metadata = {key: value for key, value in inventory.read_metadata().items() if key != OWN}
    return Sketch(
        exact.hexdigest(),
        encode_metadata(metadata),
        np.array(rows, np.float64).reshape(-1, NUM_SUMS + 1),
        np.array(blocks, np.uint64),
        np.array(num_blocks, np.uint32),
    )


def read_sketch(exact: str, numbers: bytes, frames: Sequence[memoryview]) -> Sketch:
    """What a peer answers; ProtocolError unless it is a sketch."""
    if len(frames) != 3 or len(frames[0]) > 8 * (NUM_SUMS + 1) * MAX_PIECES:
        raise ProtocolError("a sketch has three frames, and is not that long: refused")
    try:
        sums = np.frombuffer(frames[0], np.float64).reshape(-1, NUM_SUMS + 1)
        blocks, num_blocks = np.frombuffer(frames[1], np.uint64), np.frombuffer(frames[2], np.uint32)
    except ValueError as error:
        raise ProtocolError(f"not a sketch: {error}") from error
    if len(num_blocks) != len(sums) or int(num_blocks.sum(dtype=np.uint64)) != len(blocks):
        raise ProtocolError("the parts of a sketch do not belong together: refused")
    decode_metadata(numbers)
    return Sketch(exact, numbers, sums, blocks, num_blocks)


def difference(one: Sketch, other: Sketch) -> Difference:
    """How two states differ, from their sketches under the same seed."""
    alike = (
        one.exact == other.exact
        and one.sums.shape == other.sums.shape
        and np.array_equal(one.num_blocks, other.num_blocks)
    )
    has_other_numbers = not _are_close(decode_metadata(one.numbers), decode_metadata(other.numbers))
    if not alike:
        return Difference(math.inf, is_confined=False, has_other_numbers=has_other_numbers)
    with np.errstate(all="ignore"):
        apart = np.sqrt(np.mean((one.sums[:, :-1] - other.sums[:, :-1]) ** 2, axis=1))
        ratio = apart / (BOUND * np.minimum(one.sums[:, -1], other.sums[:, -1]))
    excess = float(ratio.max(initial=0.0)) if np.isfinite(ratio).all() else math.inf
    return Difference(excess, _is_confined(one, other), has_other_numbers)


def camps(sketches: Mapping[str, Sketch]) -> dict[str, str]:
    """Peers whose states are the same but for rounding, each with the first of its camp.

    Everybody in a camp is near to one of them, not merely to a neighbour: a chain of small lies leads nowhere.
    """
    peers = sorted(sketches)
    near = {
        peer: {other for other in peers if other == peer or difference(sketches[peer], sketches[other]).is_rounding}
        for peer in peers
    }
    found: dict[str, str] = {}
    while left := [peer for peer in peers if peer not in found]:
        middle = max(left, key=lambda peer: (len(near[peer] - found.keys()), -peers.index(peer)))
        members = sorted(near[middle] - found.keys() | {middle})
        found |= dict.fromkeys(members, members[0])
    return found


def _is_confined(one: Sketch, other: Sketch) -> bool:
    if not len(one.blocks):
        return False
    differs = one.blocks != other.blocks
    starts = np.concatenate([[0], np.cumsum(one.num_blocks, dtype=np.int64)[:-1]])
    has_blocks = one.num_blocks > 0
    by_piece = np.zeros(len(one.num_blocks), np.int64)
    by_piece[has_blocks] = np.add.reduceat(differs.astype(np.int64), starts[has_blocks])
    told = (by_piece > 0) & (one.num_blocks >= CONFINED_BLOCKS)
    small = (by_piece > 0) & (one.num_blocks < CONFINED_BLOCKS)
    return bool(told.any() and not small.any() and by_piece[told].sum() < CONFINED_SHARE * one.num_blocks[told].sum())


def _values(data: memoryview, dtype: str) -> Floats | None:
    """The numbers in these bytes; None where they are no floating-point numbers."""
    if dtype in _FLOATS:
        return np.frombuffer(data, _FLOATS[dtype])
    if dtype == "float16":
        return np.frombuffer(data, np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype.startswith("float8"):
        every = torch.arange(256, dtype=torch.uint8).view(DTYPES[dtype]).to(torch.float32).numpy()
        taken: Floats = every[np.frombuffer(data, np.uint8)]
        return taken
    return None


def _tolerance(dtype: str) -> float:
    kind = DTYPES[dtype]
    return max(TOLERANCE, 4 * torch.finfo(kind).eps)


def _block_hashes(data: memoryview, num_values: int) -> list[int]:
    values_each = max(LEAST_BLOCK, -(-num_values // BLOCKS))
    bytes_each = values_each * len(data) // num_values
    return [xxhash.xxh3_64_intdigest(data[start : start + bytes_each]) for start in range(0, len(data), bytes_each)]


def _are_close(one: object, other: object) -> bool:
    """Whether two pieces of metadata are the same but for the last digits of their numbers."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_close(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=NUMBERS_TOLERANCE, abs_tol=LEAST_SIZE)
    return type(one) is type(other) and one == other
