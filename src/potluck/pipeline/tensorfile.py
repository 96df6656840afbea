"""Named tensors in a `safetensors` file, written one after the other: never more than one in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from potluck.errors import StateUnavailableError
from potluck.pipeline.wire import DTYPES, NAMES

KINDS = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "uint8": "U8",
    "bool": "BOOL",
}
TYPES = {kind: DTYPES[name] for name, kind in KINDS.items()}
MAX_HEADER_BYTES = 100 * 1024 * 1024
Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def write_tensors(path: Path, shapes: Shapes, tensors: Iterable[Tensor]) -> int:
    """Write tensors of these shapes, which come in the same order; returns the bytes of the file. OSError as usual."""
    header, offset = {}, 0
    for name, (dtype, shape) in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": KINDS[NAMES[dtype]], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            if tensor.nbytes:
                file.write(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return 8 + len(text) + offset


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file; StateUnavailableError where it is not whole."""
    try:
        whole = bytearray(path.read_bytes())
        length = int.from_bytes(whole[:8], "little")
        if length > min(MAX_HEADER_BYTES, len(whole)):
            raise ValueError(f"a header of {length} bytes in a file of {len(whole)}")
        found = {}
        body = memoryview(whole)[8 + length :]
        for name, spec in json.loads(whole[8 : 8 + length]).items():
            first, last = spec["data_offsets"]
            piece = bytearray(body[first:last])
            dtype = TYPES[spec["dtype"]]
            values = torch.frombuffer(piece, dtype=dtype) if piece else torch.empty(0, dtype=dtype)
            found[name] = values.reshape(spec["shape"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise StateUnavailableError(f"{path} cannot be read ({error}): another cut may be whole") from error
    return found
