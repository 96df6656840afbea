"""A program with a loop of its own in somebody's hosted run, as people write it.

    python ownloop.py LINK RECIPE.PY|NAME ALGORITHM EPOCHS [--refused] [--until FILE]

ALGORITHM is sync or diloco, or sync-framework: as the frameworks' trainers make it. With --refused, what cannot work is
tried too; with --until, it goes on for as long as there is no such file. Says in JSON what became of it, a line for
each event; warnings go to the same place.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import potluck
from potluck.errors import ConfigurationError
from potluck.integrations.algorithms import TrainingConfig
from potluck.recipes.catalogue import recipe_class
from potluck.recipes.recipe import configured

BATCH = 8


def tell(event: str, **values: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


class Telling(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tell("warning", text=record.getMessage())


def refused(run: Any, *arguments: Any, make: Any = potluck.Optimizer, **options: Any) -> None:
    try:
        make(run, *arguments, **options)
    except ConfigurationError as error:
        tell("refused", text=str(error))
    else:
        tell("taken")


def try_what_cannot_work(link: str, model: nn.Module) -> None:
    with potluck.join(link, name="wrong") as run:
        refused(run, torch.optim.SGD(model.parameters(), lr=0.1))
        refused(
            run, torch.optim.AdamW([{"params": list(model.parameters())}, {"params": [nn.Parameter(torch.zeros(1))]}])
        )
        refused(run, torch.optim.AdamW(model.parameters()), make=potluck.DiLoCo)
        refused(run, torch.optim.AdamW(reversed(list(model.parameters()))))


def main() -> None:
    link, recipe_name, algorithm, epochs, *rest = sys.argv[1:]
    logging.getLogger("potluck").addHandler(Telling(logging.WARNING))
    options = {} if recipe_name.endswith(".py") else {"width": 16}
    recipe = configured(recipe_class(recipe_name, Path()), options)
    model = recipe.model()
    samples = [sample for _, sample in zip(range(64), recipe.samples(0, torch.Generator()), strict=False)]
    if "--refused" in rest:
        try_what_cannot_work(link, recipe.model())
    with potluck.join(link, name="own") as run:
        inner = torch.optim.AdamW(model.parameters(), lr=0.5)
        if algorithm == "sync":
            optimizer: Any = potluck.Optimizer(run, inner)
        elif algorithm == "sync-framework":
            optimizer = TrainingConfig(algorithm="sync", target_batch_size=7).make(run, inner)
        else:
            optimizer = potluck.DiLoCo(run, inner, inner_steps=7)
        tell("begun", epoch=optimizer.epoch, names=list(optimizer.method.state.model))
        first, position = optimizer.epoch, 0
        told = Path(rest[-1]) if "--until" in rest else Path()
        while optimizer.epoch < first + int(epochs) or not told.exists():
            batch = [samples[(position + number) % len(samples)] for number in range(BATCH)]
            position += BATCH
            recipe.loss(model, tuple(torch.stack(part) for part in zip(*batch, strict=True))).backward()
            optimizer.step(batch_size=BATCH)
            optimizer.zero_grad()
        group = optimizer.param_groups[0]
        statistics = {name: value for name, value in optimizer.statistics().items() if isinstance(value, int | float)}
        tell("done", epoch=optimizer.epoch, lr=group["lr"], betas=group["betas"], statistics=statistics)


if __name__ == "__main__":
    main()
