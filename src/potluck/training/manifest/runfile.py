"""`run.toml`: a run as its organiser writes it down."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from potluck.errors import ConfigurationError
from potluck.hub.access.member import GroupRule, check_declared
from potluck.hub.subjects import check_run_name
from potluck.messages import Message
from potluck.recipes.reference import Requirement
from potluck.recipes.shipped import folder_files
from potluck.training.manifest.changes import flattened, full_name, with_values
from potluck.training.manifest.manifest import (
    Count,
    DiLoCoSettings,
    Evaluation,
    ExchangeSettings,
    Manifest,
    ModelOptions,
    OptimizerSpec,
    Options,
    PathSpec,
    Patience,
    PipelineSpec,
    Route,
    ScheduleSpec,
    Seed,
    Settings,
    SyncSettings,
)
from potluck.training.manifest.pathspec import ROUTING_FILE
from potluck.training.manifest.tomllines import line_of_error

logger = logging.getLogger(__name__)

FILE_NAME = "run.toml"
MAX_FILE_BYTES = 64 * 1024
_FIELDS = {"sync": frozenset(SyncSettings.__struct_fields__), "diloco": frozenset(DiLoCoSettings.__struct_fields__)}
_told: set[tuple[Path | str, ...]] = set()  # a file is read several times, and told of once


class RunFile(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in run.toml."""

    name: str
    recipe: str = "stdlib-lm"
    seed: Seed = 0
    end_epoch: Count = 0
    files: tuple[str, ...] = ()
    """Of this folder, which volunteers get too: names, or patterns as in "data/*.jsonl"."""

    requirements: tuple[Requirement, ...] = ()
    """What the recipe imports beside Potluck and torch, as pip names it; those that it declares need not be here."""

    model: ModelOptions = {}
    data: Options = {}
    training: SyncSettings | DiLoCoSettings = SyncSettings()
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    exchange: ExchangeSettings = ExchangeSettings()
    patience: Patience = Patience()
    evaluation: Evaluation = Evaluation()
    pipeline: PipelineSpec | None = None
    """For a model that no machine holds."""
    paths: PathSpec | None = None
    """For a sparse model of many paths."""
    groups: dict[str, GroupRule] = {}
    """Those of programs, beside `main`: who may be in which. None: any, under any name."""
    curriculum: tuple[dict[str, Any], ...] = ()
    """Stages: each has `from_epoch`, and whatever changes then."""

    def __post_init__(self) -> None:
        check_declared(self.groups)
        if self.groups and (self.paths is not None or self.pipeline is not None):
            raise ConfigurationError("[groups] are those of programs: a run with [paths] or [pipeline] has its own")

    def declared_groups(self) -> dict[str, GroupRule]:
        """All groups that the run has beside `main`; empty: any that a program makes."""
        return dict.fromkeys(self.paths.grid().modules, "all") if self.paths is not None else self.groups


