"""A model's parameters with their torch optimizer and scheduler: stepped, offloaded, named, saved and loaded.

With offloading, the optimizer works on copies of the parameters on the CPU, in float32 (so that a half-precision model
has full-precision weights behind it); `land` copies them into the model. Without, both are the same tensors.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from potluck.errors import ConfigurationError
from potluck.optim.method import Metadata
from potluck.optim.parameters import (
    EXTRA,
    MEASURE,
    PARAMETER,
    STATISTIC,
    are_finite,
    in_order,
    is_named,
    named_parameters,
    order_of,
    prefixed,
    without_prefix,
)

SchedulerFactory = Callable[[Optimizer], LRScheduler]


@runtime_checkable
class FollowsMeasures(Protocol):
    """A scheduler that depends on what peers measure: all must hear the same, so it is averaged with each epoch."""

    def measures(self) -> dict[str, Tensor]:
        """What this peer has measured; the same names and shapes on all peers, each time."""
        ...

    def hear(self, averages: Mapping[str, Tensor]) -> None:
        """What all have measured, the same bits for all who hold the epoch."""
        ...


class ModelState:
    """What one peer trains."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        scheduler: LRScheduler | SchedulerFactory | None = None,
        named: Iterable[tuple[str, Tensor]] | None = None,
        extra_tensors: Mapping[str, Tensor] | Iterable[Tensor] = (),
        offload: bool = False,
    ) -> None:
        self.optimizer = _steps_once(optimizer)
        self.model = named_parameters(optimizer, named)
        self.extra = _named_extra(extra_tensors)
        self.parameters = self._offloaded() if offload else self.model
        self._order = order_of(self.parameters)
        self.scheduler = _scheduler(scheduler, optimizer)

    # Steps

    def step(
        self, gradients: Mapping[str, Tensor], *, missing: Iterable[str] = (), max_grad_norm: float | None = None
    ) -> None:
        """One step of the optimizer, and of the scheduler, on these gradients; parameters without one are passed over.

        They are clipped as a whole if wished: here, since a norm means something only of the average.
        """
        absent = frozenset(missing)
        # A delayed step comes between the user's backward pass and our taking its gradients: they must survive it.
        kept = {name: parameter.grad for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.grad = None if name in absent else gradients[name].to(parameter.device, parameter.dtype)
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), max_grad_norm)
        self.optimizer.step()
        for name, parameter in self.parameters.items():
            parameter.grad = kept[name]
        self.step_scheduler()

    def step_scheduler(self) -> None:
        """An epoch is done."""
        if self.scheduler is not None:
            self.scheduler.step()

    def measures(self) -> dict[str, Tensor]:
        """What the scheduler has to know of all peers, by the names by which it travels; mostly nothing."""
        scheduler: object = self.scheduler
        return prefixed(MEASURE, scheduler.measures()) if isinstance(scheduler, FollowsMeasures) else {}

    def hear_measures(self, averages: Mapping[str, Tensor]) -> None:
        """Tell the scheduler, out of an epoch's averages."""
        scheduler: object = self.scheduler
        if isinstance(scheduler, FollowsMeasures):
            scheduler.hear(without_prefix(MEASURE, averages))

    @torch.no_grad()
    def land(self) -> None:
        """Bring the parameters into the model, if they are copies."""
        if self.parameters is not self.model:
            for name, parameter in self.model.items():
                parameter.copy_(self.parameters[name])

    def is_finite(self) -> bool:
        """Whether parameters and statistics can be worked with."""
        return are_finite([*self.parameters.values(), *self.statistics().values()])

    # As named tensors

    def statistics(self, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The optimizer's tensors, by NAME/KEY; only some keys if given."""
        wanted = None if keys is None else frozenset(keys)
        found = {}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and (wanted is None or key in wanted):
                    found[f"{name}/{key}"] = value
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Parameters, statistics and extra tensors, by the names by which they travel."""
        return {
            **prefixed(PARAMETER, {name: parameter.detach() for name, parameter in self.parameters.items()}),
            **prefixed(STATISTIC, self.statistics()),
            **prefixed(EXTRA, self.extra),
        }

    def metadata(self) -> Metadata:
        """Hyperparameters as they are now, the scheduler, and what the optimizer keeps beside tensors."""
        plain_state: dict[str, dict[str, Any]] = {}
        for name, parameter in self.parameters.items():
            kept = {
                key: value
                for key, value in self.optimizer.state.get(parameter, {}).items()
                if not isinstance(value, Tensor) and _is_plain(value)
            }
            if kept:
                plain_state[name] = kept
        return {
            "order": self._order,
            "groups": [_shared_items(_plain_items(group)) for group in self.optimizer.param_groups],
            "state": plain_state,
            "scheduler": _plain_items(self.scheduler.state_dict()) if self.scheduler is not None else None,
        }

    def take_names(self, tensors: Mapping[str, Tensor], metadata: Metadata) -> dict[str, str]:
        """Call the parameters as somebody's state does, where only one side has names; what each is called from now on.

        Nothing where names agree, or where it cannot be told which is which. `load` says so then.
        """
        theirs = without_prefix(PARAMETER, tensors)
        if theirs.keys() == self.parameters.keys() or is_named(theirs) == is_named(self.parameters):
            return {}
        names = in_order(theirs, metadata.get("order"))
        if names is None or [theirs[name].shape for name in names] != [p.shape for p in self.parameters.values()]:
            return {}
        renamed = dict(zip(list(self.parameters), names, strict=True))
        rename(self.model, renamed)
        if self.parameters is not self.model:
            rename(self.parameters, renamed)
        return renamed

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """ConfigurationError where somebody's state is of another model; it says what to write, where it may not be."""
        theirs = without_prefix(PARAMETER, tensors)
        for name, parameter in self.parameters.items():
            given = theirs.get(name)
            if given is not None and given.shape == parameter.shape:
                continue
            what = "is missing" if given is None else f"has shape {tuple(given.shape)}"
            remedy = "this peer trains another model"
            if not is_named(self.parameters) and is_named(theirs):
                remedy = (
                    f"the {len(self.parameters)} parameters here have no names, and are not like the run's "
                    f"{len(theirs)} in order and shape. If it is the same model, give them their names: "
                    "torch.optim.AdamW(model.named_parameters())"
                )
            raise ConfigurationError(
                f"parameter {name!r} {what} in the run's state, and has shape {tuple(parameter.shape)} here: {remedy}"
            )

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
        """Take over somebody's state; ConfigurationError where it is of another model."""
        self.take_names(tensors, metadata)
        self.check(tensors)
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[PARAMETER + name])
        for name, tensor in self.extra.items():
            # Nobody else vouches for them: what is of no use is not taken.
            if (given := tensors.get(EXTRA + name)) is not None and given.shape == tensor.shape and are_finite([given]):
                tensor.copy_(given)
        self.load_statistics(tensors, metadata.get("state", {}))
        self.load_numbers(metadata)
        self.land()

    def load_numbers(self, metadata: Metadata) -> None:
        """Take over hyperparameters, the scheduler, and what the optimizer keeps beside tensors."""
        for name, values in metadata.get("state", {}).items():
            if name in self.parameters:
                self.optimizer.state[self.parameters[name]].update(values)
        for group, values in zip(self.optimizer.param_groups, metadata.get("groups", ()), strict=False):
            for key, value in _shared_items(values).items():
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        if in_order(self.parameters, metadata.get("order")) is not None:
            self._order = metadata["order"]  # one order for all, however this peer's groups are made
        if self.scheduler is not None and metadata.get("scheduler") is not None:
            self.scheduler.load_state_dict({**self.scheduler.state_dict(), **metadata["scheduler"]})

    def load_statistics(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over the optimizer's tensors, and what it has beside them."""
        state = self.optimizer.state
        state.clear()
        for name, parameter in self.parameters.items():
            prefix = f"{STATISTIC}{name}/"
            own: dict[str, Any] = dict(plain.get(name, {}))
            for full_name, tensor in tensors.items():
                if full_name.startswith(prefix) and "/" not in (key := full_name.removeprefix(prefix)):
                    own[key] = tensor.to(self._place(key, parameter), copy=True)
            if own:
                state[parameter] = own

    def _place(self, key: str, parameter: Tensor) -> torch.device:
        """Where the optimizer has a tensor of its state, as torch's own `load_state_dict` decides it."""
        if key != "step":
            return parameter.device
        group = next(group for group in self.optimizer.param_groups if any(p is parameter for p in group["params"]))
        on_device = group.get("capturable") or group.get("fused")
        return parameter.device if on_device else torch.device("cpu")

    # Saved by this peer for itself

    def state_dict(self) -> dict[str, Any]:
        """Everything, as torch itself saves it."""
        return {
            "parameters": {name: parameter.detach().clone() for name, parameter in self.parameters.items()},
            "extra": {name: tensor.detach().clone() for name, tensor in self.extra.items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),  # torch hands out the live tensors
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        for name, parameter in self.parameters.items():
            parameter.copy_(state["parameters"][name])
        for name, tensor in self.extra.items():
            tensor.copy_(state["extra"][name])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.land()

    def _offloaded(self) -> dict[str, Parameter]:
        """Copies on the CPU, put into the optimizer in place of the model's own."""
        copies: dict[str, Parameter] = {}
        by_id: dict[int, Parameter] = {}
        for name, parameter in self.model.items():
            copies[name] = by_id[id(parameter)] = Parameter(parameter.detach().to("cpu", torch.float32, copy=True))
        for group in self.optimizer.param_groups:
            group["params"] = [by_id.get(id(parameter), parameter) for parameter in group["params"]]
            if group.get("capturable"):
                group["capturable"] = False  # which is for GPUs alone
        for original in [key for key in self.optimizer.state if id(key) in by_id]:
            kept = cast(dict[str, Any], self.optimizer.state.pop(original))
            self.optimizer.state[by_id[id(original)]] = {
                key: _on_cpu(value, torch.float32 if _is_moment(value, original) else None)
                for key, value in kept.items()
            }
        return copies


def rename(tensors: dict[str, Any], renamed: Mapping[str, str]) -> None:
    """Put other names on these, in place and in the same order."""
    items = [(renamed[name], tensor) for name, tensor in tensors.items()]
    tensors.clear()
    tensors.update(items)


def _on_cpu(value: object, dtype: torch.dtype | None) -> object:
    return value.to("cpu", dtype or value.dtype) if isinstance(value, Tensor) else value


def _is_moment(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape


def _named_extra(extra: Mapping[str, Tensor] | Iterable[Tensor]) -> dict[str, Tensor]:
    if isinstance(extra, Mapping):
        return dict(extra)
    return {str(number): tensor for number, tensor in enumerate(extra)}


def _steps_once(optimizer: Optimizer) -> Optimizer:
    """The optimizer; ConfigurationError for one that computes gradients anew within a step, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigurationError(
            f"{type(optimizer).__name__} needs a closure, to compute gradients anew within a step; but a step is taken "
            "on gradients that were averaged: use an optimizer that does without, such as AdamW"
        )
    return optimizer


def _scheduler(scheduler: LRScheduler | SchedulerFactory | None, optimizer: Optimizer) -> LRScheduler | None:
    if callable(scheduler) and not isinstance(scheduler, LRScheduler):
        scheduler = scheduler(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigurationError(
            "ReduceLROnPlateau depends on one peer's own loss, and so would give each peer another learning rate: "
            "take a scheduler that depends on the epoch alone"
        )
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise ConfigurationError("the scheduler belongs to another optimizer: make it for the one given here")
    return scheduler


def _plain_items(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _as_plain(value) for key, value in values.items() if key not in _REFERENCES and _is_plain(value)}


_REFERENCES = ("params", "param_names")
# How a machine computes a step. What it computes is the same, and a state that travels says nothing of it.
_OF_THE_MACHINE = ("fused", "foreach", "capturable", "differentiable")


def _shared_items(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in _OF_THE_MACHINE}


def _is_plain(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _as_plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return [_as_plain(item) for item in value] if isinstance(value, list | tuple) else value
