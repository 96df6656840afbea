"""What paths are worth: losses per path, of the mixture that the router makes, and re-routed on the way.

The tokens that a document is routed by are not scored, by anybody. Re-routing: the path for a window of W tokens is
chosen by the window before it; the first goes by the document's own beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from potluck.paths.grid import Path
from potluck.paths.pathfeed import ROWS, TokenLosses, document_losses, mean_loss
from potluck.paths.pathmodel import PathModel


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Mean losses per token."""

    by_path: dict[Path, float]
    """Of each path, on the validation documents that are its own."""

    documents: dict[Path, int]
    tokens: int
    """That were scored in all."""

    mixture: float
    """Each document by the path that the router sends it to."""

    rerouted: float | None = None
    dense: float | None = None
    """A model of the same inference cost, on the same tokens."""


def evaluate(
    model: PathModel,
    documents: Sequence[Tensor],
    assigned: Sequence[int],
    token_losses: TokenLosses,
    *,
    window: int,
    reroute_every: int = 0,
    dense: nn.Module | None = None,
) -> Evaluation:
    """Score documents that nobody has trained on; `assigned` are the numbers of their paths."""
    by_path, counts_by_path = {}, {}
    total, scored = 0.0, 0
    for number, path in enumerate(model.grid.paths):
        own = [document for document, to in zip(documents, assigned, strict=True) if to == number]
        if not own:
            continue
        sums, counts = document_losses(model.path(path), own, token_losses, window=window, prefix=model.prefix)
        by_path[path], counts_by_path[path] = mean_loss(sums, counts), len(own)
        total, scored = total + float(sums.sum()), scored + int(counts.sum())
    found_dense = None
    if dense is not None:
        found_dense = mean_loss(*document_losses(dense, documents, token_losses, window=window, prefix=model.prefix))
    return Evaluation(
        by_path=by_path,
        documents=counts_by_path,
        tokens=scored,
        mixture=total / scored if scored else float("nan"),
        rerouted=_rerouted(model, documents, token_losses, window, reroute_every) if reroute_every else None,
        dense=found_dense,
    )


@torch.no_grad()
def _rerouted(
    model: PathModel, documents: Sequence[Tensor], token_losses: TokenLosses, window: int, every: int
) -> float:
    prefix = model.prefix
    every = max(every, prefix)  # a window is routed by `prefix` tokens of the one before
    total, scored = 0.0, 0
    for start in range(0, len(documents), ROWS):
        for document in documents[start : start + ROWS]:
            row = document[: window + 1].long()
            path = model.route(row)
            at = prefix
            while at < len(row):
                end = min(at + every, len(row))
                costs = token_losses(model.path(path), row[None, :end])[0]
                total += float(costs[at - 1 : end - 1].sum())
                scored += end - at
                path = model.route(row[end - prefix : end])
                at = end
    return total / scored if scored else float("nan")
