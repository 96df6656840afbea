"""From a codec's name in a plan to the codec."""

from __future__ import annotations

from functools import lru_cache

from potluck.errors import ConfigurationError
from potluck.round.codecs.base import Codec, CodecSpec
from potluck.round.codecs.blockwise import Blocked, Blockwise8
from potluck.round.codecs.e3m0 import E3M0
from potluck.round.codecs.floats import BFloat16, Float16, Float32, ScaledFloat16
from potluck.round.codecs.sparse import Sparse2, Sparse16, TopK
from potluck.round.codecs.sparsereply import Sparse8
from potluck.round.codecs.uniform import Uniform8

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
CODEC_NAMES = tuple(_CODECS)


@lru_cache(maxsize=256)
def codec_for(spec: CodecSpec) -> Codec:
    """The codec that the spec names; ConfigurationError for one that this version does not have."""
    kind = _CODECS.get(spec.name)
    if kind is None:
        raise ConfigurationError(f"there is no codec {spec.name!r}: choose one of {', '.join(CODEC_NAMES)}")
    if spec.block and not issubclass(kind, Blocked):
        raise ConfigurationError(f"{spec.name} has no blocks: leave out block={spec.block}")
    if spec.keep and not issubclass(kind, TopK):
        raise ConfigurationError(f"{spec.name} leaves nothing out: leave out keep={spec.keep}")
    return kind(spec)
