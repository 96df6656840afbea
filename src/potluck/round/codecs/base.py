"""What a codec is: one chunk of float32 values into one frame of bytes of a known size, and back.

A chunk is a contiguous one-dimensional float32 CPU tensor; a frame is any buffer of bytes. A frame carries no name: the
plan says which codec and how many values, so that a frame can be checked against what was agreed before a byte of it
is used, and nothing in it can make a reader allocate. There are two kinds: frames of a `Fixed` codec have one size for
so many values, and can be encoded into memory that is there already; those of a `Varying` one may be shorter.

What is not finite cannot be averaged. Encoding refuses it, so that a peer finds its own NaN before it sends;
decoding refuses it again, since the bytes are a stranger's. Both raise NotFiniteError, and the caller, who knows
whose values they are, leaves them out and says so. Frames that no encoder makes raise ProtocolError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from potluck.errors import NotFiniteError, ProtocolError
from potluck.round.codecs.memory import Buffer, empty_frame, num_bytes, scratch, tensor_over
from potluck.round.codecs.reductions import MAX_FLOAT32, is_finite, magnitude
from potluck.round.plan.specs import CodecSpec

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

LARGEST = 2.0**100
"""Codecs with a scale clip magnitudes above this (1.27e30), so that no scale and no weighted sum overflows."""

SMALLEST = 2.0**-100
"""Codecs with a scale send values as zero where the scale would be below this (7.9e-31)."""


class Codec(ABC):
    """One way to encode, of either kind. Instances hold no state and may be used by many threads at once."""

    name: ClassVar[str]
    granularity: int = 1
    """Chunks are cut at multiples of this, so that only the last one of a run has a partial block."""

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec

    @property
    def reply(self) -> Codec:
        """The codec in which the average of such contributions goes back."""
        return self

    def reply_bytes(self, count: int, num_senders: int) -> int:
        """About the size of the average of so many contributions."""
        return self.encoded_bytes(count)

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """The size of the frame of `count` values; the largest there can be, where sizes vary."""

    @abstractmethod
    def fits(self, size_bytes: int, count: int) -> bool:
        """Whether a frame of `count` values may have this size."""

    @abstractmethod
    def encode(self, values: Tensor) -> memoryview:
        """The values in a new frame; NotFiniteError where they hold NaN or infinity."""

    @abstractmethod
    def _decode(self, frame: Buffer, out: Tensor) -> None:
        """Fill `out` from a frame of the right size, which is hostile otherwise."""

    def decode_into(self, frame: Buffer, out: Tensor) -> None:
        """Decode into `out`, whose length says how many values there must be.

        After an error the content of `out` is undefined.
        """
        _check_chunk(out)
        self._check_length(frame, out.numel())
        self._decode(frame, out)

    def add_decoded(self, frame: Buffer, weight: float, out: Tensor) -> None:
        """`out` += weight × decoded, where product and sum are rounded one after the other; untouched on error.

        A fused multiply-add would be faster by a hair, but exists only on some hardware, and an audit on other
        hardware must reach the same bits.
        """
        decoded = scratch("decoded", out.numel())
        self.decode_into(frame, decoded)
        add_weighted(decoded, weight, out)

    def _check_length(self, frame: Buffer, count: int) -> None:
        if not self.fits(num_bytes(frame), count):
            raise ProtocolError(
                f"a {self.name} frame of {count} values has {self.encoded_bytes(count)} bytes, "
                f"but {num_bytes(frame)} came: dropped"
            )

    def check(self, frame: Buffer, count: int) -> None:
        """Raise what decoding the frame would raise: ProtocolError or NotFiniteError."""
        self.decode_into(frame, scratch("decoded", count))


class Fixed(Codec):
    """A codec whose frames of so many values all have the same size."""

    @abstractmethod
    def _encode(self, values: Tensor, frame: Buffer) -> None:
        """Fill the frame; NotFiniteError where the values hold NaN or infinity."""

    def fits(self, size_bytes: int, count: int) -> bool:
        """Whether a frame of `count` values has this size."""
        return size_bytes == self.encoded_bytes(count)

    def encode_into(self, values: Tensor, frame: Buffer) -> None:
        """Encode into a writable frame of exactly `encoded_bytes` bytes."""
        _check_chunk(values)
        if num_bytes(frame) != (expected := self.encoded_bytes(values.numel())):
            raise ValueError(
                f"{values.numel()} values take a {self.name} frame of {expected} bytes, not {num_bytes(frame)}"
            )
        self._encode(values, frame)

    def encode(self, values: Tensor) -> memoryview:
        """The values in a new frame."""
        frame = empty_frame(self.encoded_bytes(values.numel()))
        self.encode_into(values, frame)
        return frame


class Varying(Codec):
    """A codec whose frames are as long as the values need, up to `encoded_bytes`."""

    @abstractmethod
    def _encode_varying(self, values: Tensor) -> list[Bytes]:
        """The frame of at least one value, in pieces; NotFiniteError where they hold NaN or infinity."""

    def fits(self, size_bytes: int, count: int) -> bool:
        """Whether a frame of `count` values may have this size; decoding looks closer."""
        return size_bytes <= self.encoded_bytes(count)

    def encode(self, values: Tensor) -> memoryview:
        """The values in a new frame."""
        _check_chunk(values)
        pieces = self._encode_varying(values) if values.numel() else []
        frame = empty_frame(sum(piece.nbytes for piece in pieces))
        at = 0
        for piece in pieces:
            frame[at : at + piece.nbytes] = piece.data
            at += piece.nbytes
        return frame


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A frame with what is needed to read it."""

    codec: Codec
    frame: Buffer

    def decode_into(self, out: Tensor) -> None:
        """Decode into `out`."""
        self.codec.decode_into(self.frame, out)


