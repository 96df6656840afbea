"""A model that computes beside others' work: it rests between its forward passes, and ends when it should.

A preview of 25 million parameters takes ten seconds of a core. Computed in one go, it took the core that a trainer on
the host's machine needs to give a newcomer the state, and kept the hub's thread waiting for the interpreter's lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

AT_ONCE_SECONDS = 1.0  # small models have said all by then
PIECE_SECONDS = 0.05  # of computing, between two rests


class StoppedError(Exception):
    """What is computed is not wanted any more."""


class Rests:
    """The rests of one computation in a thread."""

    def __init__(
        self,
        factor: float,
        *,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        """It rests `factor` times as long as it computes, after the first second."""
        self.rested_seconds = 0.0
        self._factor = factor
        self._now = now
        self._wait = wait
        self._stopped = threading.Event()
        self._computed_seconds = 0.0
        self._since = now()

    def stop(self) -> None:
        """Have the computation end at its next forward pass. From any thread."""
        self._stopped.set()

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Rest after forward passes of this model. StoppedError comes out of one when it should end."""
        self._since = self._now()
        hooks = [module.register_forward_hook(self._passed) for module in _with_forward(model)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _passed(self, *_of_the_pass: Any) -> None:
        if self._stopped.is_set():
            raise StoppedError
        seconds = self._now() - self._since
        if seconds < PIECE_SECONDS:
            return
        self._computed_seconds += seconds
        if self._computed_seconds > AT_ONCE_SECONDS:
            rest_seconds = self._factor * seconds
            if self._wait(self._stopped, rest_seconds):
                raise StoppedError
            self.rested_seconds += rest_seconds
        self._since = self._now()


def _with_forward(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that are called: a model may be a mere collection of them."""
    if isinstance(model, nn.ModuleDict | nn.ModuleList):
        for child in model.children():
            yield from _with_forward(child)
    else:
        yield model
