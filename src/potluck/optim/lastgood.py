"""The last finite state of a peer, to go back to.

Where states are published there is a copy of it already, made by a worker, and that is used; else it is copied here.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from potluck.optim.method import Published, RunState


class LastGood:
    """One state, in one copy."""

    def __init__(self) -> None:
        self._state: RunState | None = None
        self._is_copy = False  # made here, so that its memory can be used again
        self._published: Published | None = None

    def keep(self, live: RunState, published: Published | None) -> None:
        """This state is good. `published` holds a copy of it, or will; None: nobody does."""
        before, self._published = self._published, published
        if published is None:
            self._state = _copied(live, self._state if self._is_copy else None)
        else:
            self._state = dataclasses.replace(live, tensors={})
        self._is_copy = published is None
        if before is not None:
            before.release()

    def take(self, fetched: RunState) -> None:
        """This state was fetched, and is good. Nobody changes its tensors, so there is nothing to copy."""
        before, self._published = self._published, None
        self._state, self._is_copy = fetched, False
        if before is not None:
            before.release()

    def snapshot(self) -> RunState | None:
        """The state; None where there is none, or it could not be copied."""
        if self._state is None or self._published is None:
            return self._state
        tensors = self._published.tensors()
        return dataclasses.replace(self._state, tensors=tensors) if tensors is not None else None


def _copied(live: RunState, before: RunState | None) -> RunState:
    """A copy of a state, in the memory of an earlier copy where it fits."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in live.tensors.items():
        old = before.tensors.get(name) if before is not None else None
        if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
            tensors[name] = old.copy_(tensor.detach())
        else:
            tensors[name] = tensor.detach().to("cpu", copy=True)
    return RunState(epoch=live.epoch, tensors=tensors, metadata=live.metadata)
