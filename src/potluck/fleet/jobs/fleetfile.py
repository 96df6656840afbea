"""fleet.toml: which jobs a fleet runs, where, and which queues they use.

    [queues.experience]
    when_full = "drop"

    [jobs.cartpole]
    machine = "annas-laptop"                # or needs = { cpus = 4, memory = "8GB" }
    command = "python policy.py --task cartpole"
    files = ["policy.py"]
    queues = ["experience=put"]

All that can be wrong with it is said before anything is changed.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from potluck.errors import ConfigurationError
from potluck.fleet.jobs.job import Limits, Mount, Restart, check_job_name
from potluck.hub.queues import QueueDefinition, Rights, parse_rights
from potluck.hub.subjects import check_group_name

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
OWN_PREFIX = "POTLUCK_"
RUN_COMMAND = ("python", "-m", "potluck.cli", "train")


class Needs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a machine must have for a job."""

    cpus: float = 0.0
    memory: str | int = 0
    gpus: int = 0
    disk: str | int = 0
    engine: bool = False  # one for containers; needed by itself where the job has an image

    @property
    def memory_bytes(self) -> int:
        """Of the machine, in all."""
        return amount_of(self.memory)

    @property
    def disk_bytes(self) -> int:
        """Free."""
        return amount_of(self.disk)


class _LimitsEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cpus: float = 0.0
    memory: str | int = 0
    gpus: int = 0


class _JobEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One [jobs.NAME] table as it is written."""

    image: str = ""
    build: str = ""
    command: str | list[str] = ""
    run: str = ""
    machine: str = ""
    needs: Needs | None = None
    environment: dict[str, str | int | float | bool] = {}
    secrets: list[str] | dict[str, str] = []
    mounts: list[str] = []
    limits: _LimitsEntry = _LimitsEntry()
    restart: Literal["always", "on-failure", "never"] | Restart = "on-failure"
    files: list[str] = []
    queues: list[str] = []
    groups: list[str] = []
    network: Literal["", "host", "none"] = ""
    stop_seconds: float = 20.0


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    jobs: dict[str, _JobEntry]
    queues: dict[str, dict[str, Any]] = {}


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A job as fleet.toml wants it: not yet on a machine, its files not yet packed."""

    name: str
    image: str = ""
    build: Path | None = None
    command: tuple[str, ...] = ()
    run: str = ""
    machine: str = ""
    needs: Needs = Needs()
    environment: dict[str, str] = {}
    secrets: dict[str, str] = {}  # name: the file it is in; empty: an environment variable of that name
    mounts: tuple[Mount, ...] = ()
    limits: Limits = Limits()
    restart: Restart = Restart()
    files: tuple[str, ...] = ()
    queues: Rights = {}
    groups: tuple[str, ...] = ()
    network: Literal["", "host", "none"] = ""
    stop_seconds: float = 20.0

    @property
    def is_container(self) -> bool:
        """Whether it runs in a container; else it is a plain process."""
        return bool(self.image or self.build)


class FleetFile(msgspec.Struct, frozen=True, kw_only=True):
    """All that a fleet.toml says."""

    folder: Path
    jobs: tuple[JobPlan, ...]
    queues: tuple[QueueDefinition, ...] = ()


def read_fleet_file(path: Path) -> FleetFile:
    """The file, checked; ConfigurationError says what is wrong and where."""
    path = path / "fleet.toml" if path.is_dir() else path
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"there is no {path}: name your fleet.toml, or the folder that has it") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    try:
        return parse(content, path.parent)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def parse(content: dict[str, Any], folder: Path) -> FleetFile:
    """What the file means. Paths are taken from `folder`."""
    try:
        file = msgspec.convert(content, _File)
    except msgspec.ValidationError as error:
        raise ConfigurationError(_plain(error)) from error
    return FleetFile(
        folder=folder,
        jobs=tuple(_job(name, entry, folder) for name, entry in sorted(file.jobs.items())),
        queues=tuple(_queue(name, entry) for name, entry in sorted(file.queues.items())),
    )