def add_weighted(values: Tensor, weight: float, out: Tensor) -> None:
    """`out` += weight × values, in place; `values` is scratch and is spoilt."""
    if weight != 1.0:
        values.mul_(weight)
    out.add_(values)


def within_range(values: Tensor) -> Tensor:
    """The values themselves, or clipped in scratch where a magnitude exceeds LARGEST. NotFiniteError for NaN or Inf."""
    largest = magnitude(values)
    if largest <= LARGEST:
        return values
    if not largest <= MAX_FLOAT32:
        raise not_finite(values.numel())
    return torch.clamp(values, -LARGEST, LARGEST, out=scratch("clipped", values.numel()))


def read_scales(frame: Buffer, count: int) -> Tensor:
    """The scales at the head of a frame: float32, none negative, none above LARGEST."""
    scales = tensor_over(frame, torch.float32, count=count)
    if count:
        low, high = torch.aminmax(scales)
        if not (low.item() >= 0.0 and high.item() <= LARGEST):  # NaN fails both
            raise ProtocolError(
                f"scales from {low.item()} to {high.item()} are not between 0 and {LARGEST:.3g}: dropped"
            )
    return scales


def require_finite(values: Tensor) -> None:
    """NotFiniteError unless all values are finite."""
    if not is_finite(values):
        raise not_finite(values.numel())


def not_finite(count: int) -> NotFiniteError:
    """The error for a chunk of `count` values."""
    return NotFiniteError(f"NaN or infinity among {count} values: they cannot be averaged and are left out")


def _check_chunk(values: Tensor) -> None:
    """A chunk comes from our own code; anything else is a bug there."""
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous() or values.device.type != "cpu":
        raise ValueError(
            f"a chunk is a contiguous one-dimensional float32 tensor on the CPU, "
            f"not {values.dtype} of shape {tuple(values.shape)} on {values.device}"
        )
    if values.requires_grad:
        raise ValueError("a chunk must be detached from the graph")
