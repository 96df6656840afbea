"""A PyTorch loop of one's own, trained together with others. What Potluck adds are the lines marked with a number.

    python examples/plain_loop.py                         # starts a run, and prints the link for others
    POTLUCK_LINK='potluck://…' python examples/plain_loop.py     # a second peer, here or anywhere

A byte-level language model on the source of Python's own standard library: nothing to download.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn

import potluck
from potluck.integrations.openrun import open_run

CONTEXT = 32


def read_text() -> torch.Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(256, 64), nn.Conv1d(CONTEXT, CONTEXT, 5, padding=2), nn.GELU(), nn.LayerNorm(64), nn.Flatten(),
        nn.Linear(64 * CONTEXT, 256),
    )  # fmt: skip


def loss_of(model: nn.Module, text: torch.Tensor, batch_size: int) -> torch.Tensor:
    starts = torch.randint(len(text) - CONTEXT - 1, (batch_size,))
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="", help="join link of a run (else POTLUCK_LINK; else a run is started)")
    parser.add_argument("--epochs", type=int, default=40, help="stop when the run has made so many updates")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--target-batch-size", type=int, default=128, help="samples of all peers that make an update")
    options = parser.parse_args()
    text, model = read_text(), make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with open_run(options.link) as run:  # 1
        optimizer = potluck.Optimizer(run, inner, target_batch_size=options.target_batch_size)  # 2
        while optimizer.epoch < options.epochs:
            epoch = optimizer.epoch
            loss = loss_of(model, text, options.batch_size)
            loss.backward()
            optimizer.step(batch_size=options.batch_size)  # 3
            optimizer.zero_grad()
            if optimizer.epoch > epoch and optimizer.epoch % 10 == 0:
                print(f"epoch {optimizer.epoch}: loss {loss.item():.3f}", flush=True)
        print(f"done at epoch {optimizer.epoch}: loss {loss_of(model, text, 512).item():.3f}", flush=True)


if __name__ == "__main__":
    main()
