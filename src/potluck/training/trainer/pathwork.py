"""From a manifest with [paths] to a peer that trains paths, and to a host that leases them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path as FilePath
from typing import Any

from torch import nn

from potluck.errors import ConfigurationError
from potluck.optim import compiler
from potluck.optim.cores import share_cores
from potluck.optim.driver import DriverConfig
from potluck.paths.cutting import cut_for
from potluck.paths.moduleheir import ModuleMethod
from potluck.paths.modulepart import ModuleConfig, coordinating_module
from potluck.paths.pathhost import PathHost
from potluck.paths.pathkeeping import PathKeeper
from potluck.paths.pathtrainer import PathConfig, PathProgress, PathTrainer
from potluck.paths.phasedesk import PhaseLeases
from potluck.paths.sharding import Shards, check_documents, check_routing, read_routing
from potluck.peer.lease import Lease
from potluck.recipes.recipe import Recipe, require_downloads
from potluck.recipes.shipped import fetched_files
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.run.group import Group, LinkedPeer
from potluck.run.joined import Joined
from potluck.state.config import StateConfig
from potluck.training.manifest import manifest as manifests
from potluck.training.manifest.manifest import Manifest, Route
from potluck.training.manifest.pathspec import PathSpec
from potluck.training.trainer.config import TrainConfig
from potluck.training.trainer.inneroptimizer import inner_optimizer
from potluck.training.trainer.machine import find_devices
from potluck.training.trainer.models import untrained
from potluck.training.trainer.optimizers import codecs_of, following, gathering, outer_of, transform_of
from potluck.training.trainer.trainer import TrainProgress


def paths_of(manifest: Manifest) -> PathSpec:
    """ConfigurationError where a run has none."""
    if manifest.paths is None:
        raise ConfigurationError(
            f"run {manifest.run} has no paths: it trains one model. (run.toml: [paths] levels = …)"
        )
    return manifest.paths


def route_at(manifest: Manifest, phase: int) -> Route:
    """The routing that counts in a phase: the same for all paths, so all change at one cut."""
    return next(route for route in reversed(manifest.routes) if route.from_phase <= phase)


def shards_of(manifest: Manifest, file: FilePath | None) -> Shards:
    """The documents of each path, by a routing file."""
    if file is None:
        raise ConfigurationError("the run's routing is not on this machine: join again, which fetches it")
    grid = paths_of(manifest).grid()
    routing = read_routing(file)
    check_routing(grid, routing)
    return Shards(grid, routing)


def parts_of(manifest: Manifest, recipe: Recipe[Any], model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Which parameters belong to which level; ConfigurationError where the levels do not fit the recipe."""
    return cut_for(paths_of(manifest).grid(), model, recipe.modules)


def coordinating_paths(manifest: Manifest) -> Callable[[str], CoordinatorConfig]:
    """How the rounds of each module are started and planned, by any coordinator."""
    spec, training, grid = paths_of(manifest), manifest.newest.training, paths_of(manifest).grid()
    assert isinstance(training, manifests.DiLoCoSettings), "the manifest saw to it"
    return lambda name: coordinating_module(
        gathering(manifest), len(grid.paths_through(name)), spec.min_phases, training.grace_seconds
    )


async def host_paths(
    peer: LinkedPeer, main: Group, lease: Lease, newest: Callable[[], Manifest], state: StateConfig
) -> PathHost:
    """Lease phases while this peer coordinates, and help in the groups of all modules."""
    manifest = newest()
    return await PathHost.start(
        peer,
        main,
        lease,
        paths_of(manifest).grid(),
        coordinating=coordinating_paths(manifest),
        state=state,
        method=ModuleMethod(
            outer=lambda: outer_of(manifest),
            transform=lambda: transform_of(manifest),
            codecs=codecs_of(manifest),
            alpha=paths_of(manifest).alpha,
        ),
        end=lambda: newest().newest.end_epoch,
    )


def path_trainer(
    run: Joined,
    newest: Callable[[], Manifest],
    recipe: Recipe[Any],
    config: TrainConfig,
    on_progress: Callable[[PathProgress], None],
    fetch: Callable[[Manifest], None] = lambda _manifest: None,
) -> PathTrainer:
    """A peer's trainer, with its documents read and checked; `fetch` brings files that a manifest has since got."""
    manifest = newest()
    spec, training = paths_of(manifest), manifest.newest.training
    assert isinstance(training, manifests.DiLoCoSettings), "the manifest saw to it"
    grid = spec.grid()
    require_downloads(recipe)
    share_cores(config.num_threads)
    device = find_devices(config.device)[0]
    model = untrained(recipe, manifest.seed, device)
    parts = parts_of(manifest, recipe, model)
    documents = recipe.documents()

    @lru_cache(maxsize=2)
    def shards_by(name: str, sha256: str) -> Shards:
        if fetched_files(newest().files).path(name) is None and recipe.files.path(name) is None:
            fetch(newest())  # the documents were routed anew
        shards = shards_of(newest(), fetched_files(newest().files).path(name) or recipe.files.path(name))
        check_documents(shards.routing, documents)
        return shards

    def shards(phase: int) -> Shards:
        route = route_at(newest(), phase)
        return shards_by(route.name, route.sha256)

    compiler.postpone()
    inner = inner_optimizer(manifest.settings[0].optimizer, model)
    driver = DriverConfig(
        averaging_timeout_seconds=manifest.patience.round_seconds or 300.0,
        load_state_timeout_seconds=manifest.patience.load_seconds,
    )

    def module_config(name: str) -> ModuleConfig:
        return ModuleConfig(
            group=name,
            num_paths=len(grid.paths_through(name)),
            alpha=spec.alpha,
            min_phases=spec.min_phases,
            grace_seconds=training.grace_seconds,
            codecs=codecs_of(manifest),
            gather=gathering(manifest),
            state=config.state,
            driver=driver,
        )

    return PathTrainer(
        run,
        grid,
        model=model,
        parts=parts,
        inner=inner,
        set_rates=following(inner, newest),
        outer=lambda: outer_of(manifest),
        transform=lambda: transform_of(manifest),
        module_config=module_config,
        leases=PhaseLeases.open(run, grid),
        keeper=PathKeeper.open(run, grid),
        documents=documents,
        shards=shards,
        token_losses=recipe.token_losses,
        config=PathConfig(
            inner_steps=spec.inner_steps,
            batch_size=config.batch_size or spec.batch_size,
            window=recipe.document_window,
            prefix=spec.route_prefix,
            max_grad_norm=manifest.newest.optimizer.max_grad_norm or None,
            patience_phases=spec.stop_after,
            grace_seconds=training.grace_seconds,
            seed=manifest.seed,
        ),
        on_progress=on_progress,
    )


def as_train_progress(progress: PathProgress, batch_size: int) -> TrainProgress:
    """The same as of a run without paths: its epoch is the phase, its samples are windows."""
    seconds = max(progress.seconds_inner + progress.seconds_outside, 1e-9)
    samples = progress.steps * batch_size
    return TrainProgress(
        epoch=progress.phase,
        steps=progress.steps,
        samples=samples,
        loss=progress.loss,
        samples_per_second=0.0 if progress.is_waiting else samples / seconds,
        given=progress.phases * progress.inner_steps * batch_size,
    )
