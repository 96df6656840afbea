"""From an algorithm's name and options to an optimizer of the run.

    sync          all peers' samples up to `target_batch_size` make one step (potluck.Optimizer)
    local         every peer steps at once, and parameters are averaged at each target (hivemind's local updates)
    diloco        many local steps, then one exchange (potluck.DiLoCo)
    streaming     the same, a fragment at a time, while training goes on
    sparseloco    the same, of each block the largest values in two bits
    asynchronous  the same, nobody waits for anybody

Options are those of OptimizerConfig and DiLoCoConfig, and `outer` and `transform`. An algorithm's own come first, and
can be overridden by name.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from potluck.errors import ConfigurationError
from potluck.integrations.schedules import RunSchedule
from potluck.optim.diloco import DiLoCoConfig
from potluck.optim.methods.delayed import DelayedNesterov
from potluck.optim.methods.outer import OuterSGD
from potluck.optim.methods.sparseloco import SparseLoCo
from potluck.optim.options import OptimizerConfig
from potluck.run.joined import Joined
from potluck.training.trainer.ownloop import DiLoCo, Optimizer, ProgramOptimizer

logger = logging.getLogger(__name__)

Algorithm = Literal["sync", "local", "diloco", "streaming", "sparseloco", "asynchronous"]

_OWN: dict[Algorithm, Callable[[], dict[str, Any]]] = {
    "sync": dict,
    "local": lambda: {"use_local_updates": True},
    "diloco": dict,
    "streaming": lambda: {"num_fragments": 4, "overlap_steps": 5, "keep_overlap_work": True},
    "sparseloco": lambda: {"inner_steps": 10, "outer": OuterSGD(1.0), "transform": SparseLoCo()},
    "asynchronous": lambda: {"asynchronous": True, "outer": DelayedNesterov(delay=4)},
}
_SYNCHRONOUS = ("sync", "local")
_PARTS = ("outer", "transform", "extra_tensors", "source")  # given beside the config
_DELAYS = ("delay_grad_averaging", "delay_optimizer_step", "delay_state_averaging")
_FOR_SYNC_ALONE = ("target_batch_size", "average_state_every", "average_opt_statistics", "performance_ema_alpha")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How a run trains. The same for all its peers."""

    algorithm: Algorithm = "sync"
    """Its name."""

    target_batch_size: int | None = None
    """So many samples of all peers together make an epoch, where the algorithm counts samples."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Those of OptimizerConfig or DiLoCoConfig."""

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(Algorithm):
            raise ConfigurationError(
                f"algorithm={self.algorithm!r} is not known: choose one of {', '.join(get_args(Algorithm))}"
            )
        if self.algorithm in _SYNCHRONOUS and self.target_batch_size is None:
            raise ConfigurationError(
                "how many samples of all peers together make a step? Give target_batch_size=…, or set "
                "POTLUCK_TARGET_BATCH_SIZE"
            )
        self.config()

    @property
    def reuses_gradients(self) -> bool:
        """Whether gradients stay in the model's own buffers from batch to batch."""
        return bool(self.options.get("reuse_grad_buffers"))

    @property
    def offloads(self) -> bool:
        """Whether the optimizer works on copies of the parameters on the CPU."""
        return self.config().offload_optimizer

    def parts(self) -> dict[str, Any]:
        """What an optimizer takes beside its config: new ones each time, since they have a memory."""
        return {name: value for name, value in self._chosen().items() if name in _PARTS}

    def _chosen(self) -> dict[str, Any]:
        return _OWN[self.algorithm]() | dict(self.options)

    def config(self) -> OptimizerConfig | DiLoCoConfig:
        """What the options say, checked."""
        own = {name: value for name, value in self._chosen().items() if name not in _PARTS}
        if self.algorithm in _SYNCHRONOUS:
            chosen = {**_with_offloading(own), "target_batch_size": self.target_batch_size}
            return OptimizerConfig(**_known(chosen, OptimizerConfig))
        if "matchmaking_seconds" in own:
            own.setdefault("grace_seconds", own.pop("matchmaking_seconds"))
        if any(own.get(name) for name in _DELAYS):
            raise ConfigurationError(
                f"algorithm={self.algorithm!r} has no delays of that name: overlap_steps=… lets local steps go "
                "on while an exchange is under way"
            )
        left_out = (*_DELAYS, *_FOR_SYNC_ALONE)
        return DiLoCoConfig(**_known({k: v for k, v in own.items() if k not in left_out}, DiLoCoConfig))

    def make(
        self,
        run: Joined,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: RunSchedule | None = None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> ProgramOptimizer:
        """The run's optimizer around a torch one."""
        parts = self.parts()
        parts.setdefault("extra_tensors", buffers or {})
        config = self.config()
        scheduler = cast(LRScheduler | None, schedule)  # it has what is needed of one
        if isinstance(config, OptimizerConfig):
            return Optimizer(run, optimizer, scheduler=scheduler, config=config, **parts)
        return DiLoCo(run, optimizer, scheduler=scheduler, config=config, **parts)


def _with_offloading(options: dict[str, Any]) -> dict[str, Any]:
    """As hivemind has it: a step that is delayed needs an optimizer that is offloaded, unless somebody says no."""
    return {"offload_optimizer": bool(options.get("delay_optimizer_step")), **options}


def _known(options: dict[str, Any], config: type[OptimizerConfig] | type[DiLoCoConfig]) -> dict[str, Any]:
    names = {entry.name for entry in fields(config)}
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, sorted(names | set(_PARTS)), n=1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(names | set(_PARTS)))}"
            raise ConfigurationError(f"{name} is no option of this algorithm: {meant}")
    return options
