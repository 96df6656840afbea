"""A program that trains two models in two groups, as people write it.

    python groupsloop.py LINK NAME

Says in JSON, a line for each event, which state it begins with and which it has after each epoch of each group. A line
`cut` on its input has it propose a cut and wait for disks.
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
telling = threading.Lock()


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
            told = optimizer.epoch
            tell("epoch", group=group, epoch=told, digest=digest_of(model))
        time.sleep(pause_seconds)


def main() -> None:
    link, name = sys.argv[1:]
    torch.set_num_threads(1)
    with potluck.join(link, name=name) as run:
        for group, pause_seconds in GROUPS.items():
            arguments = (run, group, len(group), pause_seconds)
            threading.Thread(target=train, args=arguments, daemon=True).start()
        for line in sys.stdin:
            if line.strip() == "cut":
                cut = run.cuts.propose(saved=True, timeout_seconds=90)
                tell("cut", number=cut.number, epochs=cut.epochs)
            elif line.strip() == "latest":
                latest = run.cuts.latest()
                tell("latest", number=latest.number if latest is not None else 0)


if __name__ == "__main__":
    main()
