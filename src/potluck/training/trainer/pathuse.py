"""What an organiser does with paths: route documents before a run and during it, look at them, take them away.

All of it works in the folders of the run: that with run.toml, and that of its host, whose backups hold the modules.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from potluck.errors import ConfigurationError
from potluck.paths.cutting import cut_for
from potluck.paths.evaluating import Evaluation, evaluate
from potluck.paths.features import bag_of_tokens, prefixes_of
from potluck.paths.grid import Grid
from potluck.paths.pathfeed import document_losses
from potluck.paths.pathhost import STATES
from potluck.paths.pathmodel import PathModel
from potluck.paths.pathstate import read_state
from potluck.paths.router import fit_discriminative, fit_kmeans
from potluck.paths.sharding import (
    Routing,
    Shards,
    check_documents,
    read_assignment,
    read_routing,
    routed,
    write_routing,
)
from potluck.recipes.catalogue import open_recipe, refer_to
from potluck.recipes.recipe import Recipe, data_of
from potluck.recipes.reference import FileRef
from potluck.recipes.shipped import fetched_files, folder_files
from potluck.state.backups import Backups, backup_folder
from potluck.training.manifest.manifest import Manifest, Route
from potluck.training.manifest.pathspec import ROUTING_FILE, PathSpec
from potluck.training.manifest.runfile import RunFile
from potluck.training.trainer.models import untrained, weights_of
from potluck.training.trainer.pathwork import paths_of

logger = logging.getLogger(__name__)

MOST_LABELLED = 2048  # documents whose losses on all paths are measured, for a discriminative router


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `potluck paths prepare` made."""

    shards: Shards
    file: FilePath
    sha256: str
    warnings: list[str]


def prepare(found: RunFile, folder: FilePath) -> Prepared:
    """Route the recipe's documents, and write the routing beside run.toml."""
    if found.paths is None:
        raise ConfigurationError(f"{folder / 'run.toml'} has no [paths]: write [paths] and levels = [2, 2] into it")
    spec, grid = found.paths, found.paths.grid()
    ref = refer_to(found.recipe, folder)
    recipe = open_recipe(ref, found.model, folder / found.recipe, folder_files(folder))
    recipe.data = data_of(recipe, found.data)
    model = untrained(recipe, found.seed)
    cut_for(grid, model, recipe.modules)  # says so where the levels do not fit
    documents = recipe.documents()
    routing = _first_routing(spec, grid, documents, folder, found.seed)
    shards = Shards(grid, routing)
    file = folder / ROUTING_FILE
    sha256 = write_routing(routing, file)
    phase_tokens = spec.inner_steps * spec.batch_size * recipe.document_window
    return Prepared(shards=shards, file=file, sha256=sha256, warnings=shards.warnings(phase_tokens))


def _first_routing(spec: PathSpec, grid: Grid, documents: Any, folder: FilePath, seed: int) -> Routing:
    if spec.route in ("kmeans", "discriminative"):  # nothing is trained yet that could tell paths apart
        features = bag_of_tokens(prefixes_of(documents, spec.route_prefix))
        router = fit_kmeans(features, grid.num_paths, seed)
        return routed(grid, documents, router, prefix=spec.route_prefix, kind="kmeans", seed=seed)
    return read_assignment(grid, documents, folder / spec.route, prefix=spec.route_prefix)


