"""What belongs to a path and survives its peer: the inner optimizer's state, and how its validation loss went.

It is one file of tensors (safetensors) with numbers beside them, so that it can be kept, sent and written as it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from potluck.errors import ProtocolError
from potluck.optim.modelstate import ModelState
from potluck.optim.parameters import STATISTIC, are_finite

BEST = "best/"
PLAIN = "potluck"  # the key of the numbers in the file


@dataclass(frozen=True, kw_only=True)
class PathState:
    """One path after so many phases."""

    phase: int = 0
    inner: Mapping[str, Tensor] = field(default_factory=dict)
    """The inner optimizer's tensors, by NAME/KEY."""

    numbers: Mapping[str, Any] = field(default_factory=dict)
    """What it has beside tensors, by parameter."""

    best: float = math.inf
    """The least validation loss so far."""

    best_modules: Mapping[str, Tensor] = field(default_factory=dict)
    """The path's parameters as they were then."""

    num_worse: int = 0
    """Phases since then."""

    def judged(self, loss: float, modules: Mapping[str, Tensor], *, keeps: bool) -> PathState:
        """After another validation; `keeps`: the best modules are wanted."""
        if math.isfinite(loss) and loss < self.best:
            kept = {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in modules.items()}
            return replace(self, best=loss, best_modules=kept if keeps else {}, num_worse=0)
        return replace(self, num_worse=self.num_worse + 1)

    def to_bytes(self) -> bytes:
        """As one file."""
        tensors = {f"{STATISTIC}{name}": tensor.detach().cpu().contiguous() for name, tensor in self.inner.items()}
        tensors |= {BEST + name: tensor.contiguous() for name, tensor in self.best_modules.items()}
        best = self.best if math.isfinite(self.best) else None
        numbers = {"phase": self.phase, "numbers": self.numbers, "best": best, "num_worse": self.num_worse}
        return save(tensors, {PLAIN: json.dumps(numbers)})


def read_state(data: bytes) -> PathState:
    """What `to_bytes` made; ProtocolError where it is something else, or holds what is not finite."""
    try:
        tensors = load(data)
        header = int.from_bytes(data[:8], "little")
        numbers = json.loads(json.loads(data[8 : 8 + header])["__metadata__"][PLAIN])
        best = numbers["best"]
        found = PathState(
            phase=int(numbers["phase"]),
            inner={n.removeprefix(STATISTIC): t for n, t in tensors.items() if n.startswith(STATISTIC)},
            numbers=dict(numbers["numbers"]),
            best=math.inf if best is None else float(best),
            best_modules={n.removeprefix(BEST): t for n, t in tensors.items() if n.startswith(BEST)},
            num_worse=int(numbers["num_worse"]),
        )
    except Exception as error:  # a peer may send anything
        raise ProtocolError(f"this is no state of a path: {type(error).__name__}: {error}") from error
    if not are_finite(tensor for tensor in tensors.values() if tensor.is_floating_point()):
        raise ProtocolError("a path's state holds values that are not finite")
    return found


def capture(state: PathState, model: ModelState, phase: int) -> PathState:
    """With the inner optimizer as it is now."""
    inner = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.statistics().items()}
    return replace(state, phase=phase, inner=inner, numbers=dict(model.metadata()["state"]))


def restore(state: PathState, model: ModelState) -> None:
    """Have the inner optimizer go on where it was; what does not fit the model is left out."""
    shapes = {name: parameter.shape for name, parameter in model.parameters.items()}
    fitting = {
        STATISTIC + name: tensor
        for name, tensor in state.inner.items()
        if (owner := name.rpartition("/")[0]) in shapes and tensor.shape in (shapes[owner], torch.Size([]))
    }
    plain = {name: values for name, values in state.numbers.items() if name in shapes}
    model.load_statistics(fitting, plain)
