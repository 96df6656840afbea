"""What a job is, and what a machine's owner lets jobs do (pure).

A job belongs to one machine. Two jobs with the same `digest` do the same: a machine starts a job anew only when that
changes. A `restart` by hand raises `generation`, which is part of it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Literal

import msgspec

from potluck.errors import ConfigurationError
from potluck.hub.queues import Rights, check_rights
from potluck.hub.subjects import PEER_ID, check_group_name
from potluck.messages import Message, encode

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
DIGEST = re.compile(r"[0-9a-f]{64}")

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=30 * 86400.0)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class Limits(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most that a job may use; 0: no limit (and no GPU)."""

    cpus: Annotated[float, msgspec.Meta(ge=0.0, le=4096.0)] = 0.0
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**50)] = 0
    gpus: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0


class Restart(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What follows when a job ends. The pause doubles with each failure, and begins anew after a good while."""

    when: Literal["always", "on-failure", "never"] = "on-failure"
    first_seconds: Seconds = 1.0
    longest_seconds: Seconds = 60.0
    healthy_seconds: Seconds = 60.0  # a job that ran for so long had a good start: its failures are forgotten
    tries: Annotated[int, msgspec.Meta(ge=0, le=10**6)] = 0  # failures in a row after which it is given up; 0: never

    def pause_seconds(self, failures: int) -> float:
        """How long to wait before the next start, after so many failures in a row."""
        return min(self.first_seconds * 2.0 ** min(max(failures - 1, 0), 40), self.longest_seconds)


class Mount(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A folder of the machine that a container sees."""

    source: Text
    target: Text
    read_only: bool = True

    def __post_init__(self) -> None:
        for path in (self.source, self.target):
            if not path.startswith("/") or ".." in PurePosixPath(path).parts:
                raise ConfigurationError(f"{path!r} cannot be mounted: write whole paths, as in /data:/data:ro")


class Parcel(Message, frozen=True, kw_only=True):
    """Something that the host's parcel folder holds under its digest (parcels.py)."""

    digest: str
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**42)]

    def __post_init__(self) -> None:
        if not DIGEST.fullmatch(self.digest):
            raise ConfigurationError(f"{self.digest[:80]!r} is not a digest")


class Job(Message, frozen=True, kw_only=True):
    """One job on one machine, as an organiser wants it."""

    name: str
    machine: str  # the peer id of the machine's agent
    image: Text = ""  # a container of this image; empty: a plain process
    image_parcel: Parcel | None = None  # that image, where the machine does not have it yet
    command: Annotated[tuple[Text, ...], msgspec.Meta(max_length=256)] = ()
    environment: dict[str, Text] = {}
    mounts: Annotated[tuple[Mount, ...], msgspec.Meta(max_length=64)] = ()
    limits: Limits = Limits()
    restart: Restart = Restart()
    network: Literal["", "host", "none"] = ""  # of a container; empty: one of its own
    files: Parcel | None = None  # put into its working folder before it starts
    queues: Rights = {}
    groups: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()  # of the fleet's own run, that it trains in
    stop_seconds: Seconds = 20.0  # from the notice to the end
    state: Literal["running", "stopped"] = "running"
    generation: int = 0
    sealed: bytes = b""  # secrets of its environment, for the machine alone to open (sealing.py)
    sealed_mark: str = ""  # changes with the secrets; says nothing about them
    invite: str = ""  # the id of the invite by which it uses its queues

    def __post_init__(self) -> None:
        check_job_name(self.name)
        if not PEER_ID.fullmatch(self.machine):
            raise ConfigurationError(f"the machine of {self.name} is {self.machine[:80]!r}: that is not a peer id")
        if not self.image and not self.command:
            raise ConfigurationError(f"the job {self.name} has neither an image nor a command")
        if not self.image and (self.mounts or self.network):
            raise ConfigurationError(f"the job {self.name} is a plain process: it has no mounts and no network")
        for variable in self.environment:
            if not VARIABLE.fullmatch(variable):
                raise ConfigurationError(f"{variable[:80]!r} cannot name an environment variable of {self.name}")
        check_rights(self.queues)
        for group in self.groups:
            check_group_name(group)

    @property
    def kind(self) -> Literal["process", "container"]:
        """What it runs as."""
        return "container" if self.image else "process"

    @property
    def digest(self) -> str:
        """The same for jobs between which nothing has to be started anew."""
        kept = msgspec.structs.replace(
            self, restart=Restart(), state="running", sealed=b"", invite="", stop_seconds=0.0
        )
        sorted_kept = msgspec.structs.replace(
            kept, environment=dict(sorted(kept.environment.items())), queues=dict(sorted(kept.queues.items()))
        )
        return hashlib.sha256(encode(sorted_kept)).hexdigest()


