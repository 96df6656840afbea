"""From features to paths: k-means, or a classifier that was taught by losses.

*k-means* (generative): as many clusters as paths, started by k-means++ with a seed, the best of several starts; a
cluster that runs empty begins anew at the point that is furthest from its centre.

*Discriminative*: each held-out document is labelled with the path that has the least loss on it, and a logistic
regression learns the labels from the same features. What it keeps are the weights that were best on a part of the
documents that it did not see.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from potluck.errors import ConfigurationError

ITERATIONS = 50
STARTS = 8
EPOCHS = 200
RATE = 1e-2
DECAY = 1e-4
VALIDATION_SHARE = 5  # one in so many is not learned from


@dataclass(frozen=True)
class Router:
    """Scores of paths, linear in the features: the largest wins."""

    weight: Tensor  # paths × features
    bias: Tensor

    def route(self, features: Tensor) -> Tensor:
        """The path of each."""
        return (features @ self.weight.T + self.bias).argmax(dim=1)

    @property
    def num_paths(self) -> int:
        """How many it tells apart."""
        return len(self.bias)


def fit_kmeans(features: Tensor, num_paths: int, seed: int = 0) -> Router:
    """Clusters of the features. ConfigurationError where there are fewer documents than paths."""
    if len(features) < num_paths:
        raise ConfigurationError(
            f"{len(features)} documents cannot fill {num_paths} paths: take fewer levels, or more documents"
        )
    generator = torch.Generator().manual_seed(seed)
    best: tuple[float, Tensor] | None = None
    for _ in range(STARTS if num_paths > 1 else 1):
        centres = _lloyd(features, _spread(features, num_paths, generator))
        inertia = float((features - centres[_nearest(features, centres)]).square().sum())
        if best is None or inertia < best[0]:
            best = (inertia, centres)
    assert best is not None
    centres = _in_order(best[1])
    return Router(weight=centres, bias=-0.5 * centres.square().sum(dim=1))


def fit_discriminative(features: Tensor, losses: Tensor, seed: int = 0) -> Router:
    """A classifier of documents by the path that has the least loss on them; `losses` is documents × paths."""
    if features.shape[0] != losses.shape[0]:
        raise ConfigurationError(f"{features.shape[0]} documents have features, and {losses.shape[0]} have losses")
    labels, num_paths = losses.argmin(dim=1), losses.shape[1]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    held_out = order[: len(order) // VALIDATION_SHARE]
    learned = order[len(order) // VALIDATION_SHARE :]
    weight = torch.zeros(num_paths, features.shape[1], requires_grad=True)
    bias = torch.zeros(num_paths, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], lr=RATE, weight_decay=DECAY)
    kept, least = (weight.detach().clone(), bias.detach().clone()), float("inf")
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = functional.cross_entropy(features[learned] @ weight.T + bias, labels[learned])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            judged = held_out if len(held_out) else learned
            found = float(functional.cross_entropy(features[judged] @ weight.T + bias, labels[judged]))
        if found < least:
            kept, least = (weight.detach().clone(), bias.detach().clone()), found
    return Router(weight=kept[0], bias=kept[1])


def purity(assigned: Tensor, truth: Tensor) -> float:
    """The share of documents that are where most of their path's documents are from."""
    most = sum(int(torch.bincount(truth[assigned == path]).max()) for path in sorted(set(assigned.tolist())))
    return most / len(truth)


def _spread(features: Tensor, num_paths: int, generator: torch.Generator) -> Tensor:
    """k-means++: each next centre is drawn by its squared distance from those before."""
    first = int(torch.randint(len(features), (1,), generator=generator))
    centres = [features[first]]
    distances = (features - centres[0]).square().sum(dim=1)
    while len(centres) < num_paths:
        odds = distances.clamp_min(0.0)
        if not float(odds.sum()) > 0:  # all documents look the same
            odds = torch.ones_like(odds)
        chosen = features[int(torch.multinomial(odds, 1, generator=generator))]
        centres.append(chosen)
        distances = torch.minimum(distances, (features - chosen).square().sum(dim=1))
    return torch.stack(centres)


def _nearest(features: Tensor, centres: Tensor) -> Tensor:
    return (features @ centres.T - 0.5 * centres.square().sum(dim=1)).argmax(dim=1)


def _lloyd(features: Tensor, centres: Tensor) -> Tensor:
    centres = centres.clone()
    assigned = None
    for _ in range(ITERATIONS):
        nearest = _nearest(features, centres)
        if assigned is not None and torch.equal(nearest, assigned):
            break
        assigned = nearest
        counts = torch.bincount(assigned, minlength=len(centres)).float()
        sums = torch.zeros_like(centres).index_add_(0, assigned, features)
        distances = (features - centres[assigned]).square().sum(dim=1)
        centres = torch.where(counts[:, None] > 0, sums / counts.clamp_min(1.0)[:, None], centres)
        for empty in (counts == 0).nonzero().flatten().tolist():
            furthest = int(distances.argmax())
            centres[empty], distances[furthest] = features[furthest], -1.0
    return centres


def _in_order(centres: Tensor) -> Tensor:
    """Neighbours stand side by side, so that like clusters share modules of the first level."""
    left, order = set(range(1, len(centres))), [0]
    while left:
        last = centres[order[-1]]
        order.append(min(left, key=lambda n: float((centres[n] - last).square().sum())))
        left.remove(order[-1])
    return centres[order]
