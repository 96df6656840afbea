"""From a manifest to optimizers: torch's inside, ours around it, and the learning rate of an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from potluck.optim import compiler
from potluck.optim.diloco import DiLoCo
from potluck.optim.method import Hyperparameters
from potluck.optim.methods.decoupled import Demo
from potluck.optim.methods.delayed import DelayedNesterov
from potluck.optim.methods.outer import Nesterov, OuterOptimizer, OuterSGD
from potluck.optim.methods.powersgd import PowerSGD
from potluck.optim.methods.quantised import Quantised
from potluck.optim.methods.quorum import AdaptiveGrace, AdaptiveQuorum
from potluck.optim.methods.sparseloco import SparseLoCo
from potluck.optim.methods.transform import Transform
from potluck.optim.optimizer import Optimizer
from potluck.optim.parameters import buffers_of
from potluck.optim.sharedoptimizer import SharedOptimizer
from potluck.round.audit.auditcore import AuditConfig
from potluck.round.codecs import CodecChoice, CodecSpec
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.round.coordinator.gathering import LEAST_ROUND_SECONDS, GatherConfig
from potluck.round.coordinator.trigger import Quorum
from potluck.run.joined import Joined
from potluck.state.config import StateConfig
from potluck.training.manifest import manifest as manifests
from potluck.training.manifest.manifest import Manifest, ScheduleSpec, Settings
from potluck.training.trainer.inneroptimizer import inner_optimizer


def make_optimizer(
    run: Joined, model: nn.Module, newest: Callable[[], Manifest], state: StateConfig | None = None
) -> SharedOptimizer:
    """The optimizer that the manifest asks for, around the model, with the run's state as soon as there is one.

    `newest` returns the newest manifest; `state` says whether this peer keeps states for others, and writes backups.
    """
    manifest = newest()
    compiler.postpone()
    inner = inner_optimizer(manifest.settings[0].optimizer, model)
    options = {**options_of(manifest), "state": state or StateConfig()}
    kind = Optimizer if isinstance(manifest.settings[0].training, manifests.SyncSettings) else DiLoCo
    return kind(run, inner, extra_tensors=buffers_of(model), **parts_of(newest, inner), **options)


def parts_of(newest: Callable[[], Manifest], inner: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer of the run takes beside its options; new ones each time, since they have a memory."""
    manifest = newest()
    parts: dict[str, Any] = {"transform": transform_of(manifest), "hyperparameters": following(inner, newest)}
    if isinstance(manifest.settings[0].training, manifests.DiLoCoSettings):
        parts["outer"] = outer_of(manifest)
    return parts


def options_of(manifest: Manifest) -> dict[str, Any]:
    """What a manifest says about the options of OptimizerConfig, or of DiLoCoConfig."""
    settings = manifest.settings[0]  # what may change is set before each step
    training = settings.training
    for_all = {
        "max_grad_norm": settings.optimizer.max_grad_norm or None,
        "codecs": codecs_of(manifest),
        "offload_optimizer": training.offload_optimizer,
        "gather": gathering(manifest),
        "load_state_timeout_seconds": manifest.patience.load_seconds,
    }
    if manifest.patience.round_seconds:
        for_all["averaging_timeout_seconds"] = manifest.patience.round_seconds
    if isinstance(training, manifests.SyncSettings):
        return {
            **for_all,
            "target_batch_size": training.target_batch_size,
            "matchmaking_seconds": training.matchmaking_seconds,
            "delay_grad_averaging": training.delay_averaging and not training.local_updates,
            "delay_state_averaging": training.delay_averaging and training.local_updates,
            "delay_optimizer_step": training.delay_optimizer_step,
            "use_local_updates": training.local_updates,
            "average_state_every": training.average_state_every,
            "average_opt_statistics": training.statistics,
            "reuse_grad_buffers": training.reuse_grad_buffers,
        }
    return {
        **for_all,
        "inner_steps": training.inner_steps,
        "steps_by_speed": training.steps_by_speed,
        "num_fragments": training.num_fragments,
        "overlap_steps": training.overlap_steps,
        "mixing": training.mixing,
        "keep_overlap_work": training.keep_overlap_work,
        "asynchronous": training.asynchronous,
        "weighting": training.weighting,
        "min_peers": training.min_peers,
        "grace_seconds": training.grace_seconds,
    }


def outer_of(manifest: Manifest) -> OuterOptimizer:
    """The outer optimizer of a run with DiLoCo."""
    training = manifest.settings[0].training
    assert isinstance(training, manifests.DiLoCoSettings), "it has one"
    if training.outer == "sgd":
        return OuterSGD(training.outer_learning_rate)
    if training.outer == "delayed_nesterov":
        return DelayedNesterov(training.outer_learning_rate, training.outer_momentum, delay=training.outer_delay)
    return Nesterov(training.outer_learning_rate, training.outer_momentum)


