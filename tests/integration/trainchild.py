"""A trainer in a process of its own: an ordinary training loop, as a user would write it.

python trainchild.py NUMBER LINK KEY EPOCHS KIND

It tells in lines of JSON when it is in, after each epoch, and at the end what it holds; then it waits to be ended, so
that nobody's leaving disturbs the others. Batches are told with the epoch that they went into.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import potluck
from potluck.peer.identity import Identity
from potluck.round.codecs import CodecChoice

FEATURES = 6
BATCH_SIZE = 4
TARGET = 48
EXACT = CodecChoice.everything("float32")


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))


def make_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(BATCH_SIZE, FEATURES, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True).sin()


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    inputs, targets = make_batch(number)
    return nn.functional.mse_loss(model(inputs), targets)


def make_inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_optimizer(run: Any, model: nn.Module, kind: str) -> Any:
    if kind == "diloco":
        inner = torch.optim.SGD(model.parameters(), lr=0.01)  # so that hundreds of epochs stay finite
        return potluck.DiLoCo(run, inner, inner_steps=5, codecs=EXACT, num_threads=1, grace_seconds=20.0)
    return potluck.Optimizer(
        run,
        make_inner(model),
        target_batch_size=TARGET,
        codecs=EXACT,
        num_threads=1,
        matchmaking_seconds=20.0,  # nobody is to be left behind because this machine is busy
    )


def values_of(model: nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def digest_of(model: nn.Module) -> str:
    return hashlib.sha256(json.dumps(values_of(model)).encode()).hexdigest()


def say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


def main(number: int, link: str, key: Path, num_epochs: int, kind: str) -> None:
    torch.set_num_threads(1)
    model = make_model()
    identity = Identity.open(key)
    with potluck.join(link, identity=identity, name=f"trainer {number}", listen=("tcp://127.0.0.1:0",)) as run:
        optimizer = make_optimizer(run, model, kind)
        say(joined=run.peer_id)
        sys.stdin.readline()  # until all are there
        position = 1_000_000 * number
        while optimizer.epoch < num_epochs:
            epoch = optimizer.epoch
            loss_of(model, position).backward()
            optimizer.step(batch_size=BATCH_SIZE)
            optimizer.zero_grad()
            say(batch=position, epoch=epoch + 1)
            position += 1
            if optimizer.epoch > epoch:
                say(done=optimizer.epoch, digest=digest_of(model))
        say(finished=number, values=values_of(model), statistics=optimizer.statistics())
        sys.stdin.readline()
    say(left=number)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
