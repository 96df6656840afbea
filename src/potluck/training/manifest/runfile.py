"""`run.toml`: a run as its organiser writes it down."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from potluck.errors import ConfigurationError
from potluck.hub.subjects import check_run_name
from potluck.messages import Message
from potluck.training.manifest.changes import flattened, full_name, with_values
from potluck.training.manifest.manifest import (
    Count,
    DiLoCo,
    Exchange,
    Manifest,
    OptimizerSpec,
    Options,
    ScheduleSpec,
    Seed,
    Settings,
    Sync,
)

logger = logging.getLogger(__name__)

FILE_NAME = "run.toml"
MAX_FILE_BYTES = 64 * 1024
_FIELDS = {"sync": frozenset(Sync.__struct_fields__), "diloco": frozenset(DiLoCo.__struct_fields__)}
_told: set[tuple[Path | str, ...]] = set()  # a file is read several times, and told of once


class RunFile(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in run.toml."""

    name: str
    recipe: str = "stdlib-lm"
    seed: Seed = 0
    end_epoch: Count = 0
    model: Options = {}
    data: Options = {}
    training: Sync | DiLoCo = Sync()
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    exchange: Exchange = Exchange()
    curriculum: tuple[dict[str, Any], ...] = ()
    """Stages: each has `from_epoch`, and whatever changes then."""


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
        raise ConfigurationError(
            f"{file} is wrong: {error}. Mend it; `potluck init` writes one that is right, to compare with"
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
        logger.warning("%s: %s counts with %s only, and is passed over", file, " and ".join(left_over), of)
    return {**content, "training": {name: value for name, value in training.items() if name not in left_over}}


def manifest_of(found: RunFile, folder: Path) -> Manifest:
    """The first manifest of a run; recipes of one's own are looked for from `folder` on, and executed."""
    from potluck.recipes.catalogue import open_recipe, refer_to  # needs torch, which reading a run.toml does not
    from potluck.recipes.recipe import data_of

    ref = refer_to(found.recipe, folder)
    recipe = open_recipe(ref, found.model, folder / found.recipe)
    first = Settings(
        training=found.training,
        optimizer=found.optimizer,
        schedule=found.schedule,
        data=msgspec.to_builtins(data_of(recipe, found.data)),
        end_epoch=found.end_epoch,
    )
    settings = _planned(first, found.curriculum)
    for entry in settings:
        data_of(recipe, entry.data)
    return Manifest(
        run=found.name,
        recipe=ref,
        model=found.model,
        settings=settings,
        exchange=found.exchange,
        seed=found.seed,
    )


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
