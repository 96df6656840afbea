"""The outer step of one module, out of the changes of the paths through it: DiLoCo's, with DiPaCo's weights.

    θ            the module's parameters, the same bits for all members of its group
    Δ_i = θ − θ_i  how far path i got in a phase; kept here until a round takes it
    offer        the mean of all Δ_i that this peer carries, by tokens; its weight is their sum
    accept       the outer optimizer steps along factor · Δ̄ (weighing.py)

A peer that carries several paths adds their changes here, and is one member of the round. Late changes are kept: they
count in the next round. Nothing here touches a model: a phase begins with a copy of θ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from potluck.errors import ConfigurationError
from potluck.optim.method import Metadata, Method, Offer
from potluck.optim.methods.outer import OuterOptimizer
from potluck.optim.methods.transform import Plain, Transform
from potluck.optim.outerloop import OUTER, TRANSFORM
from potluck.optim.parameters import (
    GRADIENT,
    PARAMETER,
    STATISTIC,
    beside,
    memory_beside,
    prefixed,
    without_prefix,
)

Factor = Callable[[int], float]
"""By what the mean of the round that made an epoch is multiplied."""


@dataclass(frozen=True)
class Change:
    """What one phase has done to a module."""

    delta: dict[str, Tensor]
    weight: float
    share: float = 1.0
    """Of a phase."""


class ModuleLoop(Method):
    """One peer's copy of a module, and the changes that wait for a round."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        outer: OuterOptimizer,
        *,
        transform: Transform | None = None,
        factor: Factor = lambda _epoch: 1.0,
    ) -> None:
        self.outer = outer
        self.transform = transform or Plain()
        self.factor = factor
        self._shared = {name: p.detach().to(torch.float32, copy=True) for name, p in parameters.items()}
        self._waiting: list[Change] = []

    @property
    def shared(self) -> Mapping[str, Tensor]:
        """θ."""
        return self._shared

    @property
    def phases(self) -> float:
        """That wait for a round."""
        return sum(change.share for change in self._waiting)

    @property
    def weight(self) -> float:
        """Of what waits for a round."""
        return sum(change.weight for change in self._waiting)

    def add(self, change: Change) -> None:
        """A phase was trained."""
        if change.delta.keys() != self._shared.keys():
            raise ConfigurationError("a change is of other parameters than the module has")
        self._waiting.append(change)

    @torch.no_grad()
    def offer(self, epoch: int) -> Offer:
        """All changes that wait, as one."""
        changes, self._waiting = self._waiting, []
        mean = _mean(changes, self._shared)
        tensors = prefixed(GRADIENT, self.transform.encode(mean))
        return Offer(
            tensors, sum(c.weight for c in changes), detail=changes, phases=sum(change.share for change in changes)
        )

    def blank(self, epoch: int) -> Offer:
        """No change; those that wait go on waiting."""
        nothing = {name: torch.zeros_like(tensor) for name, tensor in self._shared.items()}
        return Offer(prefixed(GRADIENT, self.transform.encode(nothing)), 0.0, detail=[])

    @torch.no_grad()
    def accept(self, offer: Offer, *, epoch: int, alone: bool) -> None:
        """The outer step."""
        if not offer.weight:
            self.transform.abandon()
        change = self.transform.decode(without_prefix(GRADIENT, offer.tensors))
        factor = self.factor(epoch)
        if factor != 1.0:
            change = {name: delta * factor for name, delta in change.items()}
        self.outer.step(self._shared, change)

    def withdraw(self, offer: Offer) -> None:
        """The changes wait for the next round."""
        self.transform.abandon()
        self._waiting = [*offer.detail, *self._waiting]

    def left_behind(self, offer: Offer, *, contributed: float) -> None:
        """The changes wait for the next round, or are spent if others have most of them."""
        if contributed <= 0.5 or not offer.weight:
            self.withdraw(offer)
        else:
            self.transform.decode(without_prefix(GRADIENT, offer.tensors))  # what was left out is owed from now on

    def discard(self) -> None:
        """Nothing: a change is a difference, and counts on any state."""
        self.transform.abandon()

    def forget(self) -> None:
        """Changes that wait, and what is owed of earlier ones."""
        self._waiting = []
        self.transform.forget()

    # State

    def tensors(self) -> dict[str, Tensor]:
        """Parameters, the outer optimizer's memory, the transform's."""
        return {
            **prefixed(PARAMETER, self._shared),
            **prefixed(OUTER, self.outer.tensors()),
            **prefixed(TRANSFORM, self.transform.shared()),
        }

    def is_steady(self, name: str) -> bool:
        """What is shared changes with the outer step alone."""
        return name.startswith((PARAMETER, STATISTIC))

    def metadata(self) -> Metadata:
        """Numbers beside them."""
        return {"outer": self.outer.numbers(), "transform": self.transform.shared_numbers()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
        """Take over what is shared."""
        for name, shared in self._shared.items():
            given = tensors.get(PARAMETER + name)
            if given is None or given.shape != shared.shape:
                what = "is missing" if given is None else f"has shape {tuple(given.shape)}"
                raise ConfigurationError(f"parameter {name!r} {what} in the module's state: it is of another model")
        for name, shared in self._shared.items():
            shared.copy_(tensors[PARAMETER + name])
        self.outer.load_tensors(beside(without_prefix(OUTER, tensors), self._shared))
        self.outer.load_numbers(metadata.get("outer", {}))
        self.transform.load_shared(
            beside(without_prefix(TRANSFORM, tensors), self._shared), metadata.get("transform", {})
        )

    def load_numbers(self, metadata: Metadata) -> None:
        """Take over the numbers of outer optimizer and transform."""
        self.outer.load_numbers(metadata.get("outer", {}))
        self.transform.load_shared(self.transform.shared(), metadata.get("transform", {}))

    def state_dict(self) -> dict[str, Any]:
        """All of it, with the changes that wait."""
        return {
            "shared": {name: tensor.clone() for name, tensor in self._shared.items()},
            "outer": {name: tensor.clone() for name, tensor in self.outer.tensors().items()},
            "outer_numbers": self.outer.numbers(),
            "transform": self.transform.state_dict(),
            "waiting": [(change.delta, change.weight, change.share) for change in self._waiting],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        for name, tensor in self._shared.items():
            tensor.copy_(state["shared"][name])
        self.outer.load_tensors(beside(state["outer"], self._shared))
        self.outer.load_numbers(state["outer_numbers"])
        self.transform.load_state_dict(memory_beside(state["transform"], self._shared))
        self._waiting = [Change(*each) for each in state["waiting"]]


def _mean(changes: list[Change], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By weight; one alone is left as it is, to the last bit."""
    if not changes:
        return {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    if len(changes) == 1:
        return {name: delta.clone() for name, delta in changes[0].delta.items()}
    whole = sum(change.weight for change in changes)
    mean = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    for change in changes:
        for name, delta in change.delta.items():
            mean[name].add_(delta, alpha=change.weight / whole)
    return mean
