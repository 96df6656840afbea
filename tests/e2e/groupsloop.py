"""A program that trains two models in two groups, as people write it.

    python groupsloop.py LINK NAME [--cut]

Says in JSON, a line for each event, which state it begins with and which it has after each epoch of each group. With
--cut it proposes a cut after some epochs, and waits for disks.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from typing import Any

import torch
from torch import nn

import potluck

GROUPS = {"main": 0.05, "critic": 0.2}  # seconds between two steps: they commit at their own pace
CUT_EPOCH = 3
telling = threading.Lock()
epochs = dict.fromkeys(GROUPS, 0)


def tell(event: str, **values: Any) -> None:
    with telling:
        sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
        sys.stdout.flush()


def digest_of(model: nn.Module) -> str:
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().numpy().tobytes())
    return hashed.hexdigest()


def train(run: Any, group: str, seed: int, pause_seconds: float) -> None:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    optimizer = potluck.Optimizer(
        run, torch.optim.SGD(model.parameters(), lr=0.01), target_batch_size=8, group=group, num_threads=1
    )
    tell("begun", group=group, epoch=optimizer.epoch, digest=digest_of(model))
    told = optimizer.epoch
    while True:
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step(batch_size=4)
        optimizer.zero_grad()
        if optimizer.epoch > told:
            told = epochs[group] = optimizer.epoch
            tell("epoch", group=group, epoch=told, digest=digest_of(model))
        time.sleep(pause_seconds)


def main() -> None:
    link, name, *options = sys.argv[1:]
    torch.set_num_threads(1)
    with potluck.join(link, name=name) as run:
        trainers = [
            threading.Thread(target=train, args=(run, group, len(group), pause_seconds), daemon=True)
            for group, pause_seconds in GROUPS.items()
        ]
        for trainer in trainers:
            trainer.start()
        while min(epochs.values()) < CUT_EPOCH:
            time.sleep(0.1)
        if "--cut" in options:
            cut = run.cuts.propose(saved=True, timeout_seconds=90)
            tell("cut", number=cut.number, epochs=cut.epochs)
        for trainer in trainers:
            trainer.join()


if __name__ == "__main__":
    main()
