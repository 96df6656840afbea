"""In which numbers a peer computes: each chooses for itself, since weights and what travels stay float32.

float32    everywhere
bfloat16   GPUs that compute in it (NVIDIA from Ampere on, Intel): half of the memory, the range of float32
float16    older NVIDIA GPUs, such as a T4: a small range, so the loss is scaled, and a batch that overflows is left out
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from potluck.errors import ConfigurationError

Precision = Literal["float32", "bfloat16", "float16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
BFLOAT16_CAPABILITY = (8, 0)  # of CUDA devices: those before compute in bfloat16 only in a roundabout way


def find_precision(name: str, device: torch.device) -> Precision:
    """The precision of that name; that which suits the device without one."""
    if not name:
        return _suiting(device)
    if name not in PRECISIONS:
        raise ConfigurationError(f"precision={name}: choose one of {', '.join(PRECISIONS)}")
    return name  # type: ignore[return-value]


def _suiting(device: torch.device) -> Precision:
    if device.type == "cuda":
        newer = torch.cuda.get_device_capability(device) >= BFLOAT16_CAPABILITY
        return "bfloat16" if newer else "float16"
    return "bfloat16" if device.type == "xpu" else "float32"


class MixedPrecision:
    """How losses are computed, and gradients made of them."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.precision = precision
        self.scaler = GradScaler(device.type) if precision == "float16" else None
        self._device = device

    def lowered(self) -> AbstractContextManager[object]:
        """In there, what is safe in lower precision is computed in it."""
        if self.precision == "float32":
            return torch.autocast(self._device.type, enabled=False)
        return torch.autocast(self._device.type, dtype=getattr(torch, self.precision))

    def backward(self, loss: Tensor) -> None:
        """Make gradients."""
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()  # type: ignore[no-untyped-call]

    def stepped(self) -> None:
        """An optimizer has seen the gradients: the scale follows what came of it."""
        if self.scaler is not None and self.scaler._per_optimizer_states:
            self.scaler.update()
