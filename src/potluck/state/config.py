"""What a peer does with the run's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from potluck.errors import ConfigurationError
from potluck.state.backups import BackupConfig
from potluck.state.fetcher import FetchConfig, Progress
from potluck.state.serving import ServingConfig
from potluck.state.uploadtargets import UploadTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """What this peer does with the run's state."""

    keep: Literal["auto", "always", "never"] = "auto"
    """Whether to keep states for others. Auto: aux peers do, and a few of the trainers; observers do not."""

    num_trainer_keepers: int = 4
    """How many of the trainers keep states where each decides by itself."""

    num_kept: int = 2
    """How many epochs a keeper has in memory; those that are being fetched stay longer."""

    compare_every_seconds: float = 10.0
    """At most so often this peer compares its state with others' by value, where the digests differ."""

    grace_seconds: float = 10.0
    """How long a coordinator waits, when a run goes on, for a newer state than anybody has offered."""

    cut_every_seconds: float = 60.0
    """How often to make a cut, where this peer coordinates a run with several groups; 0: only when a program asks."""

    folder: Path | None = None
    """For backups and for what is fetched half; None: nothing is written to disk."""

    backups: BackupConfig | None = field(default_factory=BackupConfig)
    """How often to save, and what to keep; None: never save."""

    upload_to: str | UploadTarget | None = None
    """Where each backup is uploaded to, in the background: `hf://USER/REPOSITORY`, or any folder that fsspec knows, as
    `s3://BUCKET/RUN`. One peer of a run is enough."""

    serving: ServingConfig = field(default_factory=ServingConfig)
    """How much to give to others."""

    fetching: FetchConfig = field(default_factory=FetchConfig)
    """How patiently to fetch."""

    on_progress: Progress | None = field(default=None, repr=False)
    """Told, on the event loop, how many bytes of a state are here, of how many, while it is fetched."""

    def __post_init__(self) -> None:
        if self.num_kept < 1 or self.num_trainer_keepers < 1:
            raise ConfigurationError(f"{self}: num_kept and num_trainer_keepers are at least 1")
        if not self.compare_every_seconds > 0:
            raise ConfigurationError(f"compare_every_seconds is {self.compare_every_seconds}: it must be more than 0")
        if not self.grace_seconds >= 0 or not self.cut_every_seconds >= 0:
            raise ConfigurationError(
                f"grace_seconds={self.grace_seconds}, cut_every_seconds={self.cut_every_seconds}: they are 0 or more"
            )
        if self.upload_to is not None and (self.folder is None or self.backups is None):
            raise ConfigurationError(
                "upload_to sends backups, and none are written: give a folder, and do not turn them off"
            )
