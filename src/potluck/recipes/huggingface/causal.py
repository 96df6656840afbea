"""hf-causal-lm: any decoder of transformers, on any text, guesses the next token."""

from __future__ import annotations

import torch
from torch import nn

from potluck.recipes.huggingface.languagemodel import PREVIEW_TOKENS, LanguageModel
from potluck.recipes.huggingface.packing import IGNORED
from potluck.recipes.recipe import Sample


class CausalLM(LanguageModel):
    """Guesses the next token."""

    auto_class = "AutoModelForCausalLM"

    def masked(self, block: Sample, generator: torch.Generator) -> Sample:
        """Every token is guessed from those before it; what only fills up a block is not."""
        if len(block) == 1:
            return block
        tokens, counts = block
        return tokens, torch.where(counts, tokens, IGNORED)

    def preview(self, model: nn.Module) -> str:
        """How the model goes on from the beginning of a text that nobody trains on."""
        device = next(model.parameters()).device
        prompt = self._held_out[0][0][:8].long().unsqueeze(0).to(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            tokens = model.generate(  # type: ignore[operator]
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=PREVIEW_TOKENS, do_sample=True, top_k=50
            )
        text: str = self.tokenizer.decode(tokens[0])
        return text
