"""Tensors over the bytes of a frame without a copy, and scratch memory that is used again.

Frames arrive as read-only views and leave from preallocated ones; both are looked at through tensors that share
their memory. Scratch belongs to a thread, so that the threads of a pool neither wait for nor overwrite each other;
it grows to the largest chunk seen and stays.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

Buffer = bytes | bytearray | memoryview

_NUMPY_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.int16,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
}


class _Lent:
    """Read-only memory under a flag that says writable: torch warns about anything else, though we only read it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array  # keeps the memory alive as long as the tensor over it
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def num_bytes(frame: Buffer) -> int:
    """How long the frame is."""
    return memoryview(frame).nbytes


def tensor_over(frame: Buffer, dtype: torch.dtype, *, offset: int = 0, count: int) -> Tensor:
    """A tensor that shares the frame's memory. One over a read-only frame must not be written to."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    if not memoryview(frame).readonly:
        return torch.frombuffer(frame, dtype=dtype, offset=offset, count=count)
    array = np.frombuffer(frame, dtype=_NUMPY_DTYPES[dtype], offset=offset, count=count)
    tensor = torch.from_numpy(np.asarray(_Lent(array)))
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def empty_frame(size_bytes: int) -> memoryview:
    """A writable frame; its bytes are whatever was there before."""
    return np.empty(size_bytes, dtype=np.uint8).data


_scratch = threading.local()


def scratch(purpose: str, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """This thread's buffer for one purpose, `count` elements of it; its content lasts until the next call for it."""
    buffers: dict[tuple[str, torch.dtype], Tensor] | None = getattr(_scratch, "buffers", None)
    if buffers is None:
        buffers = _scratch.buffers = {}
    buffer = buffers.get((purpose, dtype))
    if buffer is None or buffer.numel() < count:
        buffer = buffers[purpose, dtype] = torch.empty(count, dtype=dtype)
    return buffer[:count]
