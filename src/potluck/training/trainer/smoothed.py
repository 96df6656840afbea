"""A loss that is smoothed where it was computed: reading it waits for the device, so that is done only to tell it."""

from __future__ import annotations

import torch
from torch import Tensor

MEMORY = 0.9  # per step


class SmoothedLoss:
    """A moving average of the steps' losses."""

    def __init__(self) -> None:
        self._value: Tensor | None = None

    @torch.no_grad()
    def add(self, loss: Tensor) -> None:
        """One step's; the first, and the first again after one that was not finite, counts as it is."""
        value = loss.detach().float()
        if self._value is not None:
            value = torch.where(self._value.isfinite(), self._value.lerp(value, 1 - MEMORY), value)
        self._value = value

    def read(self) -> float:
        """Waits for the device; NaN before the first step."""
        return float("nan") if self._value is None else float(self._value.item())
