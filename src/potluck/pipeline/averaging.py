"""The average of one unit over the servers that hold a part of it: all or nothing.

`StageGroup` is the seam. `LinkedGroup` is a plain implementation over links: each contributor sends its whole sum to
every other member, and each adds them in the same order, so that all have the same bits. That costs R − 1 times the
unit per server, which is right for the one to three servers that a stage mostly has. A contribution carries the ids
that are in its sum; the members report them, and the ledger commits only what partitions the step.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from potluck.errors import ProtocolError
from potluck.link.dispatch import Incoming
from potluck.link.links import Links
from potluck.pipeline.messages import Contribution, Contributor, Part, UnitAverage
from potluck.round.codecs.memory import tensor_over
from potluck.round.codecs.reductions import is_finite, norm

PART_VALUES = 1 << 20
Key = tuple[int, int, int]
"""(step, attempt, unit)."""


@dataclass(frozen=True)
class Share:
    """What one stage of this server contributes."""

    stage: int
    total: Tensor
    ids: tuple[int, ...]


@dataclass(frozen=True)
class AverageTask:
    """One unit of one attempt."""

    step: int
    attempt: int
    unit: int
    contributors: tuple[Contributor, ...]
    listeners: tuple[str, ...]
    divisor: float
    """Samples of the step, times the loss scale."""


class StageGroup(Protocol):
    """Averages a unit among its members."""

    async def average(
        self, task: AverageTask, shares: Sequence[Share], *, timeout_seconds: float
    ) -> tuple[Tensor, UnitAverage]:
        """The average, and the report for the ledger; raises unless every contribution came whole."""

    def forget(self, step: int, attempt: int) -> None:
        """Attempts before this one are over."""


@dataclass
class _Gathered:
    """What has come of one unit's contributions."""

    totals: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    ids: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    missing: dict[tuple[str, int], int] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def is_whole(self, contributor: tuple[str, int]) -> bool:
        return self.missing.get(contributor) == 0


class LinkedGroup:
    """Every member sends to every other."""

    def __init__(self, links: Links, self_id: str, sizes: Sequence[int]) -> None:
        """`sizes`: how many values each unit has."""
        self._links = links
        self._self_id = self_id
        self._sizes = tuple(sizes)
        self._gathered: dict[Key, _Gathered] = {}
        self._current = (0, 0)
        links.handle(Part, self._part_came)

    def close(self) -> None:
        """Take nothing more. Idempotent."""
        self._links.unhandle(Part)
        self._gathered.clear()

    def forget(self, step: int, attempt: int) -> None:
        """Attempts before this one are over."""
        self._current = (step, attempt)
        for key in [key for key in self._gathered if key[:2] < self._current]:
            del self._gathered[key]

    def _part_came(self, incoming: Incoming[Part]) -> None:
        part, frames = incoming.message, incoming.frames
        if (part.step, part.attempt) < self._current:
            return
        if part.unit >= len(self._sizes) or part.num_values != self._sizes[part.unit] or len(frames) != 1:
            raise ProtocolError(f"a part of {part.num_values} values of unit {part.unit} does not fit here: dropped")
        # A member that is faster may be one attempt ahead of what we have heard, not more.
        if (part.step, part.attempt) > (self._current[0] + 1, 0) and part.step != self._current[0]:
            raise ProtocolError(f"a part of step {part.step}, while this server is at {self._current[0]}: dropped")
        count = frames[0].nbytes // 4
        if count * 4 != frames[0].nbytes or part.offset + count > part.num_values:
            raise ProtocolError("a part that does not fit into its unit: dropped")
        gathered = self._gathered.setdefault((part.step, part.attempt, part.unit), _Gathered())
        name = (incoming.sender, part.stage)
        if name not in gathered.missing:
            gathered.totals[name] = torch.zeros(part.num_values)
            gathered.missing[name] = part.num_values if part.ids else 0
            gathered.ids[name] = part.ids
        if count and gathered.missing[name] >= count:
            values = tensor_over(frames[0], torch.float32, count=count)
            gathered.totals[name][part.offset : part.offset + count] = values
            gathered.missing[name] -= count
        gathered.changed.set()

    async def average(
        self, task: AverageTask, shares: Sequence[Share], *, timeout_seconds: float
    ) -> tuple[Tensor, UnitAverage]:
        """Send our shares, wait for all others, add."""
        gathered = self._gathered.setdefault((task.step, task.attempt, task.unit), _Gathered())
        for share in shares:
            name = (self._self_id, share.stage)
            gathered.totals[name], gathered.ids[name], gathered.missing[name] = share.total, share.ids, 0
        others = sorted({c.server for c in task.contributors}.union(task.listeners) - {self._self_id})
        async with asyncio.timeout(timeout_seconds):
            async with asyncio.TaskGroup() as sending:
                for peer in others:
                    for share in shares:
                        sending.create_task(self._send(peer, task, share, timeout_seconds))
            wanted = [(contributor.server, contributor.stage) for contributor in task.contributors]
            while not all(gathered.is_whole(name) for name in wanted):
                gathered.changed.clear()
                await gathered.changed.wait()
        average, digest, squared = await asyncio.to_thread(_reduce, gathered, sorted(wanted), task.divisor)
        contributions = tuple(
            Contribution(server=server, stage=stage, ids=gathered.ids[server, stage]) for server, stage in wanted
        )
        return average, UnitAverage(unit=task.unit, digest=digest, squared_norm=squared, contributions=contributions)

    def claims(self, step: int, attempt: int, server: str) -> dict[tuple[int, int], tuple[tuple[int, ...], Tensor]]:
        """What a server contributed, by unit and stage: its ids, and its sum."""
        return {
            (unit, stage): (gathered.ids[name, stage], total)
            for (at, tried, unit), gathered in self._gathered.items()
            if (at, tried) == (step, attempt)
            for (name, stage), total in gathered.totals.items()
            if name == server
        }

    async def _send(self, peer: str, task: AverageTask, share: Share, timeout_seconds: float) -> None:
        values = share.total if share.ids else share.total[:0]  # who added nothing says so
        for offset in range(0, max(len(values), 1), PART_VALUES):
            piece = values[offset : offset + PART_VALUES]
            part = Part(
                step=task.step,
                attempt=task.attempt,
                unit=task.unit,
                stage=share.stage,
                ids=share.ids,
                num_values=len(share.total),
                offset=offset,
            )
            await self._links.send(
                peer, part, [piece.numpy().view("u1").data], timeout_seconds=timeout_seconds, bulk=True
            )


def _reduce(gathered: _Gathered, order: Sequence[tuple[str, int]], divisor: float) -> tuple[Tensor, str, float]:
    total = torch.zeros_like(gathered.totals[order[0]])
    for name in order:
        if gathered.ids[name]:
            total.add_(gathered.totals[name])
    total.div_(divisor)
    digest = hashlib.sha256(total.numpy().tobytes()).hexdigest()
    squared = 0.0
    if total.numel():
        squared = norm(total) ** 2 if is_finite(total) else math.inf
    return total, digest, squared
