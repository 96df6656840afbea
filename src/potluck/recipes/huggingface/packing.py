"""From documents, which are lists of tokens, to blocks of tokens (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

IGNORED = -100  # what a loss passes over, in torch and in transformers


def packed(documents: Iterable[list[int]], end: int, length: int) -> Iterator[Tensor]:
    """Full blocks, documents one after the other with an end between them; what fills no block is left out."""
    waiting: list[int] = []
    for document in documents:
        waiting += document
        waiting.append(end)
        while len(waiting) >= length:
            yield torch.tensor(waiting[:length], dtype=torch.int32)
            del waiting[:length]


def one_by_one(documents: Iterable[list[int]], end: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A block for each document, cut or filled up; and what of it counts."""
    for document in documents:
        tokens = [*document[: length - 1], end]
        if len(tokens) > 1:
            filled = torch.full((length,), end, dtype=torch.int32)
            filled[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            counts = torch.zeros(length, dtype=torch.bool)
            counts[: len(tokens)] = True
            yield filled, counts
