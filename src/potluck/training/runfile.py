"""`run.toml`: a run as its organiser writes it down."""

from __future__ import annotations

from pathlib import Path

import msgspec

from potluck.errors import ConfigurationError
from potluck.hub.subjects import check_run_name
from potluck.messages import Message
from potluck.training.manifest import (
    Count,
    DiLoCo,
    Exchange,
    Manifest,
    OptimizerSpec,
    ScheduleSpec,
    Seed,
    Settings,
    Sync,
)

FILE_NAME = "run.toml"
MAX_FILE_BYTES = 64 * 1024


class RunFile(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in run.toml."""

    name: str
    recipe: str = "stdlib-lm"
    seed: Seed = 0
    end_epoch: Count = 0
    model: dict[str, bool | int | float | str] = {}
    training: Sync | DiLoCo = Sync()
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    exchange: Exchange = Exchange()


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
        found = msgspec.toml.decode(text, type=RunFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{file} is wrong: {error}. Mend it; `potluck init` writes one that is right, to compare with"
        ) from error
    check_run_name(found.name)
    return found


def manifest_of(found: RunFile, folder: Path) -> Manifest:
    """The first manifest of a run; recipes of one's own are looked for from `folder` on, and tried."""
    from potluck.recipes.catalogue import open_recipe, refer_to  # needs torch, which reading a run.toml does not

    ref = refer_to(found.recipe, folder)
    open_recipe(ref, found.model, folder / found.recipe)
    return Manifest(
        run=found.name,
        recipe=ref,
        model=found.model,
        settings=(
            Settings(
                training=found.training,
                optimizer=found.optimizer,
                schedule=found.schedule,
                end_epoch=found.end_epoch,
            ),
        ),
        exchange=found.exchange,
        seed=found.seed,
    )
