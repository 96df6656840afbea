"""hf-albert: guesses masked tokens, and whether two segments of a text are in their order (as ALBERT does)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from potluck.recipes.huggingface import tokenizing
from potluck.recipes.huggingface.languagemodel import EVALUATION_BATCH
from potluck.recipes.huggingface.masked import MaskedLM
from potluck.recipes.huggingface.packing import IGNORED
from potluck.recipes.huggingface.sentenceorder import pairs, split_sentences
from potluck.recipes.huggingface.tokenfiles import Document
from potluck.recipes.recipe import Batch, Sample


class Albert(MaskedLM):
    """Both tasks of ALBERT, with any architecture that has both heads."""

    auto_class = "AutoModelForPreTraining"

    def sentences_of(self, text: str) -> list[str]:
        """Segments are made of whole sentences."""
        return split_sentences(text)

    def blocks_of(self, documents: Iterator[Document], generator: torch.Generator) -> Iterator[Sample]:
        """Pairs of segments."""
        return pairs(
            documents,
            start=tokenizing.start_of(self.tokenizer),
            between=tokenizing.end_of(self.tokenizer),
            pad=int(self.tokenizer.pad_token_id),
            length=self.length,
            generator=generator,
        )

    def masked(self, block: Sample, generator: torch.Generator) -> Sample:
        """The pair with some of its tokens masked, and what they were."""
        tokens, is_text, *rest = block
        return (*super().masked((tokens, is_text), generator), *rest)

    def _losses(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        tokens, targets, segments, is_there, order = batch
        found = model(input_ids=tokens.long(), token_type_ids=segments.long(), attention_mask=is_there)
        logits, order_logits = found.prediction_logits, found.sop_logits
        guessed = functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), targets.long().reshape(-1), ignore_index=IGNORED
        )
        is_right = (order_logits.argmax(-1) == order).float().mean()
        return guessed, functional.cross_entropy(order_logits, order.long()), is_right

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Of both tasks, added up."""
        guessed, ordered, _ = self._losses(model, batch)
        return guessed + ordered

    def evaluate_part(self, model: nn.Module, part: int, num_parts: int) -> tuple[Mapping[str, float], int]:
        """Both losses on texts that nobody trains on, and the share of pairs whose order is told right."""
        device, samples = next(model.parameters()).device, self._held_out[part::num_parts]
        if not samples:
            return {}, 0
        sums = torch.zeros(3)
        for start in range(0, len(samples), EVALUATION_BATCH):
            some = samples[start : start + EVALUATION_BATCH]
            batch = tuple(tensor.to(device) for tensor in self.collate(some))
            sums += torch.stack(self._losses(model, batch)).cpu() * len(some)
        guessed, ordered, right = (sums / len(samples)).tolist()
        return {"evaluation_loss": guessed + ordered, "masked_loss": guessed, "order_right": right}, len(samples)

    def preview(self, model: nn.Module) -> str:
        """Masked tokens of a text that nobody trains on, and what the model guesses."""
        device = next(model.parameters()).device
        tokens, targets, segments, is_there, _ = (part.unsqueeze(0).to(device) for part in self._held_out[0])
        found = model(input_ids=tokens.long(), token_type_ids=segments.long(), attention_mask=is_there)
        return self.guesses(targets[0], found.prediction_logits[0].argmax(-1))
