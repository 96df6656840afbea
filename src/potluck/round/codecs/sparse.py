"""Only the largest values of each block of 4,096: in two bits, or in sixteen. For transforms that keep the rest.

    sparse2    frame: how many there are (uint32), four bfloat16 for each block, positions, two bits a value
    sparse16   frame: how many there are (uint32), one bfloat16 a value, positions

Of each block the `keep` largest magnitudes are sent, and zeros never. Who uses these codecs makes up for the rest by
error feedback (optim/methods), and has to know exactly what was sent. So *encoding what was encoded changes nothing*:
values that are few enough, and of at most four kinds in each block, come back to the last bit.

Two bits (SparseLoCo): with mean μ and deviation σ of a block's sent values, a value falls into one of four bins of
width 6σ/4 around μ, and comes back as the mean of its bin.

The average of such contributions is less sparse than each of them, and has more kinds of values: it goes back in
`reply`, the codec of sparsereply.py.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from potluck.round.codecs.base import Bytes, Codec, require_finite, within_range
from potluck.round.codecs.memory import Buffer, scratch, tensor_over
from potluck.round.codecs.positions import (
    Positions,
    best_low_bits,
    bits_bytes,
    pack_bits,
    positions_bytes,
    read_positions,
    unpack_bits,
    write_positions,
)
from potluck.round.codecs.reductions import row_sums
from potluck.round.codecs.sparseframe import HEAD_BYTES, Sparse, write_head
from potluck.round.codecs.sparsereply import Sparse8
from potluck.round.plan.specs import TOPK_BLOCK as BLOCK
from potluck.round.plan.specs import CodecSpec

NUM_BINS = 4
RANGE_IN_SIGMAS = 6.0


class TopK(Sparse):
    """What both have in common: which values are sent, and where they stand."""

    granularity = BLOCK
    default_keep: int

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self.keep = spec.keep or self.default_keep
        self._low_bits = best_low_bits(self.keep, BLOCK)

    @cached_property
    def reply(self) -> Codec:
        """The codec of the averages."""
        return Sparse8(CodecSpec(name=Sparse8.name))

    def reply_bytes(self, count: int, num_senders: int) -> int:
        """Where no two senders have chosen the same positions."""
        return Sparse8.bytes_of(min(count, num_senders * self._most(count)), count)

    def _encode_varying(self, values: Tensor) -> list[Bytes]:
        count = values.numel()
        values = within_range(values)
        chosen = torch.from_numpy(positions := choose(values, self.keep))
        where = write_positions(positions, count, self._low_bits)
        return [write_head(len(positions)), *self._write_values(values[chosen], positions, num_blocks(count), where)]

    def _decode_values(self, frame: Buffer, num_values: int, out: Tensor) -> None:
        count = out.numel()
        at = self._positions_at(num_values, count)
        positions = read_positions(frame, at, num_values, count, self._low_bits)
        values = self._read_values(frame, positions, count, at + positions_bytes(num_values, count, self._low_bits))
        require_finite(values)
        out.zero_()
        out[torch.from_numpy(positions)] = values

    @abstractmethod
    def _write_values(self, values: Tensor, positions: Positions, blocks: int, where: list[Bytes]) -> list[Bytes]:
        """All of the frame behind the head; `where` are the positions, as they are written."""

    @abstractmethod
    def _read_values(self, frame: Buffer, positions: Positions, count: int, after: int) -> Tensor:
        """The values; `after` is where the positions end in the frame."""

    @abstractmethod
    def _positions_at(self, num_values: int, count: int) -> int:
        """Where the positions begin in the frame."""

    def _most(self, count: int) -> int:
        return count // BLOCK * self.keep + min(self.keep, count % BLOCK)


class Sparse2(TopK):
    """A bin of four for each value, and a table for each block."""

    name = "sparse2"
    default_keep = 64

    def _frame_bytes(self, num_values: int, count: int) -> int:
        where = positions_bytes(num_values, count, self._low_bits)
        return self._positions_at(num_values, count) + where + bits_bytes(num_values, 2)

    def _positions_at(self, num_values: int, count: int) -> int:
        return HEAD_BYTES + 2 * NUM_BINS * num_blocks(count)

    def _write_values(self, values: Tensor, positions: Positions, blocks: int, where: list[Bytes]) -> list[Bytes]:
        tables, codes = into_bins(values, positions, blocks, self.keep)
        return [tables.view(torch.uint8).reshape(-1).numpy(), *where, pack_bits(codes.numpy(), 2)]

    def _read_values(self, frame: Buffer, positions: Positions, count: int, after: int) -> Tensor:
        tables = tensor_over(frame, torch.bfloat16, offset=HEAD_BYTES, count=NUM_BINS * num_blocks(count))
        codes = unpack_bits(frame, after, len(positions), 2)
        return tables.float()[torch.from_numpy(positions // BLOCK * NUM_BINS + codes)]


class Sparse16(TopK):
    """A bfloat16 for each value."""

    name = "sparse16"
    default_keep = 32

    def _frame_bytes(self, num_values: int, count: int) -> int:
        where = positions_bytes(num_values, count, self._low_bits)
        return self._positions_at(num_values, count) + where

    def _positions_at(self, num_values: int, count: int) -> int:
        return HEAD_BYTES + 2 * num_values

    def _write_values(self, values: Tensor, positions: Positions, blocks: int, where: list[Bytes]) -> list[Bytes]:
        return [values.to(torch.bfloat16).view(torch.uint8).numpy(), *where]

    def _read_values(self, frame: Buffer, positions: Positions, count: int, after: int) -> Tensor:
        return tensor_over(frame, torch.bfloat16, offset=HEAD_BYTES, count=len(positions)).float()


def num_blocks(count: int) -> int:
    """Blocks of `count` values, the last one perhaps partial."""
    return -(-count // BLOCK)


def choose(values: Tensor, keep: int) -> Positions:
    """The positions of the largest magnitudes of each block, in order; of equal ones the first."""
    count = values.numel()
    blocks = _as_blocks(values)
    wanted = blocks != 0
    if int(wanted.sum(dim=1).max()) > keep:
        sizes = blocks.abs()
        # numpy's partition is five times faster than torch's topk. Zero where there are not so many.
        least = torch.from_numpy(np.partition(sizes.numpy(), BLOCK - keep, axis=1)[:, BLOCK - keep : BLOCK - keep + 1])
        wanted &= sizes >= least
        for row in torch.nonzero(wanted.sum(dim=1) > keep).flatten().tolist():  # rare: equal to the last one
            larger = sizes[row] > least[row]
            equal = wanted[row] & ~larger
            wanted[row] = larger | (equal & (equal.cumsum(0) <= keep - larger.sum()))
    positions: Positions = np.flatnonzero(wanted.view(-1)[:count].numpy())
    return positions


def into_bins(values: Tensor, positions: Positions, blocks: int, keep: int) -> tuple[Tensor, Tensor]:
    """Four values for each block (bfloat16), and which of them stands for each value (int64)."""
    block = torch.from_numpy(positions // BLOCK)
    counts = torch.bincount(block, minlength=blocks)
    rank = torch.arange(len(block)) - (counts.cumsum(0) - counts)[block]
    rows = torch.zeros(blocks, keep, dtype=torch.float64)  # wide enough for the squares of the largest values
    used = torch.zeros(blocks, keep, dtype=torch.bool)
    rows[block, rank] = values.double()
    used[block, rank] = True
    tables = torch.zeros(blocks, NUM_BINS, dtype=torch.float64)
    codes = torch.zeros(blocks, keep, dtype=torch.int64)
    as_they_are = _of_few_kinds(rows, used, tables, codes)
    others = torch.nonzero(~as_they_are).flatten()
    if len(others):
        tables[others], codes[others] = _around_the_mean(rows[others], used[others])
    return tables.to(torch.bfloat16), codes[block, rank]


def _around_the_mean(rows: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Four bins around each row's mean, and the means of what falls into them."""
    counts = used.sum(dim=1)
    mean = (row_sums(rows) / counts.clamp(min=1)).unsqueeze(1)
    centred = (rows - mean) * used
    sigma = (row_sums(centred * centred) / (counts - 1).clamp(min=1)).sqrt().unsqueeze(1)
    width = RANGE_IN_SIGMAS * sigma / NUM_BINS
    bins = torch.where(width > 0, centred / width, 0.0) + NUM_BINS / 2
    codes = bins.floor_().clamp_(0, NUM_BINS - 1).long()
    means = []
    for code in range(NUM_BINS):
        inside = used & (codes == code)
        means.append(row_sums(rows * inside) / inside.sum(dim=1).clamp_(min=1))
    return torch.stack(means, dim=1), codes


