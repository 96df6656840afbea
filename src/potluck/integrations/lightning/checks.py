"""What the strategy cannot do, found out before the run is joined, and what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from potluck.errors import ConfigurationError


def device_of(accelerator: Accelerator | None, devices: Sequence[torch.device] | None) -> torch.device:
    """Where this peer computes; ConfigurationError for devices that torch here does not know, and for several."""
    if devices and len(devices) > 1:
        raise ConfigurationError(
            f"the Trainer has {len(devices)} devices, and a peer computes on one: start a program for each, with "
            "devices=1 (or devices=[N], to say which)"
        )
    if isinstance(accelerator, CPUAccelerator):
        return torch.device("cpu")
    own = torch.accelerator.current_accelerator()  # CUDA, MPS, XPU or another's
    if own is None or not devices or devices[0].type != own.type:
        known = "cpu" if own is None else f"cpu' or accelerator='{own.type}"
        raise ConfigurationError(
            f"the accelerator is {type(accelerator).__name__}, and torch finds no such device here: "
            f"Trainer(accelerator='{known}')"
        )
    return devices[0]


def the_optimizer(optimizers: Sequence[Optimizer]) -> Optimizer:
    """The only one; ConfigurationError when there is none, or another."""
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"configure_optimizers returned {len(optimizers)} optimizers, and a run trains with one: put all "
            "parameters into one, in groups with learning rates of their own"
        )
    [optimizer] = optimizers
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(f"configure_optimizers returned {type(optimizer).__name__}: a run needs an optimizer")
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError("LBFGS looks at a loss many times a step, which a run cannot: take AdamW or SGD")
    return optimizer


def check_schedulers(configs: Sequence[LRSchedulerConfig], *, is_manual: bool) -> None:
    """ConfigurationError for ReduceLROnPlateau without a metric to follow.

    Lightning sees to it for what configure_optimizers returns, unless the module steps its schedulers by itself: then
    it gives the metric, too.
    """
    for config in configs:
        if isinstance(config.scheduler, ReduceLROnPlateau) and config.monitor is None and not is_manual:
            raise ConfigurationError(
                "ReduceLROnPlateau has no metric to follow: return it by configure_optimizers, as {'scheduler': …, "
                "'monitor': 'val_loss'}, and peers share what they measure"
            )
