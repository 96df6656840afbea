"""Local steps at once, and averaged parameters when the run has done its batch (hivemind's `use_local_updates`).

Every step changes this peer's own parameters; an epoch averages the parameters, some of the optimizer's statistics and
the extra tensors of all peers, weighted by their samples. When the round runs in the background, local steps go on, and
what the round changed is added to whatever the parameters are by then: p ← p + (average − p as it was offered).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from potluck.optim.method import Metadata, Method, Offer
from potluck.optim.modelstate import ModelState
from potluck.optim.parameters import EXTRA, PARAMETER, STATISTIC, are_finite, prefixed


class LocalUpdates(Method):
    """Step at once, average states."""

    def __init__(
        self, state: ModelState, *, max_grad_norm: float | None = None, average_statistics: tuple[str, ...] = ()
    ) -> None:
        self.state = state
        self.samples = 0
        self.num_failed = 0
        self._max_grad_norm = max_grad_norm
        self._average_statistics = average_statistics
        self._is_spoilt = False

    @property
    def is_spoilt(self) -> bool:
        """Whether a step has made something that is not finite: all later batches would be bad."""
        return self._is_spoilt

    def local_step(self, batch_size: int, is_finite: bool) -> None:
        """One step on this peer's own gradients; passed over if they are not finite."""
        gradients = {name: p.grad for name, p in self.state.model.items() if p.grad is not None}
        missing = self.state.parameters.keys() - gradients.keys()
        if is_finite:
            # The scheduler counts epochs of the run, not local steps.
            scheduler, self.state.scheduler = self.state.scheduler, None
            try:
                self.state.step(gradients, missing=missing, max_grad_norm=self._max_grad_norm)
            finally:
                self.state.scheduler = scheduler
            self.samples += batch_size
        else:
            self._is_spoilt = not are_finite(self.tensors().values())
        for parameter in self.state.model.values():
            parameter.grad = None
        self.state.land()

    def offer(self, epoch: int) -> Offer:
        """The state as it is now; without weight if it is not finite."""
        if not are_finite(self.tensors().values()):
            self.samples = 0
        offer = self.blank(epoch)
        offer.weight, self.samples = float(self.samples), 0
        return offer

    def blank(self, epoch: int) -> Offer:
        """The state as it is now, to be replaced by what comes."""
        before = {name: tensor.detach().clone() for name, tensor in self._averaged().items()}
        travelling = {name: tensor.clone() for name, tensor in before.items()}
        return Offer(travelling | self.state.measures(), 0.0, before)

    @torch.no_grad()
    def accept(self, offer: Offer, *, epoch: int, alone: bool) -> None:
        """Add what the round has changed."""
        if not alone:
            live = self._averaged()
            for name, before in offer.detail.items():
                tensor, average = live[name], offer.tensors[name]
                if torch.equal(tensor, before) or not are_finite([before]):
                    tensor.copy_(average)  # exactly, so that all members hold the same bits
                else:
                    tensor.add_(average.to(tensor.dtype) - before)
        self.state.hear_measures(offer.tensors)
        self.state.step_scheduler()

    def withdraw(self, offer: Offer) -> None:
        """Count the samples again."""
        self.samples += int(offer.weight)

    def discard(self) -> None:
        """Samples of an outdated state do not count."""
        self.samples = 0

    def land(self) -> None:
        """Bring the parameters into the model."""
        self.state.land()

    def tensors(self) -> dict[str, Tensor]:
        """The model's state."""
        return self.state.tensors()

    def is_own(self, name: str) -> bool:
        """Everything is: statistics are local, and so are parameters when local steps go on during an average."""
        return True

    def is_steady(self, name: str) -> bool:
        """Parameters and statistics are: local steps say so before they change them."""
        return name.startswith((PARAMETER, STATISTIC))

    def metadata(self) -> Metadata:
        """The optimizer's and scheduler's numbers, local like the rest."""
        return {"own": self.state.metadata()}

    def load(self, tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
        """Take over somebody's state."""
        self.state.load(tensors, {**metadata, **metadata.get("own", {})})
        self._is_spoilt = False

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer, scheduler, and the samples so far."""
        return {"state": self.state.state_dict(), "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.state.load_state_dict(state["state"])
        self.samples = state["samples"]

    def _averaged(self) -> dict[str, Tensor]:
        return {
            **prefixed(PARAMETER, self.state.parameters),
            **prefixed(STATISTIC, self.state.statistics(self._average_statistics)),
            **prefixed(EXTRA, self.state.extra),
        }