def codecs_of(manifest: Manifest) -> CodecChoice:
    """How changes or gradients travel; tensors of up to 4,096 values as they are."""
    exchange = manifest.exchange
    rules = CodecChoice.by_role({"gradient": exchange.codec}).rules
    codec = CodecSpec(name=exchange.codec, block=exchange.codec_block)
    return CodecChoice(rules=tuple(replace(rule, codec=codec) if rule.role == "gradient" else rule for rule in rules))


def transform_of(manifest: Manifest) -> Transform | None:
    """What is done to values before they travel, and after; a new one each time, since it has a memory."""
    exchange = manifest.exchange
    given = {"k": exchange.keep or None, "decay": exchange.memory_decay}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    match exchange.compression:
        case "none":
            return None
        case "error_feedback":
            return Quantised(codecs_of(manifest))
        case "sparseloco":
            return SparseLoCo(**chosen)
        case "demo":
            return Demo(lr=1.0, **chosen)
        case "powersgd":
            return PowerSGD(exchange.rank)


def gathering(manifest: Manifest) -> GatherConfig:
    """How rounds of this run are planned, by any coordinator."""
    training = manifest.newest.training
    batch = training.target_batch_size if isinstance(training, manifests.SyncSettings) else 0
    return GatherConfig(
        aggregator=manifest.exchange.aggregating(),
        trusted_reducers=manifest.exchange.reducers == "trusted",
        weight_cap=manifest.exchange.weight_cap or None,
        batch_weight=float(batch),
        least_bytes_per_second=manifest.patience.slowest_line,
        least_round_seconds=min(LEAST_ROUND_SECONDS, 60.0 * manifest.patience.most_round_minutes),
        most_round_seconds=60.0 * manifest.patience.most_round_minutes,
        audit=AuditConfig(chunks_per_reducer=manifest.exchange.audit_chunks),
    )


def coordinating(manifest: Manifest) -> CoordinatorConfig:
    """How rounds of this run are started and planned by a coordinator that trains nothing itself."""
    training = manifest.newest.training
    gather = gathering(manifest)
    if isinstance(training, manifests.SyncSettings):
        return CoordinatorConfig(gather=gather, trigger=Quorum(grace_seconds=training.matchmaking_seconds))
    if training.asynchronous:
        return CoordinatorConfig(gather=gather, trigger=Quorum(grace_seconds=0.0))
    grace = AdaptiveGrace(least_seconds=min(0.5, training.grace_seconds), most_seconds=training.grace_seconds)
    return CoordinatorConfig(gather=gather, trigger=AdaptiveQuorum(min_senders=training.min_peers, grace=grace))


def follow(optimizer: SharedOptimizer, settings: Settings) -> None:
    """Set what may change while a run trains, before a step of this peer's own."""
    _set_groups(optimizer.param_groups, settings, optimizer.epoch)
    if isinstance(settings.training, manifests.SyncSettings) and isinstance(optimizer, Optimizer):
        optimizer.target_batch_size = settings.training.target_batch_size


def following(inner: torch.optim.Optimizer, newest: Callable[[], Manifest]) -> Hyperparameters:
    """What sets the optimizer's numbers for each step of the run, be it one that a newcomer repeats."""
    return lambda epoch: _set_groups(inner.param_groups, newest().at(epoch), epoch)


def _set_groups(groups: list[dict[str, Any]], settings: Settings, epoch: int) -> None:
    """All of it depends on the epoch alone, so that all peers have the same."""
    rate = learning_rate(settings, epoch)
    for group in groups:
        group["lr"] = rate * group.get("rate", 1.0)
        group["weight_decay"] = settings.optimizer.weight_decay if group.get("decays", True) else 0.0
        if "betas" in group:
            group["betas"] = (settings.optimizer.beta1, settings.optimizer.beta2)
        if "momentum" in group:
            group["momentum"] = settings.optimizer.beta1


def learning_rate(settings: Settings, epoch: int) -> float:
    """Of the step that makes the epoch after `epoch`."""
    return settings.optimizer.learning_rate * _share(settings.schedule, epoch)


def _share(schedule: ScheduleSpec, epoch: int) -> float:
    if epoch < schedule.warmup_epochs:
        risen = (epoch + 1) / (schedule.warmup_epochs + 1)
        return schedule.first_share + (1.0 - schedule.first_share) * risen
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "inverse_sqrt":
        return math.sqrt((schedule.warmup_epochs + 1) / (epoch + 1))
    is_stable = schedule.kind == "warmup_stable_decay"
    length = schedule.decay_epochs if is_stable else schedule.total_epochs - schedule.warmup_epochs
    passed = min(1.0, max(0.0, (epoch - (schedule.total_epochs - length)) / length))
    remaining = (1.0 + math.cos(math.pi * passed)) / 2 if schedule.kind == "cosine" else 1.0 - passed
    return schedule.final_share + (1.0 - schedule.final_share) * remaining
