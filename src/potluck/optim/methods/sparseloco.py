"""SparseLoCo: of each block the largest values, in two bits; the rest is owed.

    e ← β·e + Δ                              β = 0.95
    sent = the 64 largest magnitudes of each block of 64 × 64, with a 12-bit index, in 2 bits
    e ← e − sent

Two bits: shift = mean, scale = 6σ/4, four bins around the shift; each bin decodes to the mean of what fell into it, so
that a tensor has a table of four values. An element costs 12 + 2 bits, a block 64 of them: 4096·32/(64·14) = 146.3
times less than float32 (the table aside: 16 bytes a tensor).

`clip_to_median` is the defence that belongs to it: no peer's block may be longer than the median over the peers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.errors import ConfigurationError
from potluck.optim.methods.transform import ErrorFeedback

SIDE = 64
BLOCK = SIDE * SIDE
INDEX_BITS, VALUE_BITS = 12, 2
NUM_BINS = 1 << VALUE_BITS
RANGE_IN_SIGMAS = 6.0


@dataclass(frozen=True, slots=True)
class Sparse:
    """The largest values of one tensor."""

    shape: tuple[int, ...]
    indices: Tensor  # int64, blocks × k: within each block
    codes: Tensor  # uint8, blocks × k: which bin
    table: Tensor  # float32: what each bin decodes to

    @property
    def num_bits(self) -> int:
        """On the wire, without the table."""
        return self.indices.numel() * (INDEX_BITS + VALUE_BITS)

    def decode(self) -> Tensor:
        """Dense again."""
        blocks = torch.zeros(self.indices.shape[0], BLOCK)
        blocks.scatter_(1, self.indices, self.table[self.codes.long()])
        return from_blocks(blocks, self.shape)


def sparsify(values: Tensor, k: int) -> Sparse:
    """The k largest magnitudes of each block, in two bits."""
    blocks = to_blocks(values.detach().to("cpu", torch.float32))
    indices = blocks.abs().topk(k, dim=1).indices
    codes, table = quantise(blocks.gather(1, indices))
    return Sparse(tuple(values.shape), indices, codes, table)


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Two bits a value, and the mean of each bin."""
    shift = values.mean()
    centred = values - shift
    sigma = centred.norm() / math.sqrt(max(1, values.numel() - 1))
    scale = RANGE_IN_SIGMAS * sigma / NUM_BINS
    if scale > 0:
        codes = (centred / scale + NUM_BINS / 2).floor_().clamp_(0, NUM_BINS - 1).to(torch.uint8)
    else:
        codes = torch.zeros_like(values, dtype=torch.uint8)
    flat = codes.flatten().long()
    sums = torch.zeros(NUM_BINS).index_add_(0, flat, values.flatten())
    counts = torch.zeros(NUM_BINS).index_add_(0, flat, torch.ones(flat.numel()))
    return codes, sums / counts.clamp_(min=1)


def to_blocks(values: Tensor) -> Tensor:
    """As rows of 4,096: matrices in tiles of 64 × 64, everything else in order; padded with zeros."""
    if values.dim() == 2 and min(values.shape) >= SIDE:
        rows, columns = (-(-size // SIDE) for size in values.shape)
        padded = values.new_zeros(rows * SIDE, columns * SIDE)
        padded[: values.shape[0], : values.shape[1]] = values
        return padded.view(rows, SIDE, columns, SIDE).transpose(1, 2).reshape(-1, BLOCK)
    flat = values.reshape(-1)
    count = max(1, -(-flat.numel() // BLOCK))
    padded = flat.new_zeros(count * BLOCK)
    padded[: flat.numel()] = flat
    return padded.view(count, BLOCK)


def from_blocks(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The other way round."""
    if len(shape) == 2 and min(shape) >= SIDE:
        rows, columns = (-(-size // SIDE) for size in shape)
        tiles = blocks.view(rows, columns, SIDE, SIDE).transpose(1, 2)
        return tiles.reshape(rows * SIDE, columns * SIDE)[: shape[0], : shape[1]].contiguous()
    return blocks.reshape(-1)[: math.prod(shape)].reshape(shape).contiguous()


def clip_to_median(updates: Sequence[Tensor]) -> list[Tensor]:
    """The peers' updates of one tensor, each block no longer than the median length over the peers."""
    blocks = torch.stack([to_blocks(update.float()) for update in updates])  # peers × blocks × 4096
    lengths = blocks.norm(dim=2)
    median = lengths.quantile(0.5, dim=0)
    factors = (median / lengths.clamp_min(1e-30)).clamp_max(1.0).unsqueeze(2)
    return [from_blocks(peer, tuple(update.shape)) for peer, update in zip(blocks * factors, updates, strict=True)]


class SparseLoCo(ErrorFeedback):
    """The largest values in two bits, with a decaying memory of the rest. For DiLoCo with H = 30 and outer lr 0.4."""

    def __init__(self, *, k: int = 64, decay: float = 0.95) -> None:
        super().__init__()
        if not 1 <= k <= BLOCK:
            raise ConfigurationError(f"k={k}: take 1 to {BLOCK} values of each block")
        if not 0.0 <= decay <= 1.0:
            raise ConfigurationError(f"decay={decay}: it must be from 0 to 1")
        self.k = k
        self.decay = decay
        self.num_bits = 0  # of what was encoded last

    def send(self, name: str, values: Tensor) -> Tensor:
        """What the others get of these values."""
        sparse = sparsify(values, min(self.k, max(1, values.numel())))
        self.num_bits += sparse.num_bits
        return sparse.decode().to(values.device, values.dtype)
