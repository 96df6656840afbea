"""Where a run's files are on this machine."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from potluck.errors import ConfigurationError
from potluck.hub.subjects import check_run_name
from potluck.run.hostrecord import HostRecord, read_record


def run_folder(run: str, folder: Path | None) -> Path:
    """The folder of a run that is hosted here: the one named, or the one in the user's data folder."""
    return folder or Path(platformdirs.user_data_dir("potluck")) / "runs" / run


def hosted_run(run: str, folder: Path | None) -> tuple[Path, HostRecord]:
    """The folder and record of a run that this machine hosts; ConfigurationError when it hosts none of that name."""
    where = run_folder(check_run_name(run), folder)
    record = read_record(where)
    if record is None:
        raise ConfigurationError(
            f"no run is hosted in {where}: start one with `potluck host --run {run}`, or name its folder with --folder"
        )
    return where, record
