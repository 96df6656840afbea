"""Paths in one process: real rounds and leases, a hub and links in memory, documents in made-up languages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import torch
from keptlab import EXACT
from trainlab import TrainLab

from potluck.optim.methods.outer import Nesterov, OuterOptimizer
from potluck.optim.optimizer import Optimizer
from potluck.paths.cutting import cut
from potluck.paths.features import bag_of_tokens, prefixes_of
from potluck.paths.grid import Grid
from potluck.paths.moduleheir import ModuleMethod
from potluck.paths.modulepart import ModuleConfig, coordinating_module
from potluck.paths.pathhost import PathHost
from potluck.paths.pathkeeping import PathKeeper
from potluck.paths.pathtrainer import PathConfig, PathTrainer
from potluck.paths.phasedesk import PhaseLeases
from potluck.paths.router import fit_kmeans
from potluck.paths.sharding import Shards, routed
from potluck.round.coordinator.gathering import GatherConfig
from potluck.run.joined import Joined
from potluck.state.config import StateConfig
from potluck.testing.languages import WordModel, languages, word_losses

LENGTH = 17


def make_model(seed: int = 0) -> WordModel:
    torch.manual_seed(seed)
    return WordModel()


class PathLab:
    """A run with paths in memory."""

    def __init__(self, lab: TrainLab, levels: tuple[int, ...] = (2, 2), **options: Any) -> None:
        self.lab = lab
        self.grid = Grid(levels, options.pop("shared", ("embedding", "head")))
        self.documents, self.truth = languages(80)
        router = fit_kmeans(bag_of_tokens(prefixes_of(self.documents, 8)), self.grid.num_paths)
        self.shards = Shards(self.grid, routed(self.grid, self.documents, router, prefix=8, kind="kmeans"))
        self.end = 4
        self.grace_seconds = options.pop("grace_seconds", 10.0)
        self.codecs = options.pop("codecs", EXACT)
        self.config = PathConfig(
            **{
                "inner_steps": 3,
                "batch_size": 4,
                "window": LENGTH - 1,
                "prefix": 8,
                "grace_seconds": self.grace_seconds,
                **options,
            }
        )
        self.trainers: list[PathTrainer] = []
        self.stops: list[threading.Event] = []
        self.host: PathHost | None = None

    def module_config(self, name: str) -> ModuleConfig:
        return ModuleConfig(
            group=name,
            num_paths=len(self.grid.paths_through(name)),
            grace_seconds=self.grace_seconds,
            codecs=self.codecs,
            num_threads=1,
        )

    def open_host(self, folder: FilePath | None = None, **state: Any) -> Joined:
        run = self.lab.join("host", role="aux", coordinates=True)
        main = Optimizer(run, None, target_batch_size=1, auxiliary=True, num_threads=1)
        group = run.group()

        async def start() -> PathHost:
            return await PathHost.start(
                run.peer,
                group,
                main.collaboration.averager.lease,
                self.grid,
                coordinating=lambda name: coordinating_module(
                    GatherConfig(), len(self.grid.paths_through(name)), 1, self.grace_seconds
                ),
                method=ModuleMethod(codecs=self.codecs),
                state=StateConfig(**{"folder": folder, "keep": "always", **state}),
                end=lambda: self.end,
            )

        self.host = run.call(start())
        run.attach(self.host.close)
        return run

    def add_trainer(
        self, name: str, *, outer: Callable[[], OuterOptimizer] = Nesterov, **options: Any
    ) -> tuple[PathTrainer, threading.Event]:
        run = self.lab.join(name, coordinates=options.pop("coordinates", False))
        model = make_model()
        trainer = PathTrainer(
            run,
            self.grid,
            model=model,
            parts=cut(model, len(self.grid.levels)),
            inner=options.pop("inner", lambda p: torch.optim.AdamW(p, lr=1e-2))(model.parameters()),
            outer=outer,
            module_config=self.module_config,
            leases=PhaseLeases.open(run, self.grid),
            keeper=PathKeeper.open(run, self.grid),
            documents=self.documents,
            shards=lambda _phase: self.shards,
            token_losses=options.pop("token_losses", word_losses),
            config=self.config,
            **options,
        )
        stop = threading.Event()
        self.trainers.append(trainer)
        self.stops.append(stop)
        return trainer, stop
