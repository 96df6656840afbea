"""How a chunk of float32 values travels: encoded into one frame of bytes, and back.

    base.py        Codec, the interface, and its two kinds; EncodedChunk, a frame
    floats.py      float32, float16, bfloat16, scaled float16
    uniform.py     8 bits, evenly spaced between the smallest and the largest value
    blockwise.py   8 bits, evenly spaced in blocks that each have a scale
    e3m0.py        4 bits: a sign and a power of two, in blocks that each have a scale
    sparse.py      the largest values of each block, in 2 or 16 bits;  sparsereply.py: their averages, in 8 bits
    sparseframe.py, positions.py   how many values a sparse frame has, and where they stand
    catalogue.py   from a CodecSpec to its Codec
    choice.py      which tensor takes which codec
    memory.py      tensors over the bytes of a frame without a copy, and scratch that is used again
    reductions.py  sums, norms and finiteness that come out the same on every machine

Codecs are deterministic: the same values give the same bytes in every process and on any hardware, since they use
only element-wise IEEE operations (each rounded on its own, never fused), maxima, and sums in a fixed tree.
"""

from __future__ import annotations

from potluck.round.codecs.base import LARGEST, SMALLEST, Codec, EncodedChunk
from potluck.round.codecs.catalogue import codec_for
from potluck.round.codecs.choice import CodecChoice, CodecRule, TensorRole
from potluck.round.codecs.reductions import is_finite
from potluck.round.plan.specs import CODEC_NAMES, CodecSpec

__all__ = [
    "CODEC_NAMES",
    "LARGEST",
    "SMALLEST",
    "Codec",
    "CodecChoice",
    "CodecRule",
    "CodecSpec",
    "EncodedChunk",
    "TensorRole",
    "codec_for",
    "is_finite",
]