def amount_of(value: str | int) -> int:
    """`512MiB` or `4GB` in bytes; ConfigurationError for what is not an amount."""
    if isinstance(value, int):
        if value < 0:
            raise ConfigurationError(f"{value} is not an amount of bytes: write it as in 4GB")
        return value
    found = _AMOUNT.fullmatch(value.strip())
    if found is None:
        raise ConfigurationError(f"{value!r} is not an amount: write it as in 4GB or 512MiB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].lower()])


def _job(name: str, entry: _JobEntry, folder: Path) -> JobPlan:
    check_job_name(name)
    try:
        command = tuple(shlex.split(entry.command) if isinstance(entry.command, str) else entry.command)
    except ValueError as error:
        raise ConfigurationError(f"the command of {name} cannot be split into words ({error}): write a list") from error
    if entry.image and entry.build:
        raise ConfigurationError(f"{name} names both an image and a folder to build one from: leave one out")
    if entry.run:
        if command:
            raise ConfigurationError(f"{name} is a trainer of {entry.run}: it has no command of its own")
        command = RUN_COMMAND
        if entry.groups:
            raise ConfigurationError(
                f"{name} is a trainer of {entry.run}, and the recipe of that run names the group: leave out groups"
            )
    if not (command or entry.image or entry.build):
        raise ConfigurationError(f"{name} says nothing to run: give it a command, an image, build or run")
    if entry.machine and entry.needs is not None:
        raise ConfigurationError(f"{name} names a machine and what it needs: leave one out")
    if not entry.machine and entry.needs is None:
        raise ConfigurationError(
            f"where shall {name} run? Name a machine (`potluck fleet machines` lists them), or what it needs, as in "
            "needs = { cpus = 2 }"
        )
    environment = {key: _text(value) for key, value in sorted(entry.environment.items())}
    secrets = dict.fromkeys(entry.secrets, "") if isinstance(entry.secrets, list) else entry.secrets
    for key in (*environment, *secrets):
        if key.startswith(OWN_PREFIX):
            raise ConfigurationError(f"{key} of {name}: names that begin with {OWN_PREFIX} are Potluck's own")
    for file in entry.files:
        path = folder / file
        if not path.exists():
            raise ConfigurationError(f"{name} sends {file} along, and there is no {path}")
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigurationError(f"{name} sends {file} along, which is not below {folder}: copy it there")
    needs = entry.needs or Needs()
    _ = needs.memory_bytes, needs.disk_bytes  # what is wrong with them is said now
    return JobPlan(
        name=name,
        image=entry.image,
        build=folder / entry.build if entry.build else None,
        command=command,
        run=entry.run,
        machine=entry.machine,
        needs=needs,
        environment=environment,
        secrets=dict(sorted(secrets.items())),
        mounts=tuple(_mount(text, name) for text in entry.mounts),
        limits=Limits(cpus=entry.limits.cpus, memory_bytes=amount_of(entry.limits.memory), gpus=entry.limits.gpus),
        restart=entry.restart if isinstance(entry.restart, Restart) else Restart(when=entry.restart),
        files=tuple(entry.files),
        queues=parse_rights(entry.queues),
        groups=tuple(check_group_name(group) for group in entry.groups),
        network=entry.network,
        stop_seconds=entry.stop_seconds,
    )


def _mount(text: str, job: str) -> Mount:
    source, _, rest = text.partition(":")
    target, _, rights = rest.partition(":")
    if not target or rights not in ("", "ro", "rw"):
        raise ConfigurationError(f"the mount {text!r} of {job}: write it as /data:/data, or /data:/data:rw")
    return Mount(source=source, target=target, read_only=rights != "rw")


def _queue(name: str, entry: dict[str, Any]) -> QueueDefinition:
    if "name" in entry:
        raise ConfigurationError(f"the queue {name} has its name already: leave out name")
    known = {field.name for field in msgspec.structs.fields(QueueDefinition)}
    if unknown := sorted(set(entry) - known):
        raise ConfigurationError(f"the queue {name} has no setting {unknown[0]!r} (it has: {', '.join(sorted(known))})")
    given = {**entry, "max_bytes": amount_of(entry["max_bytes"])} if "max_bytes" in entry else entry
    try:
        return msgspec.convert({**given, "name": name}, QueueDefinition)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"the queue {name}: {_plain(error)}") from error


def _text(value: str | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plain(error: msgspec.ValidationError) -> str:
    """Msgspec's message with the place as it is written in the file."""
    text, _, place = str(error).partition(" - at `")
    place = place.removesuffix("`").removeprefix("$").removeprefix(".")
    return f"{place}: {text}" if place else text
