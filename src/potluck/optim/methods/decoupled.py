"""DeMo, decoupled momentum: each peer keeps its momentum to itself, and shares only its strongest frequencies.

    δ ← 0.999·δ + lr·g
    q = the k largest of the 2-D discrete cosine transform of δ, in chunks of 64;  δ ← δ − IDCT(q)
    θ ← θ − lr·sign(IDCT(mean q))

What travels is q, in the round's codec `sparse16`: 32 of 4,096 frequencies, 164 times less than float32. Matrices are
cut into tiles of 64 × 64, those at the edge filled up with zeros; everything else into rows of 64, which are
transformed one by one, and of which 64 together keep their k strongest.

`Demo.decode` returns the sign: used with plain SGD, its learning rate is that of the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from potluck.errors import ConfigurationError
from potluck.optim.methods.blocks import BLOCK, SIDE, from_blocks, is_tiled, through, to_blocks
from potluck.optim.methods.transform import BlockFeedback, Tensors
from potluck.round.codecs import CodecSpec, codec_for


@lru_cache(maxsize=64)
def dct_matrix(size: int) -> Tensor:
    """The orthonormal DCT-II: rows are frequencies. Its transpose undoes it."""
    positions = torch.arange(size, dtype=torch.float64)
    frequencies = positions.unsqueeze(1)
    matrix = torch.cos(math.pi / size * (positions + 0.5) * frequencies) * math.sqrt(2.0 / size)
    matrix[0] *= math.sqrt(0.5)
    return matrix.float()


def to_frequencies(values: Tensor) -> Tensor:
    """A tensor's blocks, in the domain of frequencies."""
    cosines = dct_matrix(SIDE).to(values.device)
    tiles = to_blocks(values.float()).view(-1, SIDE, SIDE) @ cosines.T
    return (cosines @ tiles if is_tiled(tuple(values.shape)) else tiles).reshape(-1, BLOCK)


def from_frequencies(frequencies: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The other way round."""
    cosines = dct_matrix(SIDE).to(frequencies.device)
    tiles = frequencies.view(-1, SIDE, SIDE) @ cosines
    return from_blocks((cosines.T @ tiles if is_tiled(shape) else tiles).reshape(-1, BLOCK), shape)


class Demo(BlockFeedback):
    """The strongest frequencies of a momentum that is never shared as a whole."""

    def __init__(self, *, lr: float, decay: float = 0.999, k: int = 32, sign: bool = True) -> None:
        if not (lr > 0 and 0.0 <= decay <= 1.0 and 1 <= k <= BLOCK):
            raise ConfigurationError(f"DeMo needs lr > 0, 0 ≤ decay ≤ 1, and 1 ≤ k ≤ {BLOCK}")
        super().__init__(CodecSpec(name="sparse16", keep=k))
        self.lr = lr
        self.decay = decay
        self._sign = sign

    def to_travel(self, values: Tensor) -> Tensor:
        """The strongest frequencies."""
        return through(codec_for(self.codec), to_frequencies(values))

    def from_travel(self, blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
        """IDCT(q)."""
        return from_frequencies(blocks, shape)

    def encode(self, values: Mapping[str, Tensor]) -> Tensors:
        """Momentum from the gradients, and what is sent of it."""
        return super().encode({name: value * self.lr for name, value in values.items()})

    def decode(self, averages: Mapping[str, Tensor]) -> Tensors:
        """The sign of the mean."""
        mean = super().decode(averages)
        return {name: tensor.sign() for name, tensor in mean.items()} if self._sign else mean
