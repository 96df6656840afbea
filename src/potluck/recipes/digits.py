"""A small classifier on scikit-learn's handwritten digits: trains in seconds, for a first try."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from potluck.errors import ConfigurationError
from potluck.recipes.recipe import Batch, Recipe, RecipeConfig, Sample

PIXELS, CLASSES = 64, 10
EVALUATION_SHARE = 6  # one image in so many is never trained on
BRIGHTEST = 16.0


class Config(RecipeConfig, frozen=True, kw_only=True):
    """The size of the model."""

    width: int = 64

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigurationError(f"width={self.width}: it must be positive")


class Digits(Recipe[Config]):
    """Tells which digit a picture of 8 × 8 shows."""

    Config = Config
    is_light = True
    num_shards = 32

    def model(self) -> nn.Module:
        """Two layers."""
        width = self.config.width
        return nn.Sequential(nn.Linear(PIXELS, width), nn.ReLU(), nn.Linear(width, CLASSES))

    def samples(self, shard: int, generator: torch.Generator) -> Iterator[Sample]:
        """Pictures and labels, shuffled."""
        pictures, labels = self._training
        own = torch.arange(shard, len(labels), self.num_shards)
        for index in own[torch.randperm(len(own), generator=generator)].tolist():
            yield pictures[index], labels[index]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy, in nats."""
        pictures, labels = batch
        return functional.cross_entropy(model(pictures), labels)

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Loss and accuracy on pictures that nobody trains on."""
        return self.evaluate_part(model, 0, 1)[0]

    def evaluate_part(self, model: nn.Module, part: int, num_parts: int) -> tuple[Mapping[str, float], int]:
        """The same, on every so many-th picture."""
        device = next(model.parameters()).device
        pictures, labels = (each[part::num_parts].to(device) for each in self._evaluation)
        if not len(labels):
            return {}, 0
        logits = model(pictures)
        figures = {
            "evaluation_loss": functional.cross_entropy(logits, labels).item(),
            "accuracy": (logits.argmax(1) == labels).float().mean().item(),
        }
        return figures, len(labels)

    def preview(self, model: nn.Module) -> str:
        """The first pictures that nobody trains on: what they show, and what the model sees."""
        device = next(model.parameters()).device
        pictures, labels = self._evaluation
        seen = model(pictures[:20].to(device)).argmax(1).tolist()
        return f"shown {' '.join(map(str, labels[:20].tolist()))}\nseen  {' '.join(map(str, seen))}"

    @cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ConfigurationError(
                "the recipe digits needs scikit-learn: pip install scikit-learn, or take stdlib-lm, which needs nothing"
            ) from error
        pictures, labels = load_digits(return_X_y=True)
        return torch.tensor(pictures, dtype=torch.float32) / BRIGHTEST, torch.tensor(labels, dtype=torch.long)

    @cached_property
    def _training(self) -> tuple[Tensor, Tensor]:
        pictures, labels = self._all
        chosen = torch.arange(len(labels)) % EVALUATION_SHARE != 0
        return pictures[chosen], labels[chosen]

    @cached_property
    def _evaluation(self) -> tuple[Tensor, Tensor]:
        pictures, labels = self._all
        return pictures[::EVALUATION_SHARE], labels[::EVALUATION_SHARE]
