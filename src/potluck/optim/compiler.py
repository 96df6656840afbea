"""torch's compiler, imported off the way of a peer that comes in.

torch.optim keeps its functions from being compiled, and imports the compiler (`torch._dynamo`) for that: with the first
optimizer that is made, though nothing is compiled. That takes as long as importing torch itself, 1.2 s of a processor,
and a newcomer has better things to do. So making an optimizer does without it, as long as nobody has imported it, and a
thread imports it once training has begun. The first step of the optimizer needs it, which is that of the first round.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

NAME = "torch._dynamo"
_MARK = "__dynamo_disable"  # where torch keeps what it calls in a function's place, see torch/_compile.py
_FUNCTIONS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


def postpone() -> None:
    """Have optimizers made without the compiler, until somebody imports it. Idempotent."""
    for name in _FUNCTIONS:
        outer = getattr(torch.optim.Optimizer, name)
        inner = getattr(outer, "__wrapped__", None)
        if inner is not None and not hasattr(inner, _MARK) and NAME not in sys.modules:
            setattr(inner, _MARK, _uncompiled(outer, inner))


def _uncompiled(outer: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, while there is no compiler; from then on what torch makes of it."""

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        if NAME not in sys.modules:
            return inner(*args, **kwargs)
        if getattr(inner, _MARK, None) is call:
            delattr(inner, _MARK)
        return outer(*args, **kwargs)

    return call


def import_meanwhile() -> None:
    """Import it in a thread; a step that comes earlier waits for that. Idempotent."""
    if NAME not in sys.modules:
        work = threading.Thread(target=importlib.import_module, args=(NAME,), name="torch's compiler", daemon=True)
        work.start()