def read_run_file(path: Path) -> RunFile:
    """What stands in a run.toml, or in the folder that has one; ConfigurationError says what is wrong."""
    file = path / FILE_NAME if path.is_dir() else path
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read ({error.strerror}): make one with potluck init") from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{file} has {len(text)} bytes, more than the {MAX_FILE_BYTES} of any run.toml")
    try:
        found = msgspec.convert(_without_other_algorithms(msgspec.toml.decode(text), file), RunFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        where = line_of_error(text.decode("utf-8", "replace"), str(error))
        raise ConfigurationError(
            f"{file}{f', line {where}' if where else ''} is wrong: {error}. Correct it; `potluck init` writes a "
            "valid one to compare with"
        ) from error
    check_run_name(found.name)
    return found


def _without_other_algorithms(content: dict[str, Any], file: Path) -> dict[str, Any]:
    """Pass over what is left under [training] of the algorithm that counted before, and say so."""
    training = content.get("training")
    if not isinstance(training, dict) or training.get("algorithm") not in _FIELDS:
        return content
    algorithm = training["algorithm"]
    known = {"algorithm"}.union(*_FIELDS.values())
    left_over = [name for name in training if name in known - _FIELDS[algorithm] - {"algorithm"}]
    if left_over and (file, *left_over) not in _told:
        _told.add((file, *left_over))
        of = ", ".join(name for name, fields in _FIELDS.items() if not fields.isdisjoint(left_over))
        logger.warning("%s: %s works only with %s, and is ignored", file, " and ".join(left_over), of)
    return {**content, "training": {name: value for name, value in training.items() if name not in left_over}}


def manifest_of(found: RunFile, folder: Path) -> Manifest:
    """The first manifest of a run; recipes of one's own are looked for from `folder` on, and executed.

    What the recipe has to prepare once, a tokenizer for one, it does now, and leaves it in `folder`.
    """
    try:
        return _manifest_of(found, folder)
    except ConfigurationError as error:
        raise with_line(error, folder / FILE_NAME) from error


def _manifest_of(found: RunFile, folder: Path) -> Manifest:
    from potluck.pipeline.blueprint import Blueprint
    from potluck.pipeline.layout import check_num_stages
    from potluck.recipes.catalogue import open_recipe, refer_to  # needs torch, which reading a run.toml does not
    from potluck.recipes.recipe import data_of
    from potluck.training.manifest.requirements import require
    from potluck.training.manifest.shipping import downloads_of, files_of, requirements_of

    ref = refer_to(found.recipe, folder)
    own = folder / found.recipe
    recipe = open_recipe(ref, found.model, own, folder_files(folder))
    recipe.data = data_of(recipe, found.data)
    training = DiLoCoSettings() if found.paths is not None and found.training == SyncSettings() else found.training
    first = Settings(
        training=training,
        optimizer=found.optimizer,
        schedule=found.schedule,
        data=msgspec.to_builtins(recipe.data),
        end_epoch=found.end_epoch,
    )
    if found.pipeline is not None:
        blueprint = Blueprint.of(recipe.blocks, found.seed)
        check_num_stages(blueprint.num_blocks, 1 if found.pipeline.stages == "auto" else found.pipeline.stages)
    settings = _planned(first, found.curriculum)
    for entry in settings:
        data_of(recipe, entry.data)
    if not ref.digest:  # what one's own recipe needs, its file has imported by now
        require(recipe.requirements, "host it")
    routes = _routes_of(found, folder)
    patterns = (
        *found.files,
        *(route.name for route in routes),
        *recipe.prepare(folder),
        *([found.recipe] if ref.digest else []),
    )
    return Manifest(
        run=found.name,
        recipe=ref,
        model=found.model,
        settings=settings,
        exchange=found.exchange,
        patience=found.patience,
        evaluation=found.evaluation,
        seed=found.seed,
        files=files_of(folder, patterns),
        downloads=downloads_of(recipe),
        paths=found.paths,
        routes=routes,
        requirements=requirements_of(recipe, found.requirements),
        pipeline=found.pipeline,
    )


def _routes_of(found: RunFile, folder: Path) -> tuple[Route, ...]:
    """The routing that the organiser has prepared; ConfigurationError where there is none, or it does not fit."""
    if found.paths is None:
        return ()
    from potluck.paths.sharding import check_routing, read_routing

    routing = read_routing(folder / ROUTING_FILE)
    check_routing(found.paths.grid(), routing)
    if routing.prefix != found.paths.route_prefix:
        raise ConfigurationError(
            f"documents were routed by {routing.prefix} tokens, and route_prefix is {found.paths.route_prefix}: run "
            "`potluck paths prepare` again"
        )
    return (Route(sha256=hashlib.sha256((folder / ROUTING_FILE).read_bytes()).hexdigest()),)


def with_line(error: ConfigurationError, file: Path) -> ConfigurationError:
    """The same, with the line of the file that it is about, where that can be told."""
    try:
        line = line_of_error(file.read_text(encoding="utf-8"), str(error))
    except (OSError, UnicodeDecodeError):
        line = None
    return ConfigurationError(f"{file}, line {line}: {error}") if line else error


def _planned(first: Settings, stages: Iterable[Mapping[str, Any]]) -> tuple[Settings, ...]:
    """What counts from which epoch on: each stage changes what it names, as a command would, and the rest stays."""
    plan = [first]
    for number, stage in enumerate(stages, 1):
        values = dict(flattened(stage))
        from_epoch = values.pop("from_epoch", None)
        if type(from_epoch) is not int or from_epoch < 1:
            raise ConfigurationError(
                f"stage {number} of [[curriculum]] has from_epoch={from_epoch}: it needs a number, 1 or more"
            )
        named = {full_name(name, first): value for name, value in values.items()}
        plan.append(msgspec.structs.replace(with_values(plan[-1], named), from_epoch=from_epoch))
    return tuple(plan)
