"""Options that belong together: one argument of the function, many of the command line.

    @grouped
    def join(link: o.Link = "", *, network: NetworkOptions, as_json: o.AsJson = False) -> None: ...

`potluck join --help` shows every field of NetworkOptions as an option, under the group's title; `join` gets them as one
value. So commands that take the same options share them, and what they mean is checked in one place.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_type_hints

from potluck.cli import options as o

if TYPE_CHECKING:
    from potluck.training.trainer.hours import Hours


PRECISIONS = ("float32", "bfloat16", "float16")  # those of training/trainer/precision.py, which takes torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonOptions:
    """Who takes part."""

    title: ClassVar[str] = "You"

    name: o.Name = ""
    message: o.Message = ""
    wait_minutes: o.WaitMinutes = 60.0
    identity_path: o.IdentityPath = None
    sync_args: o.SyncArgs = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """How this machine reaches the others."""

    title: ClassVar[str] = "Network"

    client_mode: o.ClientMode = False
    websocket: o.WebSocket = False
    relay_only: o.RelayOnly = False
    listen: o.Listen = None
    announce: o.Announce = None
    trusted_lan: o.TrustedLan = False
    bandwidth: o.Bandwidth = ""

    def __post_init__(self) -> None:
        o.bandwidth_of(self.bandwidth)  # raises ConfigurationError for what is none


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupOptions:
    """Where and how often this machine saves the run's state."""

    title: ClassVar[str] = "Backups"

    backup_every_step: o.BackupEveryStep = 0
    state_path: o.StatePath = None

    def __post_init__(self) -> None:
        from potluck.errors import ConfigurationError

        if self.backup_every_step < 0:
            raise ConfigurationError(
                f"--backup-every-step {self.backup_every_step}: it is a number of epochs, or 0 for never"
            )
        if self.state_path is not None and not self.backup_every_step:
            raise ConfigurationError(
                f"--state-path {self.state_path} names the folder of backups, but not how often to write one: add "
                "--backup-every-step 100"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperBackupOptions(BackupOptions):
    """The same for who is there to keep the state: it saves unless told not to."""

    backup_every_step: o.BackupEveryStep = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How this machine trains."""

    title: ClassVar[str] = "Training"

    recipe: o.RecipeFile = None
    yes: o.Yes = False
    batch_size: o.BatchSize = None
    n_workers: o.NumWorkers = 1
    device: o.Device = ""
    precision: o.Precision = ""
    compile: o.Compile = False
    shard: o.Shard = None
    threads: o.Threads = None
    max_memory: o.MaxMemory = ""
    max_steps: o.MaxSteps = None
    schedule: o.Schedule = ""
    hand_in_seconds: o.HandInSeconds = 2.5
    stage: o.Stage = None
    feed: o.FeedData = False
    notice: o.Notice = None

    def __post_init__(self) -> None:
        if self.precision not in ("", *PRECISIONS):
            from potluck.errors import ConfigurationError

            raise ConfigurationError(f"--precision {self.precision}: choose one of {', '.join(PRECISIONS)}")
        _ = self.max_memory_bytes, self.hours  # raise ConfigurationError for what is none

    @property
    def max_memory_bytes(self) -> int | None:
        """The most memory to use."""
        memory = o.bytes_of(self.max_memory, "--max-memory")
        return int(memory) if memory is not None else None

    @property
    def hours(self) -> Hours | None:
        """When to train; None: always."""
        if not self.schedule:
            return None
        from potluck.training.trainer.hours import Hours

        return Hours.parse(self.schedule)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose groups of options are options one by one on the command line."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}

    def spread() -> Iterator[inspect.Parameter]:
        for parameter in inspect.signature(command).parameters.values():
            if parameter.name in groups:
                yield from _parameters(groups[parameter.name])
            else:
                yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        command(**values)

    parameters = list(spread())
    del run.__dict__["__wrapped__"]  # typer would look through it, at the groups
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        kind, option = get_args(hints[field.name])
        option = copy.copy(option)
        option.rich_help_panel = group.title
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[kind, option]
        )
