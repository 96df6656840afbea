"""The small language model of the training benchmarks: bytes of the Python standard library's own source.

Needs torch and nothing else, so that a baseline in another environment trains the very same.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

VOCABULARY = 256
HELD_OUT = 10  # one part in so many is never trained on


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.forward_in, self.forward_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.attention_in(self.attention_norm(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.forward_out(nn.functional.gelu(self.forward_in(self.forward_norm(x))))


class ToyLM(nn.Module):
    """A byte-level transformer."""

    def __init__(self, width: int, num_layers: int, length: int, num_heads: int = 4) -> None:
        super().__init__()
        self.length = length
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.norm(x) @ self.bytes.weight.T
        return logits


def make_model(width: int, num_layers: int, length: int) -> ToyLM:
    """The same weights for everybody."""
    torch.manual_seed(1)
    return ToyLM(width, num_layers, length)


def corpus(num_bytes: int) -> bytes:
    """The beginning of the standard library, file by file in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b""
    for file in sorted(folder.glob("*.py")):
        text += file.read_bytes()
        if len(text) >= num_bytes:
            break
    return text[:num_bytes]


class Corpus:
    """Batches for training, drawn by number, and a few that nobody trains on."""

    def __init__(self, text: bytes, length: int) -> None:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        split = len(data) - len(data) // HELD_OUT
        self._trained, self._held_out = data[:split], data[split:]
        self._length = length

    def batch(self, number: int, size: int) -> Tensor:
        """The same for everybody who asks for this number."""
        # torch seeds with the lower 32 bits alone: by them, all peers of (peer << 32) + step would draw the same.
        seed = (number ^ (number >> 32) * 0x9E3779B1) & 0xFFFFFFFF
        return self._draw(self._trained, torch.Generator().manual_seed(seed), size)

    def held_out(self, size: int) -> Tensor:
        """Text that is not in any batch."""
        return self._draw(self._held_out, torch.Generator().manual_seed(0), size)

    def _draw(self, data: Tensor, generator: torch.Generator, size: int) -> Tensor:
        starts = torch.randint(len(data) - self._length - 1, (size,), generator=generator)
        return torch.stack([data[start : start + self._length + 1] for start in starts.tolist()])


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Nats per byte."""
    logits = model(text[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
