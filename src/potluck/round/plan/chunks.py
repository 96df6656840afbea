"""The flat index space cut into chunks: what everybody in a round agrees on, with or without tensors.

    index space   0 ───────────────────────────────────────────────────────────▶ elements
    runs          │ codec A                                    │ codec B         │     one codec each
    chunks        │    0    │    1    │    2    │    3    │ 4  │    5    │ 6     │     what travels in one frame
    parts         │ reducer x         │ reducer y         │ reducer z            │     consecutive chunks

A run is a stretch of elements with one codec; tensors are ordered so that there are only as many runs as codecs
(layout.py). A chunk never crosses a run's end, so that it has one codec, and only the last chunk of a run is short.
The runs and the size of a chunk fit into a plan, so that an aux peer, who has no model, cuts the same chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from potluck.errors import ConfigurationError
from potluck.round.codecs import Codec, codec_for
from potluck.round.plan.specs import DEFAULT_CHUNK_BYTES, MAX_CHUNKS, CodecSpan

SMALLEST_CHUNK_BYTES = 32 * 1024
LARGEST_CHUNK_BYTES = 16 * 1024 * 1024
CHUNKS_PER_REDUCER = 4  # so that a reducer adds up one chunk while the next arrives and the last leaves
LEAST_CHUNK_SECONDS = 0.01  # a message costs each end about 0.2 ms of work: it should be worth that on the line
MOST_CHUNK_SECONDS = 0.5  # on the slowest line, or a slow sender looks like a stalled one
FINE_CHUNK_SECONDS = 0.1  # the same, while chunks are not too many: a round ends with one that goes there and back
FINE_CHUNKS = 512  # each report says of every chunk whether it is there

MAX_RUNS = 64
MAX_CHUNK_ELEMENTS = 1 << 19  # a chunk as float32, with a codec's scratch, stays near the cache
_ALIGNMENT = 1024  # chunks start at multiples of this within their run, whatever the codec


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit that travels: elements start … stop of the index space, in one frame."""

    index: int
    start: int
    stop: int
    codec: Codec = field(repr=False)

    @property
    def elements(self) -> int:
        """How many values it has."""
        return self.stop - self.start

    @property
    def encoded_bytes(self) -> int:
        """The size of a contribution's frame; where sizes vary, the largest."""
        return self.codec.encoded_bytes(self.elements)

    @property
    def reply(self) -> Codec:
        """How its average is encoded."""
        return self.codec.reply


class ChunkGrid:
    """All chunks of a round, in order. Two peers with the same runs and chunk size have the same grid."""

    def __init__(self, *, runs: Sequence[CodecSpan], chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        if not SMALLEST_CHUNK_BYTES <= chunk_bytes <= LARGEST_CHUNK_BYTES:
            raise ConfigurationError(
                f"chunks of {chunk_bytes} bytes: take {SMALLEST_CHUNK_BYTES} to {LARGEST_CHUNK_BYTES}"
            )
        if len(runs) > MAX_RUNS:
            raise ConfigurationError(f"{len(runs)} runs of one codec: at most {MAX_RUNS} are allowed")
        self.runs = tuple(runs)
        self.chunk_bytes = chunk_bytes
        sizes = [elements_per_chunk(codec_for(run.codec), chunk_bytes) for run in runs]
        count = sum(-(-run.elements // size) for run, size in zip(runs, sizes, strict=True))
        if count > MAX_CHUNKS:  # checked before any is made
            raise ConfigurationError(f"{count} chunks of {chunk_bytes} bytes: at most {MAX_CHUNKS}; take larger ones")
        self.chunks = tuple(_cut(self.runs, sizes))
        self.elements = sum(run.elements for run in runs)
        self.encoded_bytes = sum(chunk.encoded_bytes for chunk in self.chunks)

    def __len__(self) -> int:
        return len(self.chunks)

    def parts(self, num_chunks: Sequence[int]) -> list[range]:
        """Consecutive ranges of chunk indices with these lengths, which must add up to all chunks."""
        if sum(num_chunks) != len(self.chunks) or min(num_chunks, default=0) < 0:
            raise ConfigurationError(
                f"parts of {list(num_chunks)} chunks do not make up the {len(self)} chunks there are"
            )
        ends = list(accumulate(num_chunks))
        return [range(end - length, end) for end, length in zip(ends, num_chunks, strict=True)]


def elements_per_chunk(codec: Codec, chunk_bytes: int) -> int:
    """How many values make a frame of about `chunk_bytes`, in whole blocks of the codec."""
    unit = max(codec.granularity, _ALIGNMENT)
    unit_bytes = codec.encoded_bytes(2 * unit) - codec.encoded_bytes(unit)  # without what each frame has once
    return min(max(1, chunk_bytes // unit_bytes) * unit, MAX_CHUNK_ELEMENTS)


def encoded_bytes(runs: Sequence[CodecSpan]) -> int:
    """About how many bytes one peer's whole contribution has on the wire (headers that each chunk has left out)."""
    return sum(codec_for(run.codec).encoded_bytes(run.elements) for run in runs)


def traffic_bytes(runs: Sequence[CodecSpan], num_senders: int) -> int:
    """About how many bytes a whole contribution and the whole average of so many have, in the mean of both.

    Where every member reduces as much as any other, each moves as many of the one as of the other (shares.py), so that
    a round with different sizes takes as long as one where both are of this size.
    """
    replies = sum(codec_for(run.codec).reply_bytes(run.elements, num_senders) for run in runs)
    return (encoded_bytes(runs) + replies) // 2


def largest_reply_bytes(runs: Sequence[CodecSpan], chunk_bytes: int, num_senders: int) -> int:
    """About the size of the largest average of a chunk."""
    codecs = [codec_for(run.codec) for run in runs]
    return max((codec.reply_bytes(elements_per_chunk(codec, chunk_bytes), num_senders) for codec in codecs), default=0)


def fitting_chunk_bytes(runs: Sequence[CodecSpan], num_reducers: int, slowest_bytes_per_second: float) -> int:
    """Chunks small enough that each reducer has several, and neither too small nor too large for the slowest line."""
    total = encoded_bytes(runs)
    fine = max(slowest_bytes_per_second * FINE_CHUNK_SECONDS, total / FINE_CHUNKS)
    wanted = min(total / max(1, CHUNKS_PER_REDUCER * num_reducers), fine)
    least = min(slowest_bytes_per_second * LEAST_CHUNK_SECONDS, DEFAULT_CHUNK_BYTES)
    most = min(slowest_bytes_per_second * MOST_CHUNK_SECONDS, DEFAULT_CHUNK_BYTES)
    return max(SMALLEST_CHUNK_BYTES, int(min(max(wanted, least), most)))


def _cut(runs: Sequence[CodecSpan], sizes: Sequence[int]) -> Iterator[Chunk]:
    index = first = 0
    for run, size in zip(runs, sizes, strict=True):
        codec = codec_for(run.codec)
        for start in range(first, first + run.elements, size):
            yield Chunk(index, start, min(start + size, first + run.elements), codec)
            index += 1
        first += run.elements
