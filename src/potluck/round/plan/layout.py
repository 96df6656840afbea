"""Named tensors as one flat space of float32 elements, and back.

Peers that hold the same model derive the same layout: tensors are ordered by codec and then by name, so that each codec
has one run (chunks.py), and within a tensor elements count in row-major order, however it lies in memory. The schema's
digest (names, shapes, dtypes, roles) tells peers apart that do not hold the same model; the layout's digest also covers
the codecs and the order, and must be the same for all members of a round.

The space is float32, whatever the tensors are:
- float32, float16 and bfloat16 fit exactly; float64 is rounded on the way out and comes back rounded;
- integers (counters such as a norm's number of batches) are averaged as float32, so that beyond 2²⁴ they keep 24
  significant bits, and come back rounded to the nearest integer that their dtype can hold;
- booleans, complex numbers, sparse, quantized and meta tensors have no average here, and are refused by name.

Reading and writing go chunk by chunk and need no flat copy of a model: a chunk that lies within one contiguous float32
tensor on the CPU is not even copied. Tensors may be on any device, non-contiguous, empty, zero-dimensional, and may
require gradients: they are read and written outside of the graph.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import msgspec
import numpy as np
import torch
from torch import Tensor

from potluck.errors import ConfigurationError
from potluck.round.codecs import CodecChoice, CodecSpec, EncodedChunk, TensorRole
from potluck.round.codecs.memory import scratch
from potluck.round.plan.specs import CodecSpan

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One tensor's place in the index space."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: TensorRole
    codec: CodecSpec
    start: int
    elements: int

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.elements


class Layout:
    """Where each tensor lies. Made by `Layout.of`; holds no tensors."""

    def __init__(self, slots: tuple[Slot, ...]) -> None:
        self.slots = slots
        self.elements = slots[-1].stop if slots else 0
        self.schema_digest = _schema_digest(slots)
        self.digest = _digest([self.schema_digest, [(slot.name, slot.codec) for slot in slots]])
        self.runs = tuple(
            CodecSpan(codec=codec, elements=elements)
            for codec, group in groupby(slots, key=lambda slot: slot.codec)
            if (elements := sum(slot.elements for slot in group))
        )

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        choice: CodecChoice | None = None,
        roles: TensorRole | Mapping[str, TensorRole] = "gradient",
    ) -> Layout:
        """The layout of these tensors; `roles` is one for all, or one for each name."""
        choice = choice or CodecChoice()
        unplaced = []
        for name, tensor in tensors.items():
            _check_averageable(name, tensor)
            role = roles if isinstance(roles, str) else roles.get(name)
            if role is None:
                raise ConfigurationError(f"tensor {name!r} has no role: name one for it, or one for all tensors")
            codec = choice.codec_of(name, role, tensor.numel(), integer=tensor.dtype in _INTEGERS)
            unplaced.append((codec, name, tensor, role))
        slots, start = [], 0
        for codec, name, tensor, role in sorted(unplaced, key=lambda item: item[:2]):
            slot = Slot(
                name=name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                role=role,
                codec=codec,
                start=start,
                elements=tensor.numel(),
            )
            slots.append(slot)
            start = slot.stop
        return cls(tuple(slots))

    def bind(self, tensors: Mapping[str, Tensor]) -> FlatTensors:
        """These tensors as one flat space; they must be the ones that the layout describes."""
        return FlatTensors(self, tensors)


class FlatTensors:
    """Tensors bound to a layout: read from and written to by ranges of the index space.

    It refers to the tensors themselves, so that writing changes them in place.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
        if surprising := sorted(tensors.keys() ^ {slot.name for slot in layout.slots}):
            raise ConfigurationError(
                f"tensors and layout differ in {_some(surprising)}: both must name the same tensors"
            )
        for slot in layout.slots:
            tensor = tensors[slot.name]
            if tuple(tensor.shape) != slot.shape or tensor.dtype != slot.dtype:
                raise ConfigurationError(
                    f"tensor {slot.name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                    f"but the layout has it as {slot.dtype} of shape {slot.shape}: make a new layout"
                )
        self.layout = layout
        # Without empty tensors, each start is distinct, and a position finds its tensor by bisection.
        self._slots = [slot for slot in layout.slots if slot.elements]
        self._starts = [slot.start for slot in self._slots]
        self._tensors = [tensors[slot.name].detach() for slot in self._slots]

    def read(self, start: int, stop: int) -> Tensor:
        """Elements start … stop as float32: a view where they lie so in memory, else a copy in this thread's scratch.

        Only to be read, and before this thread's next call.
        """
        self._check_range(start, stop)
        view = self._plain_view(start, stop)
        if view is not None:
            return view
        out = scratch("read", stop - start)
        self.read_into(start, out)
        return out

    def read_into(self, start: int, out: Tensor) -> None:
        """Copy the elements from `start` on into a float32 buffer, as many as it holds."""
        self._check_range(start, start + out.numel())
        position = 0
        for piece in self._pieces(start, start + out.numel()):
            out[position : position + piece.numel()].view(piece.shape).copy_(piece)
            position += piece.numel()

    def write(self, start: int, values: Tensor) -> None:
        """Put float32 values into the tensors from `start` on, each cast to its tensor's dtype."""
        self._check_range(start, start + values.numel())
        position = 0
        for piece in self._pieces(start, start + values.numel()):
            source = values[position : position + piece.numel()].view(piece.shape)
            piece.copy_(source if piece.is_floating_point() else _to_integers(source, piece.dtype))
            position += piece.numel()

    def write_encoded(self, start: int, stop: int, encoded: EncodedChunk) -> None:
        """Decode into the tensors: in place where they lie as float32 in memory, else by way of scratch."""
        self._check_range(start, stop)
        view = self._plain_view(start, stop)
        if view is not None:
            encoded.decode_into(view)
            return
        values = scratch("written", stop - start)
        encoded.decode_into(values)
        self.write(start, values)

    def gather(self, out: Tensor | None = None) -> Tensor:
        """All elements in one float32 tensor."""
        if out is None:
            out = torch.empty(self.layout.elements)
        elif out.numel() != self.layout.elements:
            raise ConfigurationError(f"{self.layout.elements} elements do not go into a buffer of {out.numel()}")
        self.read_into(0, out)
        return out

    def scatter(self, flat: Tensor) -> None:
        """All elements back into the tensors."""
        if flat.numel() != self.layout.elements:
            raise ConfigurationError(f"{flat.numel()} values do not fill {self.layout.elements} elements")
        self.write(0, flat)

    def _plain_view(self, start: int, stop: int) -> Tensor | None:
        """The elements as they lie in memory, if they do so as float32 in one piece."""
        if start == stop:
            return None
        position = bisect_right(self._starts, start) - 1
        slot, tensor = self._slots[position], self._tensors[position]
        if stop > slot.stop or not _is_plain(tensor):
            return None
        return tensor.view(-1)[start - slot.start : stop - slot.start]

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.layout.elements:
            raise ValueError(f"elements {start} to {stop} of {self.layout.elements}: out of range")

    def _pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """Views of the tensors that together are elements start … stop, in order."""
        position = bisect_right(self._starts, start) - 1
        while start < stop:
            slot, tensor = self._slots[position], self._tensors[position]
            end = min(stop, slot.stop)
            yield from _span(tensor, start - slot.start, end - slot.start)
            start, position = end, position + 1