def _of_few_kinds(rows: Tensor, used: Tensor, tables: Tensor, codes: Tensor) -> Tensor:
    """Which rows are made of at most four values that fit into a table as they are; fills in their tables and codes."""
    few = (rows == rows.to(torch.bfloat16).double()).all(dim=1)  # by far most have one that does not fit
    candidates = torch.nonzero(few).flatten()
    if not len(candidates):
        return few
    filled = torch.where(used[candidates], rows[candidates], rows[candidates, :1])  # the first is used, where any is
    ordered = filled.sort(dim=1).values
    is_new = ordered[:, 1:] != ordered[:, :-1]
    few[candidates] = is_new.sum(dim=1) < NUM_BINS
    kind = torch.nn.functional.pad(is_new.cumsum(dim=1), (1, 0)).clamp_(max=NUM_BINS - 1)
    kinds = torch.full((len(candidates), NUM_BINS), torch.inf, dtype=torch.float64).scatter_(1, kind, ordered)
    for code in range(1, NUM_BINS):
        codes[candidates] += filled >= kinds[:, code : code + 1]
    tables[candidates] = kinds.nan_to_num_(posinf=0.0)
    return few


def _as_blocks(values: Tensor) -> Tensor:
    """As rows of 4,096; the last one is filled up with zeros."""
    count = values.numel()
    if count % BLOCK == 0:
        return values.view(-1, BLOCK)
    padded = scratch("blocks", num_blocks(count) * BLOCK)
    padded[:count] = values
    padded[count:] = 0.0
    return padded.view(-1, BLOCK)
