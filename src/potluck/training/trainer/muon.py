"""Muon for matrices, AdamW for the rest. As inner optimizer of DiLoCo it is called MuLoCo.

    v ← β·v + (1 − β)·g        u = g + β·(v − g)        O = the orthogonal matrix nearest to u (Newton–Schulz)
    p ← (1 − lr·λ)·p − lr · 0.2·√max(rows, columns) · O

(Jordan et al., 2024; the scale of Liu et al., 2025, by which an update is as long as AdamW's, so that AdamW's learning
rate and weight decay carry over.) Embeddings, the output layer and vectors are AdamW's: they are no maps between
spaces whose directions are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: steep at 0, near 1 from 0.7 to 1.2
ITERATIONS = 5
LIKE_ADAMW = 0.2  # the usual length of AdamW's update, per element
EPS = 1e-8


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix whose singular values are all 1."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x


class Muon(Optimizer):
    """Groups with `orthogonal=True` hold matrices; all others are stepped as AdamW would."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "momentum": momentum, "weight_decay": weight_decay, "orthogonal": False}
        super().__init__(params, defaults)

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
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    update = self._turned(parameter, group) if group["orthogonal"] else self._adam(parameter, group)
                    parameter.sub_(update, alpha=group["lr"])
        return loss

    def _turned(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(velocity, group["momentum"]).reshape(parameter.shape[0], -1)
        scale = LIKE_ADAMW * max(ahead.shape) ** 0.5
        return orthogonal(ahead.float()).mul_(scale).to(parameter.dtype).reshape(parameter.shape)

    def _adam(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step = state["step"]
        update: Tensor = (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt_() + EPS)
        return update
