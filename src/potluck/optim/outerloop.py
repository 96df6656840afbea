"""The outer loop of DiLoCo and its relatives: peers train on their own, and share how far they got.

    θ            what all peers share, the same bits for all
    θ_k          this peer's parameters, H inner steps further
    Δ = θ − θ_k  is averaged over the peers, and the outer optimizer takes θ a step along it

With fragments, an epoch synchronises one of them (methods/streaming.py). Whose turn it is belongs to the state: a run
that goes on from a state of another run, whose epochs had other numbers, goes on with the same fragment. The inner
optimizer's state stays local.

*Late work is kept.* A peer that missed an epoch takes over the new θ and puts its own change on top of it:
θ_k ← θ_new − (θ_old − θ_k). So a straggler's work counts in the next round, a little stale, and asynchronous training
is nothing else than everybody always being late. What a transform has left out of earlier changes is still owed, too.

*Nothing counts twice.* Who is taken out of a round in the middle may have given its change already, and then that is in
θ_new. Which parts of it are used nobody can tell it, but it knows how much has arrived. If that is most of it, the
change is spent: θ_k ← θ_new, plus what was done since. Otherwise it is late work. So at most half of a change is lost,
or counts twice; and mostly nothing is, since a straggler has mostly given all, and who came too late nothing.

*Spoilt work is not.* Local steps that end in NaN or infinity can neither be sent nor gone on with: θ_k ← θ, and the
inner optimizer begins anew.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from potluck.errors import ConfigurationError
from potluck.optim.method import Metadata, Method, Offer
from potluck.optim.methods.outer import OuterOptimizer
from potluck.optim.methods.quorum import token_weight
from potluck.optim.methods.streaming import FragmentSchedule, mix, split
from potluck.optim.methods.transform import Plain, Transform
from potluck.optim.modelstate import ModelState, rename
from potluck.optim.parameters import (
    EXTRA,
    GRADIENT,
    MEASURE,
    PARAMETER,
    STATISTIC,
    are_finite,
    beside,
    memory_beside,
    prefixed,
    without_prefix,
)

logger = logging.getLogger(__name__)

OUTER = STATISTIC + "outer/"
TRANSFORM = "buffer/transform/"

Weighting = Literal["samples", "equal", "tokens"]


class OuterLoop(Method):
    """Share changes of the parameters, and step on their mean."""

    def __init__(
        self,
        state: ModelState,
        outer: OuterOptimizer,
        schedule: FragmentSchedule,
        *,
        transform: Transform | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        self.state = state
        self.outer = outer
        self.schedule = schedule
        self.transform = transform or Plain()
        self.samples = 0
        self.steps = 0
        self.counts: Counter[str] = Counter()
        self.fragments = split(list(state.parameters), schedule.num_fragments)
        self._turn = 0  # added to an epoch's number to tell whose turn it is; the same for all peers
        self._weighting: Weighting = weighting
        self._shared = {name: _float32(parameter) for name, parameter in state.parameters.items()}
        self._fresh: set[str] = set()  # parameters whose shared values have not been brought into the model
        self._fresh_extra: dict[str, Tensor] = {}  # averages that have not been brought into the model either
        self._fresh_measures: dict[str, Tensor] = {}  # averages that the scheduler has not been told
        self._offered: dict[str, Tensor] = {}  # parameters as they were offered, where overlapping work is kept
        self._is_offered = False  # an exchange is under way: what is shared may change in another thread

    @property
    def shared(self) -> Mapping[str, Tensor]:
        """θ."""
        return self._shared

    def local_step(self, batch_size: int, max_grad_norm: float | None = None, is_finite: bool | None = None) -> bool:
        """One inner step on the gradients that are there; False when they are not finite, and no step was taken.

        Whether they are is looked at here, unless it is known: on a GPU everything waits for it.
        """
        gradients = {name: p.grad for name, p in self.state.model.items() if p.grad is not None}
        if is_finite is None:
            is_finite = are_finite(gradients.values())
        if is_finite:
            missing = self.state.parameters.keys() - gradients.keys()
            self.state.step(gradients, missing=missing, max_grad_norm=max_grad_norm)
            self.state.land()
            self.samples += batch_size
            self.steps += 1
        elif not self._is_offered:  # else when its result is brought in
            self._leave_spoilt_work()
        for parameter in self.state.model.values():
            parameter.grad = None
        return is_finite

    def _leave_spoilt_work(self) -> None:
        """Go on from what is shared, if local steps have made parameters that are not finite."""
        if are_finite(self.state.parameters.values()):
            return
        self.counts["spoilt"] += 1
        logger.error(
            "local steps made parameters that are not finite (NaN or infinity): this peer goes on from what all share, "
            "and its last %d samples are lost. If this comes again, take a smaller learning rate or max_grad_norm",
            self.samples,
        )
        self._begin_anew()  # moments may be infinite too, and would spoil the next step

    @torch.no_grad()
    def _begin_anew(self) -> None:
        self.discard()
        for name, parameter in self.state.parameters.items():
            parameter.copy_(self._shared[name])
        self.state.optimizer.state.clear()
        self.state.land()
        self.samples = self.steps = 0
        self._fresh, self._offered = set(), {}

    # Rounds

    @torch.no_grad()
    def offer(self, epoch: int) -> Offer:
        """How far this peer got in the fragment whose turn it is."""
        self._leave_spoilt_work()
        names = self._names_of(epoch)
        change = {name: self._shared[name] - self.state.parameters[name].float() for name in names}
        if self.schedule.keeps_overlap:
            self._offered = {name: _float32(self.state.parameters[name]) for name in names}
        others = self._copied_extra() | self.state.measures()
        counted = (self.samples, self.steps)
        offer = Offer(lambda: self._to_travel(change) | others, self.weight, counted, made_of=change.values())
        self.samples = self.steps = 0
        self._is_offered = True
        return offer

    def blank(self, epoch: int) -> Offer:
        """No change. What this peer has done since it took over the shared parameters is put on top of the result."""
        names = self._names_of(epoch)
        nothing = {name: torch.zeros_like(self._shared[name]) for name in names}
        return Offer(self._to_travel(nothing) | self._copied_extra() | self.state.measures(), 0.0)

    def _names_of(self, epoch: int) -> list[str]:
        """The parameters whose turn it is."""
        return self.fragments[self.schedule.fragment_of_epoch(epoch + self._turn)]

    def renumber(self, by: int) -> None:
        """The same fragment's turn at another number."""
        self._take_turn(self._turn - by)

    def _take_turn(self, turn: int) -> None:
        self._turn = turn % len(self.fragments)

    def _to_travel(self, change: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return prefixed(GRADIENT, self.transform.encode(change))

    def _copied_extra(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in prefixed(EXTRA, self.state.extra).items()}

    @property
    def weight(self) -> float:
        """What the work since the last offer counts for."""
        match self._weighting:
            case "samples":
                return float(self.samples)
            case "equal":
                return 1.0 if self.samples else 0.0
            case "tokens":
                return token_weight(self.samples, self.steps)

    @torch.no_grad()
    def accept(self, offer: Offer, *, epoch: int, alone: bool) -> None:
        """The outer step."""
        if not offer.weight:
            self.transform.abandon()
        change = self.transform.decode(without_prefix(GRADIENT, offer.tensors))
        if offer.detail is None:  # nothing was offered: all that was done since the last epoch stays on top
            self._offered = {name: self._shared[name].clone() for name in change}
        self.outer.step(self._shared, change)
        self._fresh |= change.keys()
        self._fresh_measures = prefixed(MEASURE, without_prefix(MEASURE, offer.tensors))
        if not alone:
            self._fresh_extra = without_prefix(EXTRA, offer.tensors)

    @torch.no_grad()
    def land(self) -> None:
        """Mix what is new into this peer's parameters."""
        self._is_offered = False
        for name, average in self._fresh_extra.items():
            self.state.extra[name].copy_(average)
        self._fresh_extra = {}
        self.state.hear_measures(self._fresh_measures)
        self._fresh_measures = {}
        self._leave_spoilt_work()  # NaN would survive any mixing
        self._keep_overlap()
        mix(self.state.parameters, self._shared, sorted(self._fresh), self.schedule.mixing)
        self._fresh = set()
        self.state.land()

    @torch.no_grad()
    def _keep_overlap(self) -> None:
        """Put what was done since the offer on top of what came of it."""
        for name in self._fresh & self._offered.keys():
            parameter = self.state.parameters[name]
            done_since = parameter.float().sub(self._offered[name])
            parameter.copy_(done_since.add_(self._shared[name]))
        self._fresh -= self._offered.keys()
        self._offered = {}

    def withdraw(self, offer: Offer) -> None:
        """The change is still there, and counts again."""
        self.transform.abandon()
        self._offered = {}
        self._is_offered = False
        samples, steps = offer.detail
        self.samples += samples
        self.steps += steps

    @torch.no_grad()
    def left_behind(self, offer: Offer, *, contributed: float) -> None:
        """The change is still there, or spent if others have most of it."""
        if contributed <= 0.5 or not offer.weight:
            self.withdraw(offer)
            return
        change = self.transform.decode(without_prefix(GRADIENT, offer.tensors))  # what was left out is owed from now on
        for name in change:
            parameter, offered = self.state.parameters[name], self._offered.get(name)
            done_since = 0.0 if offered is None else parameter.float().sub(offered)
            parameter.copy_(self._shared[name] + done_since)
        self._offered = {}
        self._is_offered = False
        self.state.land()

    def discard(self) -> None:
        """Nothing: work is kept, see `load`."""
        self.transform.abandon()

    def forget(self) -> None:
        """Local changes, what is owed of earlier ones, and the inner optimizer's memory of how it came by them."""
        self._begin_anew()
        self.transform.forget()

    def statistics(self) -> dict[str, int]:
        """How often local work was spoilt."""
        return dict(self.counts)

    # State

    def tensors(self) -> dict[str, Tensor]:
        """What is shared: parameters, the outer optimizer's memory, extra tensors."""
        return {
            **prefixed(PARAMETER, self._shared),
            **prefixed(OUTER, self.outer.tensors()),
            **prefixed(TRANSFORM, self.transform.shared()),
            **prefixed(EXTRA, self.state.extra),
        }

    def is_steady(self, name: str) -> bool:
        """What is shared changes with the outer step alone; forward passes change extra tensors."""
        return name.startswith((PARAMETER, STATISTIC))

    def metadata(self) -> Metadata:
        """Numbers beside them; hyperparameters and the scheduler too, so that a newcomer trains as the others do."""
        state = self.state.metadata()
        return {
            "order": state["order"],
            "groups": state["groups"],
            "scheduler": state["scheduler"],
            "outer": self.outer.numbers(),
            "transform": self.transform.shared_numbers(),
            "turn": self._turn,
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
        """Take over what is shared, and put this peer's own change on top."""
        has_work = self.samples > 0 or len(self.fragments) > 1  # of fragments whose turn it was not
        self._is_offered = False
        self._leave_spoilt_work()
        self._take_names(tensors, metadata)
        self._check(tensors)
        for name, shared in self._shared.items():
            parameter = self.state.parameters[name]
            change = shared - parameter.float()
            shared.copy_(tensors[PARAMETER + name])
            parameter.copy_(shared - change if has_work and are_finite([change]) else shared)
        for name, tensor in self.state.extra.items():
            if (given := tensors.get(EXTRA + name)) is not None:
                tensor.copy_(given)
        self.outer.load_tensors(beside(without_prefix(OUTER, tensors), self._shared))
        self.outer.load_numbers(metadata.get("outer", {}))
        self.transform.load_shared(
            beside(without_prefix(TRANSFORM, tensors), self._shared), metadata.get("transform", {})
        )
        self._take_turn(int(metadata.get("turn", 0)))
        self.state.load_numbers(metadata)
        self._fresh, self._fresh_extra, self._fresh_measures, self._offered = set(), {}, {}, {}
        self.state.land()

    def _take_names(self, tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
        if renamed := self.state.take_names(tensors, metadata):
            rename(self._shared, renamed)
            self.fragments = split(list(self.state.parameters), self.schedule.num_fragments)  # it goes by names

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        self.state.check(tensors)
        theirs = {name for name in without_prefix(EXTRA, tensors) if "/" not in name}
        if lacking := sorted(theirs - self.state.extra.keys()):
            raise ConfigurationError(
                f"the run's state has {', '.join(lacking[:3])}{' …' if lacking[3:] else ''} beside its parameters, and "
                "this peer has not: give extra_tensors=dict(model.named_buffers())"
            )

    def load_numbers(self, metadata: Metadata) -> None:
        """Take over hyperparameters, the scheduler, the turn, and the numbers of outer optimizer and transform."""
        self.state.load_numbers(metadata)
        self._take_turn(int(metadata.get("turn", 0)))
        self.outer.load_numbers(metadata.get("outer", {}))
        self.transform.load_shared(self.transform.shared(), metadata.get("transform", {}))

    def state_dict(self) -> dict[str, Any]:
        """Inner and outer state, local work, and the transform's memory."""
        return {
            "state": self.state.state_dict(),
            "shared": {name: tensor.clone() for name, tensor in self._shared.items()},
            "outer": {name: tensor.clone() for name, tensor in self.outer.tensors().items()},
            "outer_numbers": self.outer.numbers(),
            "transform": self.transform.state_dict(),
            "samples": self.samples,
            "steps": self.steps,
            "turn": self._turn,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.state.load_state_dict(state["state"])
        for name, tensor in self._shared.items():
            tensor.copy_(state["shared"][name])
        self.outer.load_tensors(beside(state["outer"], self._shared))
        self.outer.load_numbers(state["outer_numbers"])
        self.transform.load_state_dict(memory_beside(state["transform"], self._shared))
        self.samples, self.steps = state["samples"], state["steps"]
        self._take_turn(state.get("turn", 0))


def _float32(parameter: Tensor) -> Tensor:
    return parameter.detach().to(torch.float32, copy=True)
