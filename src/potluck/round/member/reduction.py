"""The tensor work of a round, one chunk at a time; runs in a worker thread.

A reducer's own values go through the codec like everybody else's: what was contributed is always decode(encode(x)), so
that an average can be recomputed from the frames alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from potluck.errors import NotFiniteError, PeerError
from potluck.round.aggregators import Aggregator
from potluck.round.codecs import EncodedChunk
from potluck.round.codecs.base import Fixed
from potluck.round.codecs.memory import Buffer, scratch
from potluck.round.member.heldaverages import hash_of
from potluck.round.plan.chunks import Chunk
from potluck.round.plan.layout import FlatTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The reducer's own values."""

    peer: str
    tensors: FlatTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What came of a chunk."""

    frame: Buffer | None = None
    """The encoded average; None when nobody's values can be used."""

    frame_hash: bytes = b""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Values that cannot be used: the sender, and why."""


def encode_values(chunk: Chunk, tensors: FlatTensors) -> Buffer:
    """Our values of a chunk in a new frame; NotFiniteError where they hold NaN or infinity."""
    return chunk.codec.encode(tensors.read(chunk.start, chunk.stop))


def reduce_chunk(
    chunk: Chunk, aggregator: Aggregator, frames: Mapping[str, Buffer], weights: Mapping[str, float], own: Own | None
) -> Reduced:
    """The average of the others' frames and of our own values, encoded."""
    contributions = {peer: EncodedChunk(chunk.codec, frame) for peer, frame in frames.items()}
    refused: dict[str, str] = {}
    if own is not None:
        try:
            contributions[own.peer] = EncodedChunk(chunk.codec, _encode_in_scratch(chunk, own.tensors))
        except NotFiniteError as error:
            refused[own.peer] = str(error)
    average = scratch("average", chunk.elements)
    try:
        outcome = aggregator.aggregate(contributions, {peer: weights[peer] for peer in contributions}, average)
    except PeerError as error:
        return Reduced(refused={peer: str(error) for peer in contributions} | refused)
    frame = chunk.reply.encode(average)
    return Reduced(frame=frame, frame_hash=hash_of(frame), refused=refused | dict(outcome.rejected))


def _encode_in_scratch(chunk: Chunk, tensors: FlatTensors) -> Buffer:
    if not isinstance(chunk.codec, Fixed):
        return encode_values(chunk, tensors)  # much smaller than the values, and who knows by how much
    frame = scratch("own contribution", chunk.encoded_bytes, torch.uint8).numpy().data
    chunk.codec.encode_into(tensors.read(chunk.start, chunk.stop), frame)
    return frame
