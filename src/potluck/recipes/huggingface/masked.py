"""hf-masked-lm: any encoder of transformers, on any text, guesses tokens that were masked (as BERT does)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from potluck.errors import ConfigurationError
from potluck.recipes.huggingface.languagemodel import LanguageModel
from potluck.recipes.huggingface.packing import IGNORED
from potluck.recipes.recipe import Sample

GUESSED = 0.15  # of all tokens,
MASKED, SWAPPED = 0.8, 0.1  # of which so many are masked, so many another token, and the rest as they are


class MaskedLM(LanguageModel):
    """Guesses what was masked."""

    auto_class = "AutoModelForMaskedLM"

    def masked(self, block: Sample, generator: torch.Generator) -> Sample:
        """The tokens with some of them masked, and what they were."""
        mask = self.tokenizer.mask_token_id
        if mask is None:
            raise ConfigurationError(
                f"tokenizer={self.config.tokenizer!r} has no token that masks others: take another"
            )
        tokens = block[0]
        counts = block[1] if len(block) > 1 else torch.ones_like(tokens, dtype=torch.bool)
        guessed = (torch.rand(tokens.shape, generator=generator) < GUESSED) & counts
        fate = torch.rand(tokens.shape, generator=generator)
        others = torch.randint(len(self.tokenizer), tokens.shape, generator=generator, dtype=tokens.dtype)
        shown = torch.where(guessed & (fate < MASKED), torch.tensor(mask, dtype=tokens.dtype), tokens)
        shown = torch.where(guessed & (fate >= MASKED) & (fate < MASKED + SWAPPED), others, shown)
        return shown, torch.where(guessed, tokens, IGNORED)

    def preview(self, model: nn.Module) -> str:
        """A text that nobody trains on, and what the model makes of it where tokens are masked."""
        device = next(model.parameters()).device
        shown, was = (part.to(device) for part in self._held_out[0])
        return self.guesses(was, model(input_ids=shown.long().unsqueeze(0)).logits[0].argmax(-1))

    def guesses(self, was: Tensor, guesses: Tensor) -> str:
        """What stood in masked places, and what was guessed."""
        places = (was != IGNORED).nonzero().flatten()[:12].tolist()
        pairs = [(self.tokenizer.decode([int(was[p])]), self.tokenizer.decode([int(guesses[p])])) for p in places]
        return "\n".join(f"was {a!r}, guessed {b!r}" for a, b in pairs)
