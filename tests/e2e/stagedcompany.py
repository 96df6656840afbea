"""A pipeline with the real commands, and one process that trains the same run: what its longer tests stand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from commandline import PATIENCE_SECONDS, Terminal, events, until_event

from potluck.pipeline.blocks import State, run_blocks, unit_parameters
from potluck.pipeline.blueprint import Blueprint
from potluck.pipeline.messages import Place
from potluck.pipeline.unitstate import PARAMETER, UnitState
from potluck.recipes.catalogue import open_recipe
from potluck.recipes.shipped import folder_files
from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess
from potluck.training.manifest.manifest import Manifest
from potluck.training.manifest.runfile import manifest_of, read_run_file
from potluck.training.staged.course import ManifestCourse, optimizing
from potluck.training.staged.data import RecipeSource
from potluck.training.staged.heldout import through_pipeline

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
Start = Callable[..., ManagedProcess]
"""As Terminal.start: on this machine, or on a node of a lab."""


def steps(host: ManagedProcess) -> list[dict[str, float]]:
    """The steps that a host has told of."""
    return [each for each in events(host) if each["event"] == "pipeline step"]


def until_steps(host: ManagedProcess, count: int, within_seconds: float = PATIENCE_SECONDS) -> None:
    poll_until_sync(lambda: len(steps(host)) >= count, within_seconds, lambda: f"{count} steps: {host.tail()}")


@dataclass(frozen=True)
class OneProcess:
    """What has become of a run that one process trained."""

    losses: list[float]
    values: dict[str, torch.Tensor]
    """Parameters, by unit and name."""
    figures: Mapping[str, float]
    """On held-out data."""


class StagedCompany:
    """A host, and those who join it."""

    def __init__(self, terminal: Terminal, run: str, start: Start | None = None) -> None:
        self.terminal = terminal
        self.folder, self.hub = terminal.folder / "bakery", terminal.folder / "hub"
        self.folder.mkdir()
        (self.folder / "run.toml").write_text(run)
        self._start = start or terminal.start

    def host(self, *options: str | Path, start: Start | None = None, **about: Any) -> ManagedProcess:
        where = options or ("--listen", "127.0.0.1")
        process = (start or self._start)(
            "host", self.folder, "--folder", self.hub, *where, "--no-dashboard", "--backup-every", "5", "--json",
            **ONE_THREAD, **about,
        )  # fmt: skip
        self.link = str(until_event(process, "ready")["link"])
        return process

    def join(self, name: str, *options: str, start: Start | None = None, **environment: str) -> ManagedProcess:
        key = ("--identity-path", self.terminal.folder / f"{name}.key", "--name", name)
        return (start or self._start)(
            "join", self.link, "--json", "--yes", *key, *options, name=name, **ONE_THREAD, **environment
        )

    def manifest(self) -> Manifest:
        return manifest_of(read_run_file(self.folder), self.folder)

    def blueprint(self) -> Blueprint:
        manifest = self.manifest()
        recipe = open_recipe(manifest.recipe, manifest.model, self.folder, folder_files(self.folder))
        return Blueprint.of(recipe.blocks, manifest.seed)

    def one_process(self, num_steps: int) -> OneProcess:
        """The same steps, each as one batch."""
        manifest = self.manifest()
        assert manifest.pipeline is not None
        recipe = open_recipe(manifest.recipe, manifest.model, self.folder, folder_files(self.folder))
        source, blueprint = RecipeSource(recipe, lambda: manifest), self.blueprint()
        course, optimizers = ManifestCourse(lambda: manifest, manifest.pipeline), optimizing(lambda: manifest)
        blocks = blueprint.make(range(blueprint.num_blocks))
        named = unit_parameters(blocks, blueprint.ties, blocks, blueprint.num_blocks)
        units = {unit: UnitState(parameters, optimizers) for unit, parameters in named.items()}
        place, losses = Place(), []
        everything = [p for parameters in named.values() for p in parameters.values()]
        for step in range(num_steps):
            size = course.batch_size(step)
            (loss,) = run_blocks(blocks, range(len(blocks)), source.batch(step, place, 0, size), (0, step, 0))
            gradients = torch.autograd.grad(loss, everything)
            norm = torch.stack([g.norm() for g in gradients]).norm().item()
            most = course.max_norm(step)
            factor = most / (norm + 1e-6) if most and norm > most else 1.0
            found = dict(zip(map(id, everything), gradients, strict=True))
            for unit, state in units.items():
                values = [found[id(p)].reshape(-1) for p in named[unit].values()]
                state.apply(torch.cat([torch.zeros(0), *values]), factor, step)
            place = source.after(step, place, size)
            losses.append(loss.item())
        values = {
            f"{unit}/{name}": tensor
            for unit, state in units.items()
            for name, tensor in state.tensors().items()
            if name.startswith(PARAMETER)
        }

        @torch.no_grad()
        def loss_of(batch: State) -> float:
            return float(run_blocks(blocks, range(len(blocks)), batch, (0, 0, 0))[0])

        return OneProcess(losses, values, through_pipeline(recipe, lambda: manifest)(loss_of))
