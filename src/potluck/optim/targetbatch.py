"""Large batches over many peers: gradients are averaged, and every peer takes the same step (synchronous training).

Every so many epochs the parameters, some of the optimizer's statistics and the extra tensors travel in the same round,
*before* the step. So after it all members hold the same bits again, and no second round is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from potluck.optim.accumulator import GradientAccumulator, MeanGradients
from potluck.optim.method import Metadata, Method, Offer
from potluck.optim.methods.transform import Plain, Transform
from potluck.optim.modelstate import ModelState
from potluck.optim.parameters import (
    EXTRA,
    GRADIENT,
    PARAMETER,
    STATISTIC,
    beside,
    memory_beside,
    prefixed,
    without_prefix,
)

TRANSFORM = "buffer/transform/"


class TargetBatch(Method):
    """Average gradients, then step."""

    def __init__(
        self,
        state: ModelState,
        *,
        reuse_grad_buffers: bool = False,
        max_grad_norm: float | None = None,
        average_state_every: int = 0,
        average_statistics: tuple[str, ...] = (),
        transform: Transform | None = None,
    ) -> None:
        self.state = state
        self.gradients = GradientAccumulator(state.model, reuse_grad_buffers=reuse_grad_buffers)
        self.transform = transform or Plain()
        self._max_grad_norm = max_grad_norm
        self._average_state_every = average_state_every
        self._average_statistics = average_statistics
        self._turn = 0  # added to an epoch's number to tell whether states are averaged; the same for all peers

    def offer(self, epoch: int) -> Offer:
        """The mean gradients, and now and then the state."""
        return self._offer(self.gradients.take(), epoch)

    def blank(self, epoch: int) -> Offer:
        """Gradients of no samples."""
        return self._offer(self.gradients.nothing(), epoch)

    def _offer(self, taken: MeanGradients, epoch: int) -> Offer:
        is_averaged = bool(self._average_state_every and (epoch + self._turn) % self._average_state_every == 0)
        state = self._averaged_state() if is_averaged else {}
        averaged = state | self.state.measures()
        return Offer(
            lambda: prefixed(GRADIENT, self.transform.encode(taken.tensors)) | averaged,
            float(taken.samples),
            taken,
            made_of=taken.tensors.values(),
        )

    def renumber(self, by: int) -> None:
        """States are averaged after as many epochs as without it."""
        self._take_turn(self._turn - by)

    def _take_turn(self, turn: int) -> None:
        self._turn = turn % max(1, self._average_state_every)

    def _averaged_state(self) -> dict[str, Tensor]:
        # Copies: a half-written state would be worse than a little memory, and the model computes on meanwhile.
        state = {
            **prefixed(PARAMETER, self.state.parameters),
            **prefixed(STATISTIC, self.state.statistics(self._average_statistics)),
            **prefixed(EXTRA, self.state.extra),
        }
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    @torch.no_grad()
    def accept(self, offer: Offer, *, epoch: int, alone: bool) -> None:
        """Take over the averaged state, if any; then step on the averaged gradients."""
        taken: MeanGradients = offer.detail
        if not alone:
            for name, tensor in {**prefixed(PARAMETER, self.state.parameters), **self._other_state()}.items():
                if (average := offer.tensors.get(name)) is not None:
                    tensor.copy_(average)
        if not taken.samples:
            self.transform.abandon()  # nothing of ours was sent, so nothing of it is accounted for
        averaged = self.transform.decode(without_prefix(GRADIENT, offer.tensors))
        self.state.hear_measures(offer.tensors)
        with torch.enable_grad():
            self.state.step(averaged, missing=taken.missing if alone else (), max_grad_norm=self._max_grad_norm)

    def _other_state(self) -> dict[str, Tensor]:
        return {**prefixed(STATISTIC, self.state.statistics()), **prefixed(EXTRA, self.state.extra)}

    def withdraw(self, offer: Offer) -> None:
        """Count the gradients again, for the next attempt."""
        self.transform.abandon()
        self.gradients.put_back(offer.detail)

    def discard(self) -> None:
        """Gradients of an outdated state are of no use."""
        self.transform.abandon()
        self.gradients.reset()

    def land(self) -> None:
        """Bring the parameters into the model."""
        self.state.land()

    def tensors(self) -> dict[str, Tensor]:
        """The model's state, and what the transform shares."""
        return {**self.state.tensors(), **prefixed(TRANSFORM, self.transform.shared())}

    def is_own(self, name: str) -> bool:
        """Extra tensors are, whether averaged now and then or not: forward passes change them."""
        return name.startswith(EXTRA) and name.removeprefix(EXTRA) in self.state.extra

    def is_steady(self, name: str) -> bool:
        """Parameters and statistics change with the step alone; forward passes change extra tensors."""
        return name.startswith((PARAMETER, STATISTIC))

    def metadata(self) -> Metadata:
        """The optimizer's and scheduler's numbers."""
        return {**self.state.metadata(), "transform": self.transform.shared_numbers(), "turn": self._turn}

    def load(self, tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
        """Take over somebody's state; what the transform owes is of an outdated one."""
        self.state.load(tensors, metadata)
        self.transform.forget()
        shared = beside(without_prefix(TRANSFORM, tensors), self.state.model)
        self.transform.load_shared(shared, metadata.get("transform", {}))
        self._take_turn(int(metadata.get("turn", 0)))

    def load_numbers(self, metadata: Metadata) -> None:
        """Take over hyperparameters, the scheduler, the turn, and the transform's numbers."""
        self.state.load_numbers(metadata)
        self._take_turn(int(metadata.get("turn", 0)))
        self.transform.load_shared(self.transform.shared(), metadata.get("transform", {}))

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer, scheduler, gradients so far, and the transform's memory."""
        return {
            "state": self.state.state_dict(),
            "gradients": self.gradients.state_dict(),
            "transform": self.transform.state_dict(),
            "turn": self._turn,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.state.load_state_dict(state["state"])
        self.gradients.load_state_dict(state["gradients"])
        self.transform.load_state_dict(memory_beside(state["transform"], self.state.model))
        self._take_turn(state.get("turn", 0))
