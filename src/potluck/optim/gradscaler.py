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


class _Holder:
    """What a GradScaler wants of an optimizer: the parameters whose gradients it looks at."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.param_groups = [{"params": list(parameters)}]


class Unscaler:
    """Unscales the gradients of one model."""

    def __init__(self, parameters: Iterable[Tensor], facade: Optimizer) -> None:
        """`facade` is what the user may have called `scaler.unscale_` with."""
        self._holder = cast(Optimizer, _Holder(parameters))
        self._facade = facade

    def unscale(self, scaler: GradScaler) -> bool:
        """Divide the gradients by the scale, unless the user has done so; False when they have overflowed."""
        if not scaler.is_enabled():
            return True
        states: dict[int, dict[str, Any]] = scaler._per_optimizer_states
        by_user = states.get(id(self._facade))
        if by_user is not None and by_user["stage"] is not OptState.READY:
            record = by_user
        else:
            scaler.unscale_(self._holder)
            record = states[id(self._holder)]
        found: dict[Any, Tensor] = record["found_inf_per_device"]
        return not any(value.item() for value in found.values())