def _span(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Views that together are elements start … stop of a tensor in row-major order, however it lies in memory.

    A tensor that is not contiguous has no flat view: whole rows are taken together, and a partial first or last row
    is a smaller tensor with the same problem.
    """
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop]
        return
    if tensor.dim() == 1:
        yield tensor[start:stop]
        return
    width = tensor[0].numel()
    while start < stop:
        row, column = divmod(start, width)
        if column or stop - start < width:
            end = min(stop, (row + 1) * width)
            yield from _span(tensor[row], column, column + end - start)
        else:
            end = stop - stop % width
            yield tensor[row : end // width]
        start = end


def _to_integers(values: Tensor, dtype: torch.dtype) -> Tensor:
    # The bounds as float32 values that convert back without overflow: 2⁶³ − 1 itself is not one of them.
    limits = torch.iinfo(dtype)
    largest = np.float32(limits.max)
    if float(largest) > limits.max:
        largest = np.nextafter(largest, np.float32(0.0))
    return values.round().clamp_(float(limits.min), float(largest)).to(dtype)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


def _check_averageable(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        what = f"is {tensor.layout}"
    elif tensor.dtype not in _FLOATS and tensor.dtype not in _INTEGERS:
        what = f"is {tensor.dtype}"
    elif tensor.device.type == "meta":
        what = "has no data (meta device)"
    else:
        return
    raise ConfigurationError(f"tensor {name!r} {what}, which has no average here: leave it out or convert it first")


def _schema_digest(slots: tuple[Slot, ...]) -> str:
    """Independent of the order and the codecs, which may change from round to round."""
    return _digest(sorted((slot.name, slot.shape, str(slot.dtype), slot.role) for slot in slots))


def _digest(description: object) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(description)).hexdigest()


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
