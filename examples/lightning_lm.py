"""A Lightning module, trained together with others: what Potluck adds is the strategy.

    pip install 'potluck-train[lightning]'
    python examples/lightning_lm.py                       # starts a run, and prints the link for others
    POTLUCK_LINK='potluck://…' python examples/lightning_lm.py   # a second peer, here or anywhere

A byte-level transformer on the source of Python's own standard library: nothing to download.
"""

from __future__ import annotations

import argparse
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from potluck.integrations.lightning import PotluckStrategy

CONTEXT = 64
HELD_OUT = 4096  # bytes that nobody trains on


class ByteLM(LightningModule):
    """Guesses the next byte."""

    def __init__(self, width: int = 64, layers: int = 2, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        text = batch[0].long()
        hidden = self.bytes(text[:, :-1]) + self.places.weight
        logits = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        # It counts updates of the run, by all peers: so all peers have the same learning rate.
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def windows(text: Tensor) -> TensorDataset:
    return TensorDataset(text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="", help="join link of a run (else POTLUCK_LINK; else a run is started)")
    parser.add_argument("--steps", type=int, default=100, help="batches that this peer computes")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--target-batch-size", type=int, default=64, help="samples of all peers that make an update")
    parser.add_argument("--algorithm", default="sync", help="sync, local, diloco, streaming, sparseloco, asynchronous")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed, or 16-mixed on CUDA")
    options = parser.parse_args()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    train, held_out = windows(text[HELD_OUT:]), windows(text[:HELD_OUT])

    strategy = PotluckStrategy(
        target_batch_size=options.target_batch_size,
        algorithm=options.algorithm,
        initial_peers=options.link or None,
    )
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    trainer = Trainer(
        strategy=strategy,
        accelerator="auto",
        devices=1,
        precision=options.precision,
        max_steps=options.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Every peer draws from the data in an order of its own: torch seeds itself anew in each process.
    sampler = RandomSampler(train, replacement=True, num_samples=options.steps * options.batch_size)
    model = ByteLM()
    trainer.fit(model, DataLoader(train, batch_size=options.batch_size, sampler=sampler))
    [result] = trainer.validate(model, DataLoader(held_out, batch_size=32), verbose=False)
    print(f"done: loss {result['val_loss']:.3f} on text that nobody trained on", flush=True)


if __name__ == "__main__":
    main()
