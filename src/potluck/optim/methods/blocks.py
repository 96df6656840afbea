"""Tensors in blocks of 64 × 64, as SparseLoCo and DeMo cut them, and as the sparse codecs of rounds send them.

A matrix becomes its tiles, everything else is taken in order; what is missing to a whole block is zeros, which cost
nothing on the way. Blocks travel instead of the tensors: so each block of a round's codec is a block of ours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from potluck.round.codecs import Codec

SIDE = 64
BLOCK = SIDE * SIDE


def is_tiled(shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a matrix that is worth tiles."""
    return len(shape) == 2 and min(shape) >= SIDE


def to_blocks(values: Tensor) -> Tensor:
    """As rows of 4,096: matrices in tiles of 64 × 64, everything else in order; padded with zeros."""
    if is_tiled(tuple(values.shape)):
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
    if is_tiled(shape):
        rows, columns = (-(-size // SIDE) for size in shape)
        tiles = blocks.view(rows, columns, SIDE, SIDE).transpose(1, 2)
        return tiles.reshape(rows * SIDE, columns * SIDE)[: shape[0], : shape[1]].contiguous()
    return blocks.reshape(-1)[: math.prod(shape)].reshape(shape).contiguous()


def through(codec: Codec, blocks: Tensor) -> Tensor:
    """What the others get of these blocks, as a new tensor on the CPU."""
    flat = blocks.detach().to("cpu", torch.float32).reshape(-1)
    got = torch.empty_like(flat)
    codec.decode_into(codec.encode(flat), got)
    return got.view(-1, BLOCK)
