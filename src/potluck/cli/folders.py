"""Where a run's files are on this machine."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from potluck.errors import ConfigurationError, HubUnavailableError
from potluck.hub.subjects import check_run_name
from potluck.run.hostrecord import HOST_FILE, HostRecord, read_record

DEFAULT_RUN = "my-first-run"


def run_folder(run: str, folder: Path | None) -> Path:
    """The folder of a run that is hosted here: the one named, or the one in the user's data folder."""
    return folder or Path(platformdirs.user_data_dir("potluck")) / "runs" / run


def states_folder(run: str, peer: str) -> Path:
    """Where a peer of this machine keeps backups of a run's state."""
    return Path(platformdirs.user_data_dir("potluck")) / "states" / run / peer[:12]


def run_of_this_folder() -> str:
    """The name in the run.toml of the present folder; empty where there is none that can be read."""
    return said_in(Path("run.toml"), "name")


def recipe_of(named: str) -> tuple[str, Path]:
    """A recipe's name and the folder it is in, by its name, its file, a run.toml or a run's folder.

    Without any, that of the run.toml in the present folder. ConfigurationError where that names none.
    """
    run_file = Path(named or "run.toml")
    run_file = run_file / "run.toml" if run_file.is_dir() else run_file
    if named and run_file.suffix != ".toml":
        return named, Path()
    recipe = said_in(run_file, "recipe")
    if not recipe:
        what = f"{run_file} names no recipe" if run_file.exists() else f"there is no {run_file}"
        raise ConfigurationError(
            f"which recipe? {what}. Name a recipe, its file, or the folder of a run, as in potluck download data my-run"
        )
    return recipe, run_file.parent


def said_in(run_file: Path, key: str) -> str:
    """The contents of a run.toml, without the checks of training/manifest/runfile.py; empty if it cannot be read."""
    try:
        said = tomllib.loads(run_file.read_text(encoding="utf-8")).get(key, "")
    except (OSError, ValueError):  # `potluck host` says what is wrong with it
        return ""
    return said if isinstance(said, str) else ""


def backups_of_run(run: str, folder: Path | None) -> tuple[Path, str]:
    """The folder with a run's backups and its name, by its host here or else a peer; ConfigurationError tells."""
    try:
        where, record = hosted_run(run, folder)
    except ConfigurationError as error:
        run = check_run_name(run or run_of_this_folder() or DEFAULT_RUN)
        found = sorted(states_folder(run, "*").parent.glob("*/backups")) if folder is None else []
        if not found:
            raise ConfigurationError(f"{error}. For a peer's own backups, name its --state-path by --path") from error
        if len(found) > 1:
            there = ", ".join(str(each.parent) for each in found)
            raise ConfigurationError(f"several peers have backups of {run} here, name one by --path: {there}") from None
        return found[0], run
    return where / "states" / "backups", record.run


def hosted_run(run: str, folder: Path | None) -> tuple[Path, HostRecord]:
    """The folder and record of a run that this machine hosts; ConfigurationError when it hosts none of that name.

    Without a name it is the run whose run.toml is in the present folder, or the only one that is hosted here.
    """
    run = run or run_of_this_folder() or (_only_one() if folder is None else "") or DEFAULT_RUN
    where = run_folder(check_run_name(run), folder)
    record = read_record(where)
    if record is None:
        here = _hosted(where.parent) if folder is None else []
        other = f"This machine hosts {', '.join(here)}: name it with --run. Or " if here else ""
        start = f"start one with `potluck host --run {run}`, or name its folder with --folder"
        raise ConfigurationError(f"no run is hosted in {where}{'. ' if here else ': '}{other}{start}")
    return where, record


def _hosted(runs: Path) -> list[str]:
    """The names of the runs that this machine hosts."""
    return sorted(each.parent.name for each in runs.glob(f"*/{HOST_FILE}"))


def _only_one() -> str:
    """The run that this machine hosts; empty where there are several, or none."""
    here = _hosted(run_folder(DEFAULT_RUN, None).parent)
    return here[0] if len(here) == 1 else ""


@contextmanager
def asking_host(run: str) -> Iterator[None]:
    """If a command on the host's machine finds no hub, its error says how to start the host."""
    try:
        yield
    except HubUnavailableError as error:
        raise HubUnavailableError(
            f"the host of {run} does not seem to run: start it with `potluck host`. {error}"
        ) from error
