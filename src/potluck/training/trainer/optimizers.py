"""From a manifest to optimizers: torch's inside, ours around it, and the learning rate of an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from potluck.optim.diloco import DiLoCo
from potluck.optim.methods.outer import Nesterov, OuterOptimizer
from potluck.optim.methods.quorum import AdaptiveGrace, AdaptiveQuorum
from potluck.optim.optimizer import Optimizer
from potluck.round.aggregators import AggregatorSpec
from potluck.round.codecs import CodecChoice
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.round.coordinator.gathering import GatherConfig
from potluck.round.coordinator.trigger import Quorum
from potluck.run.joined import Joined
from potluck.state.keeper import StateConfig
from potluck.training.manifest import manifest as manifests
from potluck.training.manifest.manifest import Manifest, OptimizerSpec, ScheduleSpec, Settings

SharedOptimizer = Optimizer | DiLoCo


def make_optimizer(
    run: Joined, model: nn.Module, manifest: Manifest, state: StateConfig | None = None
) -> SharedOptimizer:
    """The optimizer that this manifest asks for, around the model, with the run's state as soon as there is one.

    `state` says whether this peer keeps states for others, and writes backups.
    """
    inner = _inner(manifest.settings[0].optimizer, model.parameters())
    # By the model's own names, so that a checkpoint says what is in it.
    inner.param_groups[0]["param_names"] = [name for name, _ in model.named_parameters()]
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    options = {**options_of(manifest), "state": state or StateConfig()}
    if isinstance(manifest.settings[0].training, manifests.Sync):
        return Optimizer(run, inner, extra_tensors=buffers, **options)
    return DiLoCo(run, inner, extra_tensors=buffers, outer=outer_of(manifest), **options)


def options_of(manifest: Manifest) -> dict[str, Any]:
    """What a manifest says about the options of OptimizerConfig, or of DiLoCoConfig."""
    settings = manifest.settings[0]  # what may change is set before each step
    training = settings.training
    for_all = {
        "max_grad_norm": settings.optimizer.max_grad_norm or None,
        "codecs": CodecChoice.by_role({"gradient": manifest.exchange.codec}),
        "gather": gathering(manifest),
    }
    if isinstance(training, manifests.Sync):
        return {
            **for_all,
            "target_batch_size": training.target_batch_size,
            "matchmaking_seconds": training.matchmaking_seconds,
            "delay_grad_averaging": training.delay_averaging,
        }
    return {
        **for_all,
        "inner_steps": training.inner_steps,
        "steps_by_speed": training.steps_by_speed,
        "num_fragments": training.num_fragments,
        "overlap_steps": training.overlap_steps,
        "mixing": training.mixing,
        "min_peers": training.min_peers,
        "grace_seconds": training.grace_seconds,
    }


def outer_of(manifest: Manifest) -> OuterOptimizer:
    """The outer optimizer of a run with DiLoCo."""
    training = manifest.settings[0].training
    assert isinstance(training, manifests.DiLoCo), "it has one"
    return Nesterov(training.outer_learning_rate, training.outer_momentum)


def gathering(manifest: Manifest) -> GatherConfig:
    """How rounds of this run are planned, whoever coordinates."""
    return GatherConfig(
        aggregator=AggregatorSpec(name=manifest.exchange.aggregator),
        trusted_reducers=manifest.exchange.reducers == "trusted",
        weight_cap=manifest.exchange.weight_cap or None,
    )


def coordinating(manifest: Manifest) -> CoordinatorConfig:
    """How rounds of this run are started and planned by a coordinator that trains nothing itself."""
    training = manifest.newest.training
    gather = gathering(manifest)
    if isinstance(training, manifests.Sync):
        return CoordinatorConfig(gather=gather, trigger=Quorum(grace_seconds=training.matchmaking_seconds))
    grace = AdaptiveGrace(least_seconds=min(0.5, training.grace_seconds), most_seconds=training.grace_seconds)
    return CoordinatorConfig(gather=gather, trigger=AdaptiveQuorum(min_senders=training.min_peers, grace=grace))


def follow(optimizer: SharedOptimizer, settings: Settings) -> None:
    """Set what may change while a run trains. It depends on the epoch alone, so that a newcomer has the same."""
    rate = learning_rate(settings, optimizer.epoch)
    for group in optimizer.param_groups:
        group["lr"] = rate
        group["weight_decay"] = settings.optimizer.weight_decay
        if "betas" in group:
            group["betas"] = (settings.optimizer.beta1, settings.optimizer.beta2)
        elif "momentum" in group:
            group["momentum"] = settings.optimizer.beta1
    if isinstance(settings.training, manifests.Sync) and isinstance(optimizer, Optimizer):
        optimizer.target_batch_size = settings.training.target_batch_size


def learning_rate(settings: Settings, epoch: int) -> float:
    """Of the step that makes the epoch after `epoch`."""
    return settings.optimizer.learning_rate * _share(settings.schedule, epoch)


def _share(schedule: ScheduleSpec, epoch: int) -> float:
    if epoch < schedule.warmup_epochs:
        return (epoch + 1) / (schedule.warmup_epochs + 1)
    if schedule.kind == "constant":
        return 1.0
    length = schedule.total_epochs - schedule.warmup_epochs
    passed = min(1.0, (epoch - schedule.warmup_epochs) / length)
    remaining = 1.0 - passed if schedule.kind == "linear" else (1.0 + math.cos(math.pi * passed)) / 2
    return schedule.final_share + (1.0 - schedule.final_share) * remaining


def _inner(spec: OptimizerSpec, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if spec.name == "sgd":
        return torch.optim.SGD(parameters, lr=spec.learning_rate, momentum=spec.beta1, weight_decay=spec.weight_decay)
    kind = torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam
    return kind(parameters, lr=spec.learning_rate, betas=(spec.beta1, spec.beta2), weight_decay=spec.weight_decay)
