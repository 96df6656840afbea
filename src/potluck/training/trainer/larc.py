"""LARC: SGD whose learning rate is held down, tensor by tensor, where a gradient is long for the tensor it changes.

    local = η_trust · |p| / (|g| + λ·|p|)        g ← (g + λ·p) · min(local / lr, 1)        then SGD with momentum

(You et al., 2017, in the form that clips.) With `clips=False` the factor is `local` itself: the step is lr · local long
in proportion, whatever lr is. A tensor or a gradient of length 0 keeps the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

TRUST = 0.02  # as in NVIDIA's Apex


class Larc(Optimizer):
    """Layer-wise adaptive rate clipping."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust: float = TRUST,
        clips: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._trust, self._clips = trust, clips

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        decay, rate = group["weight_decay"], group["lr"]
        length, slope = parameter.norm(), parameter.grad.norm()  # type: ignore[union-attr]
        local = self._trust * length / (slope + decay * length).clamp(min=torch.finfo(parameter.dtype).tiny)
        factor = (local / max(rate, 1e-30)).clamp(max=1.0) if self._clips else local
        share = torch.where((length > 0) & (slope > 0), factor, 1.0)
        change = parameter.grad.add(parameter, alpha=decay).mul_(share)  # type: ignore[union-attr]
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = change.clone()
        else:
            state["momentum_buffer"].mul_(group["momentum"]).add_(change)
        parameter.sub_(state["momentum_buffer"], alpha=rate)
