"""What a router sees of a document: its first tokens, as a vector.

A hashed bag: each token and each pair of neighbours adds 1 to one of `size` places; the counts' square roots, with
length 1. It needs no model, comes out the same on every machine, and takes microseconds. Other features, as the mean
hidden state of a small model, are a function of the same shape (`Features`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from potluck.errors import ConfigurationError

SIZE = 1024
_FIRST, _SECOND, _PAIRS = 2654435761, 40503, 97

Features = Callable[[Tensor], Tensor]
"""Vectors of documents' first tokens: (documents, prefix) → (documents, size)."""


def bag_of_tokens(prefixes: Tensor, size: int = SIZE) -> Tensor:
    """Hashed bags of tokens and of pairs."""
    tokens = prefixes.long()
    single = (tokens * _FIRST) % 1_000_003 % size
    pairs = ((tokens[:, :-1] * _SECOND + tokens[:, 1:] * _PAIRS + 1) * _FIRST) % 1_000_003 % size
    counts = torch.zeros(len(tokens), size)
    counts.scatter_add_(1, single, torch.ones_like(single, dtype=torch.float32))
    counts.scatter_add_(1, pairs, torch.ones_like(pairs, dtype=torch.float32))
    roots = counts.sqrt_()
    return roots.div_(roots.norm(dim=1, keepdim=True).clamp_min(1e-12))


def prefixes_of(documents: Sequence[Tensor], prefix: int) -> Tensor:
    """The first tokens of each document; ConfigurationError where one is too short to be routed and scored."""
    short = [number for number, document in enumerate(documents) if len(document) <= prefix]
    if short:
        shortest = min(len(documents[number]) for number in short)
        raise ConfigurationError(
            f"{len(short)} of {len(documents)} documents have no more than the {prefix} tokens that they are routed by "
            f"(document {short[0]} for one; the shortest has {shortest}): take a smaller route_prefix, or have the "
            "recipe leave such documents out"
        )
    if not documents:
        raise ConfigurationError("the recipe has no documents: there is nothing to route")
    return torch.stack([document[:prefix].long() for document in documents])
