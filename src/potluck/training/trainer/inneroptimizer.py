"""The torch optimizer that a manifest asks for, with its parameters in groups: which decay, which Muon turns.

A group says by `decays` and `rate` how it follows the run's weight decay and learning rate (optimizers.follow).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from potluck.optim.lamb import Lamb
from potluck.training.manifest.method import OptimizerSpec
from potluck.training.trainer.larc import Larc
from potluck.training.trainer.muon import Muon

KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "lamb": Lamb,
    "larc": Larc,
    "muon": Muon,
}
# Tensors of a parameter's size that come with it once it trains: the gradients so far, and the optimizer's statistics.
STATE_TENSORS = {"adam": 3, "adamw": 3, "sgd": 2, "lamb": 3, "larc": 2, "muon": 3}


def inner_optimizer(spec: OptimizerSpec, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over a model's parameters, by the model's own names: a checkpoint says what is in it."""
    return optimizer_of(spec, dict(model.named_parameters()), _embedding_shapes(model))


def optimizer_of(
    spec: OptimizerSpec, named: Mapping[str, torch.Tensor], embeddings: frozenset[tuple[int, ...]] = frozenset()
) -> torch.optim.Optimizer:
    """The same over parameters that have no model around them."""
    groups = parameter_groups(spec, named, embeddings)
    options: dict[str, Any] = {"lr": spec.learning_rate, "weight_decay": spec.weight_decay}
    if spec.name in ("sgd", "larc", "muon"):
        options["momentum"] = spec.beta1
    if spec.name not in ("sgd", "larc"):
        options["betas"] = (spec.beta1, spec.beta2)
        if spec.eps and spec.name != "muon":
            options["eps"] = spec.eps
    if spec.name == "lamb":
        options["clamp"] = spec.clamp
    if spec.name == "larc":
        options |= {"trust": spec.trust, "clips": spec.trust_clips}
    return KINDS[spec.name](groups, **options)


def parameter_groups(
    spec: OptimizerSpec, named: Mapping[str, torch.Tensor], embeddings: frozenset[tuple[int, ...]] = frozenset()
) -> list[dict[str, Any]]:
    """Parameters that are treated alike, together. One group unless norms and biases, or matrices, are apart."""
    kinds: dict[tuple[bool, bool], dict[str, Any]] = {}
    for name, parameter in named.items():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.dim() >= 2
        is_turned = spec.name == "muon" and is_matrix and tuple(parameter.shape) not in embeddings
        decays = spec.decay_vectors or is_matrix
        group = kinds.setdefault((is_turned, decays), {"params": [], "param_names": [], "decays": decays, "rate": 1.0})
        if spec.name == "muon":
            group["orthogonal"] = is_turned
            group["rate"] = 1.0 if is_turned else spec.vector_rate
        group["params"].append(parameter)
        group["param_names"].append(name)
    return list(kinds.values())


def _embedding_shapes(model: nn.Module) -> frozenset[tuple[int, ...]]:
    """Of embeddings, and so of an output layer over the same vocabulary."""
    return frozenset(tuple(module.weight.shape) for module in model.modules() if isinstance(module, nn.Embedding))