class HostedPaths:
    """A run with paths, as its host's folder has it."""

    def __init__(self, manifest: Manifest, states: FilePath, *, best: bool = False) -> None:
        """`best`: of paths that have stopped, the modules as they were when their validation loss was least."""
        self.manifest = manifest
        self.grid = paths_of(manifest).grid()
        self.recipe: Recipe[Any] = open_recipe(manifest.recipe, manifest.model, files=manifest.files)
        self.recipe.data = data_of(self.recipe, manifest.newest.data)
        self._states = states
        self._best = best
        self._modules: dict[str, dict[str, Tensor]] = {}
        self.epochs: dict[str, int] = {}
        route = manifest.routes[-1]
        file = fetched_files(manifest.files).path(route.name)
        if file is None:
            raise ConfigurationError(f"the routing {route.name} is not on this machine: it is on the run's host")
        self.routing = read_routing(file)
        self.shards = Shards(self.grid, self.routing)

    def module(self, name: str) -> Mapping[str, Tensor]:
        """The newest backup of a module; its first values where there is none yet."""
        if name not in self._modules:
            backups = Backups(backup_folder(self._states, name))
            info = backups.latest()
            if info is None:
                raise ConfigurationError(
                    f"there is no backup of module {name} in {backups.folder} yet: it comes with the host's next one"
                )
            snapshot = backups.read(info)
            try:
                self._modules[name] = {n: t.clone() for n, t in weights_of(snapshot.tensors()).items() if "/" not in n}
            finally:
                snapshot.release()
            self.epochs[name] = info.epoch
        return self._modules[name]

    def make(self) -> nn.Module:
        """A path's model, untrained."""
        return untrained(self.recipe, self.manifest.seed)

    def model(self) -> PathModel:
        """All paths."""
        return PathModel(self.grid, self.make, self.module, router=self.routing.router, prefix=self.routing.prefix)

    def plain(self, path: tuple[int, ...]) -> nn.Module:
        """One path as one plain module; its best, where that was asked for and there is one."""
        model = self.model().path(path)
        if self._best:
            file = self._states / STATES / f"{self.grid.number_of(path)}.safetensors"
            best = read_state(file.read_bytes()).best_modules if file.is_file() else {}
            if not best:
                raise ConfigurationError(
                    f"there are no best modules of path {path}: they are kept with stop_after above 0 under [paths]"
                )
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name in best:
                        parameter.copy_(best[name])
        return model

    def evaluate(self, *, reroute_every: int, dense: nn.Module | None, most: int) -> Evaluation:
        """On the validation documents of all paths."""
        documents = self.recipe.documents()
        check_documents(self.routing, documents)
        chosen = [(d, number) for number, own in enumerate(self.shards.validation) for d in own[:most]]
        return evaluate(
            self.model(),
            [documents[document] for document, _ in chosen],
            [number for _, number in chosen],
            self.recipe.token_losses,
            window=self.recipe.document_window,
            reroute_every=reroute_every,
            dense=dense,
        )

    def reroute(self) -> Routing:
        """A discriminative routing, by the losses of all paths on documents of their validation shards."""
        documents = self.recipe.documents()
        check_documents(self.routing, documents)
        held_out = [d for own in self.shards.validation for d in own]
        held_out = (held_out + [d for own in self.shards.training for d in own])[:MOST_LABELLED]
        chosen = [documents[number] for number in held_out]
        model, columns = self.model(), []
        for path in self.grid.paths:
            sums, counts = document_losses(
                model.path(path),
                chosen,
                self.recipe.token_losses,
                window=self.recipe.document_window,
                prefix=self.routing.prefix,
            )
            columns.append(sums / counts.clamp_min(1))
        features = bag_of_tokens(prefixes_of(chosen, self.routing.prefix))
        router = fit_discriminative(features, torch.stack(columns, dim=1).float(), self.manifest.seed)
        return routed(
            self.grid, documents, router, prefix=self.routing.prefix, kind="discriminative", seed=self.manifest.seed
        )


def with_route(manifest: Manifest, ref: FileRef, from_phase: int) -> Manifest:
    """The manifest with another routing from a phase on."""
    files = (*(each for each in manifest.files if each.name != ref.name), ref)
    kept = tuple(route for route in manifest.routes if route.from_phase < from_phase)
    routes = (*kept, Route(from_phase=from_phase, sha256=ref.sha256, name=ref.name))
    return msgspec.structs.replace(manifest, files=files, routes=routes)
