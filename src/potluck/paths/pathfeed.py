"""Batches of a path's documents, and scores of whole documents."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from potluck.errors import ConfigurationError
from potluck.paths.sharding import Shards

TokenLosses = Callable[[nn.Module, Tensor], Tensor]
"""Of a model and a batch of token rows, what each token but the first costs: (rows, length) → (rows, length − 1)."""

EVALUATED_DOCUMENTS = 32
ROWS = 16  # documents that are scored at once


class PathFeed:
    """Windows of a path's documents, in an order that depends on path, phase and lease alone."""

    def __init__(self, documents: Sequence[Tensor], shards: Shards, window: int, seed: int = 0) -> None:
        """`window` tokens are learned at once."""
        self._documents = documents
        self._shards = shards
        self._window = window
        self._seed = seed

    def batches(self, path: int, phase: int, batch_size: int, salt: int = 0) -> Iterator[Tensor]:
        """Batches without end: documents are shuffled, put together and cut, pass after pass."""
        numbers = self._shards.training[path]
        seed = zlib.crc32(b"%d %d %d %d" % (self._seed, path, phase, salt))
        generator = torch.Generator().manual_seed(seed)
        length = self._window + 1
        rows: list[Tensor] = []
        rest = torch.empty(0, dtype=torch.long)
        while True:
            had = len(rows)
            for place in torch.randperm(len(numbers), generator=generator).tolist():
                document = self._documents[numbers[place]].long()
                rest = torch.cat([rest, document]) if len(rest) else document
                while len(rest) >= length:
                    rows.append(rest[:length])
                    rest = rest[length:]
                    if len(rows) == batch_size:
                        yield torch.stack(rows)
                        rows, had = [], -1
            if not len(numbers) or (had == len(rows) and not len(rest)):
                raise ConfigurationError(f"path number {path} has nothing to train on")

    def held_out(self, path: int, most: int = EVALUATED_DOCUMENTS) -> list[Tensor]:
        """Documents of a path that are for validation."""
        return [self._documents[number] for number in self._shards.validation[path][:most]]


@torch.no_grad()
def document_losses(
    model: nn.Module, documents: Sequence[Tensor], token_losses: TokenLosses, *, window: int, prefix: int
) -> tuple[Tensor, Tensor]:
    """For each document the sum of what its tokens cost, and how many were scored: not those that it is routed by."""
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    sums, counts = [], []
    for start in range(0, len(documents), ROWS):
        rows = [document[: window + 1].long() for document in documents[start : start + ROWS]]
        longest = max(len(row) for row in rows)
        batch = torch.stack([nn.functional.pad(row, (0, longest - len(row))) for row in rows]).to(device)
        losses = token_losses(model, batch).float().cpu()
        places = torch.arange(1, longest)
        lengths = torch.tensor([len(row) for row in rows])
        scored = (places[None] >= prefix) & (places[None] < lengths[:, None])
        sums.append((losses * scored).sum(dim=1).double())
        counts.append(scored.sum(dim=1))
    model.train(was_training)
    if not sums:
        return torch.zeros(0, dtype=torch.double), torch.zeros(0, dtype=torch.long)
    return torch.cat(sums), torch.cat(counts)


def mean_loss(sums: Tensor, counts: Tensor) -> float:
    """Per token."""
    return float(sums.sum() / counts.sum()) if int(counts.sum()) else float("nan")
