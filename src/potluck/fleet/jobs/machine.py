"""What a machine has and how busy it is, and how its jobs are doing: what an agent reports every few seconds.

Shown, never trusted.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import psutil

from potluck.messages import Message

logger = logging.getLogger(__name__)

TOPIC = "fleet"  # reports: p.RUN.news.PEER.fleet
ASK_TOPIC = "fleet-ask"  # somebody wants to hear all reports now
MAX_REPORT_BYTES = 64 * 1024
NVIDIA_SECONDS = 5.0

Words = Annotated[str, msgspec.Meta(max_length=600)]
JobState = Literal["running", "finished", "waiting", "stopped", "failed", "refused", "preparing", "unknown"]


class MachineFacts(Message, frozen=True, kw_only=True):
    """What a machine has, and how much of it is used."""

    cpus: int = 0
    memory_bytes: int = 0
    memory_used_bytes: int = 0
    cpu_percent: float = 0.0  # of all cores together, 0 to 100
    load: float = 0.0  # processes that want a core, over the last minute
    disk_free_bytes: int = 0
    disk_bytes: int = 0
    gpus: Annotated[tuple[Words, ...], msgspec.Meta(max_length=64)] = ()
    gpu_percent: Annotated[tuple[float, ...], msgspec.Meta(max_length=64)] = ()
    engines: Annotated[tuple[Words, ...], msgspec.Meta(max_length=8)] = ()
    system: Words = ""


class JobReport(Message, frozen=True, kw_only=True):
    """How one job is doing."""

    name: Words
    state: JobState
    restarts: int = 0
    since: float = 0.0  # hub time: when it started, or ended
    last_words: Words = ""  # in plain language, why it is not running
    cpu_percent: float = 0.0  # of one core
    memory_bytes: int = 0
    metrics: Annotated[dict[Words, float], msgspec.Meta(max_length=32)] = {}  # the newest of each that it logged


class MachineReport(Message, frozen=True, kw_only=True):
    """One machine at one moment."""

    name: Words
    allow: Words = ""  # what its owner lets jobs do
    facts: MachineFacts = MachineFacts()
    revision: int = 0  # of the document that it goes by
    jobs: Annotated[tuple[JobReport, ...], msgspec.Meta(max_length=200)] = ()
    version: Words = ""


class Observer:
    """Looks at this machine."""

    def __init__(self, folder: Path, engines: tuple[str, ...] = ()) -> None:
        self._folder = folder
        self._engines = engines
        self._has_nvidia = shutil.which("nvidia-smi") is not None
        psutil.cpu_percent()  # the first call has nothing to compare with

    def look(self) -> MachineFacts:
        """What it has now. May take a while where there is a GPU: for a thread."""
        memory, disk = psutil.virtual_memory(), shutil.disk_usage(self._folder)
        gpus = self._gpus()
        return MachineFacts(
            cpus=_cores(),
            memory_bytes=memory.total,
            memory_used_bytes=memory.total - memory.available,
            cpu_percent=psutil.cpu_percent(),
            load=os.getloadavg()[0],
            disk_free_bytes=disk.free,
            disk_bytes=disk.total,
            gpus=tuple(name for name, _ in gpus),
            gpu_percent=tuple(percent for _, percent in gpus),
            engines=self._engines,
            system=" ".join(os.uname()[i] for i in (0, 2, 4)),
        )

    def _gpus(self) -> list[tuple[str, float]]:
        if not self._has_nvidia:
            return []
        asked = ["nvidia-smi", "--query-gpu=name,utilization.gpu", "--format=csv,noheader,nounits"]
        try:
            said = subprocess.run(asked, capture_output=True, text=True, timeout=NVIDIA_SECONDS, check=True).stdout
        except (OSError, subprocess.SubprocessError) as error:
            logger.debug("the GPUs do not answer: %s", error)
            return []
        return [parsed for line in said.splitlines() if (parsed := _gpu(line)) is not None]


def _gpu(line: str) -> tuple[str, float] | None:
    name, _, percent = line.rpartition(",")
    try:
        return name.strip()[:100], float(percent)
    except ValueError:
        return (name.strip()[:100], 0.0) if name.strip() else None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
