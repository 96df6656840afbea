"""Documents in made-up languages, for what has to tell texts apart (paths/)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_WORDS = 24
NUM_SUCCESSORS = 3


def languages(
    num_documents: int, num_languages: int = 4, *, seed: int = 0, length: int = 17
) -> tuple[list[Tensor], Tensor]:
    """Documents, and the language of each. All languages have the same words; which may follow which differs."""
    tables = torch.Generator().manual_seed(1234)
    grammar = torch.stack(
        [
            torch.stack([torch.randperm(NUM_WORDS, generator=tables)[:NUM_SUCCESSORS] for _ in range(NUM_WORDS)])
            for _ in range(num_languages)
        ]
    )
    generator = torch.Generator().manual_seed(seed)
    truth = torch.arange(num_documents) % num_languages
    tokens = torch.randint(NUM_WORDS, (num_documents, length), generator=generator)
    choices = torch.randint(NUM_SUCCESSORS, (num_documents, length), generator=generator)
    for place in range(1, length):
        tokens[:, place] = grammar[truth, tokens[:, place - 1], choices[:, place]]
    return list(tokens), truth


class WordModel(nn.Module):
    """Guesses the next word from the one before, through some layers."""

    def __init__(self, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, NUM_WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.words(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits: Tensor = self.head(x)
        return logits


def word_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """What each word but the first costs, in nats."""
    logits = model(tokens[:, :-1])
    flat = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return flat.view(tokens.shape[0], -1)
