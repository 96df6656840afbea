"""Activations and their gradients as frames: raw, or by a codec of the rounds.

Tensors of integers travel raw. Tensors of floats take the run's codec: float16, bfloat16 or blockwise8. Gradients of
activations are divided by all tokens of a micro-batch, and small ones are below what float16 can hold: they travel with
a scale (scaled_float16), which is why the loss needs none. Values that a codec cannot carry (NaN, infinity) travel raw:
they are found in the step's total norm, which skips the step in all stages alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
import torch
from torch import Tensor

from potluck.errors import ConfigurationError, NotFiniteError, ProtocolError
from potluck.messages import Message
from potluck.round.codecs.base import Codec
from potluck.round.codecs.catalogue import codec_for
from potluck.round.plan.specs import CodecSpec

RAW = "raw"
ACTIVATION_CODECS = (RAW, "float16", "bfloat16", "blockwise8")
GRADIENT_CODECS = {"float16": "scaled_float16"}
KNOWN_CODECS = {*ACTIVATION_CODECS, *GRADIENT_CODECS.values()}
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_VALUES = 1 << 28

Extent = Annotated[int, msgspec.Meta(ge=0, le=MAX_VALUES)]


class TensorSpec(Message, frozen=True, kw_only=True):
    """How one frame is read."""

    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[tuple[Extent, ...], msgspec.Meta(max_length=8)]
    codec: Annotated[str, msgspec.Meta(max_length=16)] = RAW
    needs_grad: bool = False
    """Its gradient is wanted back."""


class NamedSpec(Message, frozen=True, kw_only=True):
    """A tensor among the bytes of a unit's state."""

    name: Annotated[str, msgspec.Meta(max_length=512)]
    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[tuple[Extent, ...], msgspec.Meta(max_length=8)]


def pack(tensors: Mapping[str, Tensor]) -> tuple[tuple[NamedSpec, ...], Tensor]:
    """Named tensors as one run of bytes, in memory of its own."""
    specs = tuple(NamedSpec(name=n, dtype=NAMES[t.dtype], shape=tuple(t.shape)) for n, t in tensors.items())
    whole = torch.empty(sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    offset = 0
    for tensor in tensors.values():
        if tensor.nbytes:
            values = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
            whole[offset : offset + tensor.nbytes] = values
        offset += tensor.nbytes
    return specs, whole


def unpack(specs: Sequence[NamedSpec], whole: Tensor) -> dict[str, Tensor]:
    """What `pack` made; ProtocolError where the bytes are not what the specs say."""
    found, offset = {}, 0
    for spec in specs:
        dtype = DTYPES.get(spec.dtype)
        count = math.prod(spec.shape)
        if dtype is None or count > MAX_VALUES:
            raise ProtocolError(f"a tensor of {spec.dtype} {spec.shape} is unknown here: dropped")
        num_bytes = count * dtype.itemsize
        if offset + num_bytes > len(whole):
            raise ProtocolError("a state that ends too soon: dropped")
        piece = whole[offset : offset + num_bytes].clone()  # of its own, so that it is aligned
        found[spec.name] = (piece.view(dtype) if num_bytes else torch.empty(0, dtype=dtype)).reshape(spec.shape)
        offset += num_bytes
    if offset != len(whole):
        raise ProtocolError("a state with more bytes than tensors: dropped")
    return found


def check_codec(name: str) -> None:
    """ConfigurationError unless activations can travel by this codec."""
    if name not in ACTIVATION_CODECS:
        raise ConfigurationError(f"there is no codec {name!r} for activations: choose {', '.join(ACTIVATION_CODECS)}")


def encode_tensors(tensors: Sequence[Tensor], codec: str) -> tuple[tuple[TensorSpec, ...], list[memoryview]]:
    """The tensors with how to read them."""
    specs, frames = [], []
    for tensor in tensors:
        values = tensor.detach().to("cpu").contiguous()
        name, frame = RAW, None
        if codec != RAW and values.dtype.is_floating_point and values.numel():
            try:
                frame = _codec(codec).encode(values.to(torch.float32).reshape(-1))
                name = codec
            except NotFiniteError:
                frame = None
        if frame is None:
            frame = values.reshape(-1).view(torch.uint8).numpy().data
        specs.append(
            TensorSpec(
                dtype=NAMES[values.dtype], shape=tuple(values.shape), codec=name, needs_grad=tensor.requires_grad
            )
        )
        frames.append(frame)
    return tuple(specs), frames


def encode_gradients(gradients: Sequence[Tensor], codec: str) -> tuple[tuple[TensorSpec, ...], list[memoryview]]:
    """The same for gradients, where activations take this codec."""
    return encode_tensors(gradients, GRADIENT_CODECS.get(codec, codec))


def decode_tensors(specs: Sequence[TensorSpec], frames: Sequence[memoryview], device: torch.device) -> list[Tensor]:
    """The tensors, in memory of their own; ProtocolError where the frames are not what the specs say."""
    if len(specs) != len(frames):
        raise ProtocolError(f"{len(frames)} frames for {len(specs)} tensors: dropped")
    return [_decode(spec, frame).to(device) for spec, frame in zip(specs, frames, strict=True)]


def _decode(spec: TensorSpec, frame: memoryview) -> Tensor:
    dtype = DTYPES.get(spec.dtype)
    count = math.prod(spec.shape)
    if dtype is None or spec.codec not in KNOWN_CODECS or count > MAX_VALUES:
        raise ProtocolError(f"a tensor of {spec.dtype} {spec.shape} by {spec.codec} is unknown here: dropped")
    if spec.codec != RAW:
        out = torch.empty(count)
        _codec(spec.codec).decode_into(frame, out)
        return out.to(dtype).reshape(spec.shape)
    tensor = torch.empty(spec.shape, dtype=dtype)
    if frame.nbytes != tensor.nbytes:
        raise ProtocolError(f"a tensor of {tensor.nbytes} bytes came as {frame.nbytes}: dropped")
    if frame.nbytes:
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(frame, dtype=np.uint8)
    return tensor


def _codec(name: str) -> Codec:
    return codec_for(CodecSpec(name=name))
