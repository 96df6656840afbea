"""One volunteer of bench_unequal.py: what `potluck join` does, and it tells what only its process knows.

    python unequal_peer.py LINK KEY NAME ADDRESS BATCH_SIZE RECIPE

It tells its progress in lines of JSON. On "stop" it hands in and leaves, and tells what it computed, what epochs hold
of that, the counters of its optimizer and its states, and the losses of what it had on the way.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import potluck
from potluck.optim.parameters import PARAMETER, without_prefix
from potluck.peer.identity import Identity
from potluck.recipes.catalogue import open_recipe
from potluck.training.manifest.manifest import Manifest
from potluck.training.manifest.noticeboard import NoticeBoard
from potluck.training.trainer.config import TrainConfig
from potluck.training.trainer.leaving import train_and_hand_in
from potluck.training.trainer.trainer import Trainer, TrainProgress

PORT = 4700
KEPT_EVERY_SECONDS = 1.0
HAND_IN_SECONDS = 60.0
EVALUATED = 128


def say(event: str, **told: Any) -> None:
    print(json.dumps({"event": event, **told}), flush=True)


class Curve:
    """The shared parameters on the way, to be looked at in the end: measuring costs no time then."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, list[torch.Tensor]]] = []

    def add(self, trainer: Trainer) -> None:
        now = time.time()
        if not self._kept or now - self._kept[-1][0] >= KEPT_EVERY_SECONDS:
            # Of the run, and not of this peer: with DiLoCo its model is some steps ahead, on its own data.
            shared = without_prefix(PARAMETER, trainer.optimizer.method.tensors())
            names = [name for name, _ in trainer.model.named_parameters()]
            self._kept.append((now, [shared[name].detach().to(torch.float16, copy=True) for name in names]))

    @torch.no_grad()
    def losses(self, model: torch.nn.Module) -> list[tuple[float, float]]:
        from toylm import Corpus, loss_of

        held_out = Corpus(Path(os.environ["UNEQUAL_TEXT"]).read_bytes(), 32).held_out(EVALUATED)
        found = []
        for at, parameters in self._kept:
            for parameter, kept in zip(model.parameters(), parameters, strict=True):
                parameter.copy_(kept)
            found.append((at, float(loss_of(model, held_out))))
        return found


def main(link: str, key: Path, name: str, address: str, batch_size: int, recipe_file: Path) -> None:
    stop, curve = threading.Event(), Curve()
    where = (f"tcp://{address}:{PORT}",)
    with potluck.join(link, identity=Identity.open(key), name=name, listen=where, announce=where) as run:
        board = NoticeBoard.of(run.peer.session)
        run.attach(board.close)
        run.call(board.start())
        first = run.call(board.first())

        def newest() -> Manifest:
            return board.manifest or first

        def progress(told: TrainProgress) -> None:
            curve.add(trainer)
            say("progress", epoch=told.epoch, samples=told.samples, given=told.given, at=time.time())

        run.is_leaving = stop.is_set
        recipe = open_recipe(first.recipe, first.model, recipe_file)
        trainer = Trainer(run, newest, recipe, TrainConfig(batch_size=batch_size, num_threads=1), progress)
        say("training", epoch=trainer.optimizer.epoch, at=time.time())
        threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
        last = train_and_hand_in(
            trainer,
            stop,
            HAND_IN_SECONDS,
            on_handing_in=lambda samples: say("handing in", samples=samples),
            on_failure=lambda why: say("lost", why=why),
        )
        keeper = trainer.optimizer.collaboration.keeper
        statistics = {**trainer.optimizer.statistics(), **(keeper.statistics() if keeper is not None else {})}
        is_first = name == "fast"
        say(
            "trained",
            samples=last.samples,
            given=last.given,
            epoch=last.epoch,
            statistics={name: value for name, value in statistics.items() if isinstance(value, (int, float))},
            losses=curve.losses(trainer.model) if is_first else [],
        )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), Path(sys.argv[6]))
