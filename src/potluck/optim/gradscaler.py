"""Gradients of mixed precision: a torch GradScaler multiplies the loss, and here the gradients are divided again.

Each batch is unscaled on its own, before it is added up, so that the scaler may change its scale between any two steps
(`scaler.update()` after each, as usual). A batch that has overflowed is left out, and the scaler learns of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from potluck.errors import ConfigurationError


class _Holder:
    """What a GradScaler wants of an optimizer: the parameters whose gradients it looks at."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.param_groups = [{"params": list(parameters)}]


class Unscaler:
    """Unscales the gradients of one model."""

    def __init__(self, parameters: Iterable[Tensor], facade: Optimizer) -> None:
        """`facade` is what the user may have called `scaler.unscale_` with."""
        self._parameters = list(parameters)
        self._holder = cast(Optimizer, _Holder(self._parameters))
        self._facade = facade

    def unscale(self, scaler: GradScaler) -> bool:
        """Divide the gradients by the scale, unless the user has done so; False when they have overflowed.

        ConfigurationError where the user has called `scaler.unscale_` in vain: with an offloaded optimizer the scaler
        looks at the optimizer's copies, which have no gradients. What was clipped after it was clipped scaled.
        """
        if not scaler.is_enabled():
            return True
        states: dict[int, dict[str, Any]] = scaler._per_optimizer_states
        by_user = states.get(id(self._facade))
        if by_user is not None and by_user["stage"] is not OptState.READY:
            record = by_user
            if not record["found_inf_per_device"] and any(p.grad is not None for p in self._parameters):
                raise ConfigurationError(
                    "scaler.unscale_(optimizer) finds no gradients, since offload_optimizer keeps the optimizer's "
                    "parameters apart from the model's: leave that call out, step() unscales by itself. To clip, give "
                    "max_grad_norm"
                )
        else:
            scaler.unscale_(self._holder)
            record = states[id(self._holder)]
        found: dict[Any, Tensor] = record["found_inf_per_device"]
        return not any(value.item() for value in found.values())
