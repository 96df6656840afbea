"""SparseLoCo: of each block the largest values, in two bits; the rest is owed.

    e ← β·e + Δ                              β = 0.95
    sent = the 64 largest magnitudes of each block of 64 × 64, in 2 bits
    e ← e − sent

Two bits: shift = mean, scale = 6σ/4, four bins around the shift; each bin decodes to the mean of what fell into it. The
round's codec `sparse2` does all of it (round/codecs/sparse.py), on the way as here, so that what is owed is exactly
what did not travel. Bins are made for each block, not for each tensor: rounds cut tensors where they like.

With 12 bits for an index an element costs 14 bits, and a block 4096·32/(64·14) = 146.3 times less than float32. Our
positions take 8 bits, and the table of the bins 64 a block: together 186 times less.

The defence that belongs to it is the aggregator `median_norm_clipping` (GatherConfig, or a manifest's `[exchange]`): no
peer's values of a chunk, some blocks, count for more than the median length over the peers.
"""

from __future__ import annotations

from torch import Tensor

from potluck.errors import ConfigurationError
from potluck.optim.methods.blocks import BLOCK, from_blocks, through, to_blocks
from potluck.optim.methods.transform import BlockFeedback
from potluck.round.codecs import CodecSpec, codec_for


class SparseLoCo(BlockFeedback):
    """The largest values in two bits, with a decaying memory of the rest. For DiLoCo with H = 10 and outer lr 1.0."""

    def __init__(self, *, k: int = 64, decay: float = 0.95) -> None:
        if not 1 <= k <= BLOCK:
            raise ConfigurationError(f"k={k}: take 1 to {BLOCK} values of each block")
        if not 0.0 <= decay <= 1.0:
            raise ConfigurationError(f"decay={decay}: it must be from 0 to 1")
        super().__init__(CodecSpec(name="sparse2", keep=k))
        self.decay = decay

    def to_travel(self, values: Tensor) -> Tensor:
        """The largest values of each block."""
        return through(codec_for(self.codec), to_blocks(values))

    def from_travel(self, blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Dense again."""
        return from_blocks(blocks, shape)
