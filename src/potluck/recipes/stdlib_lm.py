"""A byte-level language model on the source of Python's own standard library.

Real data that lies on every machine which can run this: nothing to download, and a loss that falls for hours.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from potluck.errors import ConfigurationError
from potluck.pipeline.blocks import Layer
from potluck.recipes.recipe import Batch, Recipe, RecipeConfig, Sample

NUM_BYTES = 256
LEFT_OUT = ("test", "tests", "idlelib", "site-packages", "lib2to3", "__pycache__")
EVALUATION_SHARE = 20  # one file in so many is never trained on
EVALUATION_WINDOWS = 64
SMALLEST_DOCUMENT = 256  # bytes
PROMPT = b"def "
PREVIEW_BYTES = 160
PREVIEW_TEMPERATURE = 0.7


class Config(RecipeConfig, frozen=True, kw_only=True):
    """The size of the model."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.context) < 1 or self.width % self.heads:
            raise ConfigurationError(
                f"layers={self.layers}, width={self.width}, heads={self.heads}, context={self.context}: all must be "
                "positive, and the width a multiple of the heads"
            )


class Data(RecipeConfig, frozen=True, kw_only=True):
    """How much the model sees at once: a run learns faster from short pieces first."""

    context: int = 0  # bytes; 0: as many as the model can


class StdlibLM(Recipe[Config]):
    """Guesses the next byte of Python source."""

    Config = Config
    is_light = True
    Data = Data
    num_shards = 64

    def model(self) -> nn.Module:
        """A small decoder-only transformer."""
        return Transformer(self.config)

    def blocks(self) -> Iterator[nn.Module]:
        """One block per layer, between the embeddings and the loss; each is made by itself."""
        yield Embeddings(self.config)
        for _ in range(self.config.layers):
            yield Layer(with_small_values(Block(self.config)), None)
        yield NextByte(self.config)

    def check_data(self, data: Any) -> None:
        """The model has places for its context, and no more."""
        if not 0 <= data.context <= self.config.context:
            raise ValueError(
                f"context={data.context}: choose 1 to {self.config.context}, the model's own, or 0 for all of it"
            )

    def samples(self, shard: int, generator: torch.Generator) -> Iterator[Sample]:
        """Windows of consecutive bytes, in random order, from a random offset on."""
        context = self.data.context or self.config.context
        text, length = _read(self._shards[shard]), context + 1
        num_windows = (len(text) - length) // context
        if num_windows < 1:
            return
        offset = int(torch.randint(context, (1,), generator=generator))
        for window in torch.randperm(num_windows, generator=generator).tolist():
            start = offset + window * context
            if start + length <= len(text):
                yield (text[start : start + length],)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of the next byte, in nats."""
        text = batch[0].long()
        logits = model(text[:, :-1])
        return functional.cross_entropy(logits.reshape(-1, NUM_BYTES), text[:, 1:].reshape(-1))

    @property
    def document_window(self) -> int:  # type: ignore[override]
        """As much as the model sees at once."""
        return self.config.context

    def documents(self) -> list[Tensor]:
        """The source files, but for the smallest; those for evaluation are left out."""
        files = [path for number, path in enumerate(self._files) if number % EVALUATION_SHARE]
        return [_read([path]) for path in files if path.stat().st_size >= SMALLEST_DOCUMENT]

    def token_losses(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """In nats."""
        text = tokens.long()
        logits = model(text[:, :-1])
        losses = functional.cross_entropy(logits.reshape(-1, NUM_BYTES), text[:, 1:].reshape(-1), reduction="none")
        return losses.view(text.shape[0], -1)

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """The loss on files that nobody trains on."""
        device = next(model.parameters()).device
        return {"evaluation_loss": self.loss(model, (self._evaluation_windows.to(device),)).item()}

    def preview(self, model: nn.Module) -> str:
        """Python, as the model would write it."""
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(0)
        text = list(PROMPT)
        for _ in range(PREVIEW_BYTES):
            window = torch.tensor([text[-self.config.context :]], device=device)
            odds = functional.softmax(model(window)[0, -1].float().cpu() / PREVIEW_TEMPERATURE, dim=0)
            text.append(int(torch.multinomial(odds, 1, generator=generator)))
        return bytes(text).decode("utf-8", "replace")

    @cached_property
    def _shards(self) -> list[list[Path]]:
        shards: list[list[Path]] = [[] for _ in range(self.num_shards)]
        for number, path in enumerate(self._files):
            if number % EVALUATION_SHARE:
                shards[number % self.num_shards].append(path)
        return shards

    @cached_property
    def _evaluation_windows(self) -> Tensor:
        text, length = _read(self._files[::EVALUATION_SHARE]), self.config.context + 1
        starts = torch.linspace(0, len(text) - length, EVALUATION_WINDOWS).long().tolist()
        return torch.stack([text[start : start + length] for start in starts])

    @cached_property
    def _files(self) -> list[Path]:
        root = Path(sysconfig.get_paths()["stdlib"])
        files: list[Path] = []
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in LEFT_OUT]  # all that is installed lies below, too
            files += [Path(folder, name) for name in names if name.endswith(".py")]
        if len(files) < self.num_shards * 2:
            raise ConfigurationError(
                f"{root} has {len(files)} source files: this Python has no standard library to read"
            )
        # By a hash of the name, so that large packages are spread over all shards.
        return sorted(files, key=lambda path: zlib.crc32(path.relative_to(root).as_posix().encode()))


def _read(files: Iterable[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def with_small_values(model: nn.Module) -> nn.Module:
    """The same, with first values of its matrices as GPT-2 has them."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return model


class Block(nn.Module):
    """Attention over what came before, and a layer of neurons."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.neurons = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        batch, length, width = x.shape
        parts = self.attention_in(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(batch, length, width))
        deeper: Tensor = x + self.neurons(x)
        return deeper


class Embeddings(nn.Module):
    """A pipeline's first block: bytes to vectors, and the bytes to guess."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, config.width)
        self.places = nn.Embedding(config.context, config.width)
        with_small_values(self)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors of all bytes but the last; all but the first."""
        text = text.long()
        places = torch.arange(text.shape[1] - 1, device=text.device)
        return self.bytes(text[:, :-1]) + self.places(places), text[:, 1:]


class NextByte(nn.Module):
    """A pipeline's last block: the loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, NUM_BYTES, bias=False)
        with_small_values(self)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of the next byte."""
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.reshape(-1, NUM_BYTES), targets.reshape(-1))


class Transformer(nn.Module):
    """Bytes in, the odds of the next byte out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, config.width)
        self.places = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, NUM_BYTES, bias=False)
        with_small_values(self)

    def forward(self, text: Tensor) -> Tensor:
        """Logits for each place."""
        places = torch.arange(text.shape[1], device=text.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.bytes(text) + self.places(places))))
        return logits
