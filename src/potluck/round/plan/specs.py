"""What messages and manifests say of codecs, aggregators and starts: checked, without the things themselves.

A monitor, which only reads about a round, needs no torch for it: that import takes seconds. A spec that exists
is one that its catalogue can make (codecs/catalogue.py, aggregators/catalogue.py): what a stranger sends is refused
when it is decoded.
"""

from __future__ import annotations

from potluck.errors import ConfigurationError
from potluck.messages import Message

PLAIN_CODECS = ("float32", "float16", "bfloat16", "scaled_float16", "uniform8")
BLOCKED_CODECS = ("blockwise8", "e3m0", "sparse8")  # with a scale for each block, whose size may be chosen
TOPK_CODECS = ("sparse2", "sparse16")  # of each block, only the largest values
CODEC_NAMES = (*PLAIN_CODECS, *BLOCKED_CODECS, *TOPK_CODECS)
AGGREGATOR_NAMES = ("mean", "median", "trimmed_mean", "centered_clipping", "median_norm_clipping")

SMALLEST_BLOCK, LARGEST_BLOCK = 16, 65536
TOPK_BLOCK = 4096  # values, of which a codec keeps the largest
MAX_ELEMENTS = 1 << 40
MAX_CHUNKS = 1 << 20
DEFAULT_CHUNK_BYTES = 512 * 1024


class CodecSpec(Message, frozen=True, kw_only=True, order=True):
    """A codec by name and parameters, as a plan carries it."""

    name: str
    block: int = 0  # values that share a scale, for codecs with blocks; 0: the codec's own default
    keep: int = 0  # values that are sent of each block, for codecs that leave some out; 0: the codec's own default

    def __post_init__(self) -> None:
        if self.name not in CODEC_NAMES:
            raise ConfigurationError(f"there is no codec {self.name!r}: choose one of {', '.join(CODEC_NAMES)}")
        if self.block and self.name not in BLOCKED_CODECS:
            raise ConfigurationError(f"{self.name} has no blocks: leave out block={self.block}")
        if self.block and (not SMALLEST_BLOCK <= self.block <= LARGEST_BLOCK or self.block & (self.block - 1)):
            raise ConfigurationError(
                f"{self.name} cannot use blocks of {self.block} values: "
                f"take a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}"
            )
        if self.keep and self.name not in TOPK_CODECS:
            raise ConfigurationError(f"{self.name} leaves nothing out: leave out keep={self.keep}")
        if not 0 <= self.keep <= TOPK_BLOCK:
            raise ConfigurationError(f"{self.name} cannot keep {self.keep} values of a block: take 1 to {TOPK_BLOCK}")


class StartSpec(Message, frozen=True, kw_only=True):
    """When a round starts: so many are ready to contribute, and the others have had their time."""

    min_senders: int = 1
    least_seconds: float  # that the others have
    most_seconds: float  # … where they are usually late; the same as the least: always so long

    def __post_init__(self) -> None:
        if self.min_senders < 1:
            raise ConfigurationError(f"min_senders={self.min_senders}: a round needs at least 1 peer that contributes")
        if not 0.0 <= self.least_seconds <= self.most_seconds:
            raise ConfigurationError(
                f"a round waits {self.least_seconds:g} to {self.most_seconds:g} s: take 0 or more, and no less at most "
                "than at least"
            )


class AggregatorSpec(Message, frozen=True, kw_only=True):
    """An aggregator by name and parameters, as a plan carries it. Each uses the parameters that it knows."""

    name: str = "mean"
    trim: float = 1 / 3  # trimmed_mean: the share of all contributors cut off at each end; more than poisoners may have
    radius: float = 1.5  # centered_clipping: how far a contribution may pull, in median distances from the center
    iterations: int = 3  # centered_clipping: how often the center moves

    def __post_init__(self) -> None:
        if self.name not in AGGREGATOR_NAMES:
            known = ", ".join(AGGREGATOR_NAMES)
            raise ConfigurationError(f"there is no aggregator {self.name!r}: choose one of {known}")
        if not 0.0 <= self.trim < 0.5:
            raise ConfigurationError(f"trim={self.trim} leaves nothing to average: take at least 0 and less than 0.5")
        if not 0.0 < self.radius <= 1e6:
            raise ConfigurationError(f"radius={self.radius} is no distance: take a positive number, as 1.5")
        if not 1 <= self.iterations <= 100:
            raise ConfigurationError(f"iterations={self.iterations}: take 1 to 100; a few are enough")


class CodecSpan(Message, frozen=True, kw_only=True):
    """A stretch of the index space with one codec (see chunks.py)."""

    codec: CodecSpec
    elements: int

    def __post_init__(self) -> None:
        if not 0 < self.elements <= MAX_ELEMENTS:
            raise ConfigurationError(f"a run of {self.elements} elements: it must have 1 to {MAX_ELEMENTS}")