def check_job_name(name: str) -> str:
    """The name itself, or ConfigurationError."""
    if not NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name[:60]!r} cannot name a job: use 1 to 40 lower-case letters, digits and inner hyphens"
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What a machine's owner lets jobs do there."""

    process: bool = False
    """Plain processes, with all rights of the user that runs the agent."""

    images: tuple[str, ...] = ()
    """Images of containers, as names with * and ?."""

    mounts: tuple[str, ...] = ()
    """Folders that containers may see, with all that is below them."""

    writable: tuple[str, ...] = ()
    """Those of them that they may write to."""

    gpus: bool = False
    host_network: bool = False

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Allowance:
        """As people write it: process, images=NAME, mounts=/data, mounts=/scratch:rw, gpus, network=host."""
        words = [word.strip() for text in texts for word in text.split(",") if word.strip()]
        found: dict[str, list[str]] = {"images": [], "mounts": [], "writable": []}
        flags: set[str] = set()
        last = ""
        for word in words:
            name, equals, value = word.partition("=")
            if word in ("process", "gpus") or word == "network=host":
                flags.add(word)
                last = ""
            elif equals and name in ("images", "mounts") and value:
                last = name
                _add(found, last, value)
            elif last:  # images=a,b
                _add(found, last, word)
            else:
                raise ConfigurationError(
                    f"--allow {word!r} is not known: write process, images=NAME, mounts=/FOLDER (or /FOLDER:rw), gpus "
                    "or network=host"
                )
        return cls(
            process="process" in flags,
            images=tuple(found["images"]),
            mounts=tuple(found["mounts"]),
            writable=tuple(found["writable"]),
            gpus="gpus" in flags,
            host_network="network=host" in flags,
        )

    def words(self) -> str:
        """The same, as people write it."""
        parts = ["process"] if self.process else []
        parts += [f"images={','.join(self.images)}"] if self.images else []
        shown = [f"{path}:rw" if path in self.writable else path for path in self.mounts]
        parts += [f"mounts={','.join(shown)}"] if shown else []
        parts += ["gpus"] if self.gpus else []
        parts += ["network=host"] if self.host_network else []
        return ",".join(parts)

    def refusal(self, job: Job) -> str:
        """Why the owner does not let this job run; empty when they do."""
        if not job.image and not self.process:
            return "the machine's owner allows no plain processes (`potluck fleet agent --allow process`)"
        if job.image and not any(fnmatch.fnmatchcase(job.image, pattern) for pattern in self.images):
            return f"the machine's owner does not allow the image {job.image} (--allow images={job.image})"
        for mount in job.mounts:
            allowed = self.mounts if mount.read_only else self.writable
            if not any(PurePosixPath(mount.source).is_relative_to(folder) for folder in allowed):
                rights = "" if mount.read_only else ":rw"
                return f"the machine's owner allows no mount of {mount.source} (--allow mounts={mount.source}{rights})"
        if job.limits.gpus and not self.gpus:
            return "the machine's owner allows no GPUs (--allow gpus)"
        if job.network == "host" and not self.host_network:
            return "the machine's owner does not allow the machine's own network (--allow network=host)"
        return ""


def _add(found: dict[str, list[str]], name: str, value: str) -> None:
    if name == "images":
        found["images"].append(value)
        return
    folder, _, rights = value.partition(":")
    if not folder.startswith("/") or rights not in ("", "ro", "rw"):
        raise ConfigurationError(f"--allow mounts={value}: write whole paths, as in /data or /scratch:rw")
    found["mounts"].append(folder)
    if rights == "rw":
        found["writable"].append(folder)
