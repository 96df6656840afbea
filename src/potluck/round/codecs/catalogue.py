"""From a codec's name in a plan to the codec."""

from __future__ import annotations

from functools import lru_cache

from potluck.round.codecs.base import Codec
from potluck.round.codecs.blockwise import Blockwise8
from potluck.round.codecs.e3m0 import E3M0
from potluck.round.codecs.floats import BFloat16, Float16, Float32, ScaledFloat16
from potluck.round.codecs.sparse import Sparse2, Sparse16
from potluck.round.codecs.sparsereply import Sparse8
from potluck.round.codecs.uniform import Uniform8
from potluck.round.plan.specs import CodecSpec

_CODECS: dict[str, type[Codec]] = {
    codec.name: codec
    for codec in (
        Float32,
        Float16,
        BFloat16,
        ScaledFloat16,
        Uniform8,
        Blockwise8,
        E3M0,
        Sparse2,
        Sparse8,
        Sparse16,
    )
}


@lru_cache(maxsize=256)
def codec_for(spec: CodecSpec) -> Codec:
    """The codec that the spec names."""
    return _CODECS[spec.name](spec)
