"""Slots: what each rented machine is for, and the speed of its line (pure).

A slot is a place that one machine at a time fills. It keeps its number and its tier for the life of an experiment, so a
machine that takes the place of a preempted one gets the same line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from potluck.errors import ConfigurationError

SlotRole = Literal["worker", "aux"]
MAX_SLOTS = 1000
_TIER = re.compile(r"(?:(?P<count>\d+)\s*[x×]\s*)?(?P<mbit>\d+(?:\.\d+)?)")


@dataclass(frozen=True, order=True, slots=True, kw_only=True)
class Slot:
    """A place for one machine."""

    role: SlotRole
    index: int
    bandwidth_mbit: float | None = None  # None: as fast as the line is

    @property
    def name(self) -> str:
        """Return `worker-3`, as tags and logs have it."""
        return f"{self.role}-{self.index}"


def parse_tiers(text: str) -> list[tuple[int, float]]:
    """Read `4x200,8x100,4x50`: how many workers have which line, in Mbit/s; `100` alone is for one worker."""
    tiers: list[tuple[int, float]] = []
    for part in text.split(","):
        match = _TIER.fullmatch(part.strip())
        if match is None:
            raise ConfigurationError(f"{part.strip()!r} is no tier of lines: write COUNTxMBIT, as in 4x200,8x100,4x50")
        count, mbit = int(match["count"] or 1), float(match["mbit"])
        if count < 1 or mbit <= 0:
            raise ConfigurationError(f"{part.strip()!r} is no tier of lines: both numbers must be above 0")
        tiers.append((count, mbit))
    return tiers


def slots(
    *, num_workers: int, num_aux: int, bandwidth: str = "", aux_bandwidth_mbit: float | None = None
) -> list[Slot]:
    """Return the slots of an experiment: workers with their tiers in order, then aux peers."""
    if num_workers < 0 or num_aux < 0 or not 0 < num_workers + num_aux <= MAX_SLOTS:
        raise ConfigurationError(
            f"{num_workers} workers and {num_aux} aux peers: there must be from 1 to {MAX_SLOTS} machines in all"
        )
    lines: list[float | None] = [None] * num_workers
    if bandwidth:
        tiers = parse_tiers(bandwidth)
        lines = [mbit for count, mbit in tiers for _ in range(count)]
        if len(lines) == 1:
            lines *= num_workers
        if len(lines) != num_workers:
            raise ConfigurationError(
                f"--bandwidth {bandwidth} has lines for {len(lines)} workers, and --workers asks for {num_workers}"
            )
    workers = [Slot(role="worker", index=i, bandwidth_mbit=mbit) for i, mbit in enumerate(lines)]
    return workers + [Slot(role="aux", index=i, bandwidth_mbit=aux_bandwidth_mbit) for i in range(num_aux)]
