"""LAMB: Adam whose step of each tensor is scaled to the tensor's own length. For very large batches.

    m ← β₁·m + (1 − β₁)·g        v ← β₂·v + (1 − β₂)·g²
    u = m̂ / (√v̂ + ε) + λ·p       m̂, v̂: corrected for their start at zero
    p ← p − η · φ(|p|)/|u| · u    φ clamps to [0, 10], or to `clamp`; the ratio is 1 where either length is 0

(You et al., 2020.) What sahajBERT and DeDLOC trained ALBERT with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from potluck.errors import ConfigurationError

LONGEST = 10.0  # φ's upper end, as in the authors' code


class Lamb(Optimizer):
    """Layer-wise adaptive moments."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clamp: float = LONGEST,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigurationError(
                f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}: none may be below 0, nor a beta 1"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._clamp = clamp

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
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        step = state["step"]
        update = (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt_() + group["eps"])
        update.add_(parameter, alpha=group["weight_decay"])
        length, update_length = parameter.norm().clamp(max=self._clamp), update.norm()
        ratio = torch.where((length > 0) & (update_length > 0), length / update_length, 1.0)
        parameter.sub_(update.mul_(ratio), alpha=group["lr"])
