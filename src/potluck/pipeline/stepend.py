"""The end of a step on one peer: it averages its units with their other holders, and applies what was committed.

AverageOrder ─▶ an average for each unit, kept ─▶ CommitNotice ─▶ the units take the step
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from potluck import tasks
from potluck.errors import ProtocolError
from potluck.faultpoints import reach
from potluck.link.dispatch import Incoming
from potluck.link.links import Links
from potluck.pipeline.averaging import AverageTask, Share, StageGroup
from potluck.pipeline.following import Following
from potluck.pipeline.holding import Holding
from potluck.pipeline.messages import Applied, AverageOrder, Averages, Begin, CommitNotice, UnitAverage, UnitOrder

Contribution = Callable[[int, int], tuple[Tensor, tuple[int, ...]]]
"""What this peer has added in a stage to a unit: the sum, and its ids."""


def _nothing(stage: int, unit: int) -> tuple[Tensor, tuple[int, ...]]:
    raise ProtocolError(f"stage {stage} is not served here")


class StepEnd:
    """One peer's averages, of the attempt under way."""

    def __init__(
        self,
        links: Links,
        self_id: str,
        conductor: Following,
        holding: Holding,
        group: StageGroup,
        timeout_seconds: float,
    ) -> None:
        self._links = links
        self._self_id = self_id
        self._conductor = conductor
        self._holding = holding
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._begun: Begin | None = None
        self._stages: tuple[int, ...] = ()
        self._has_averaged = asyncio.Event()  # in this attempt
        self._averages: dict[int, Tensor] = {}
        self._digests: dict[int, str] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self.contribution: Contribution = _nothing
        links.handle(AverageOrder, self._average)
        links.handle(CommitNotice, self._commit)

    async def close(self) -> None:
        """Average no more. Idempotent."""
        for kind in (AverageOrder, CommitNotice):
            self._links.unhandle(kind)
        await tasks.end(*self._running)

    def begin(self, begin: Begin, stages: Iterable[int]) -> None:
        """An attempt begins, in which this peer serves these stages; what was averaged before is void."""
        self._begun, self._stages = begin, tuple(stages)
        self._group.forget(begin.step, begin.attempt)
        self._has_averaged.set()  # of an attempt that is over
        self._has_averaged = asyncio.Event()
        self._averages.clear()
        self._digests.clear()
        for task in self._running:
            task.cancel()

    def _is_current(self, order: AverageOrder) -> bool:
        begun = self._begun
        return begun is not None and (begun.step, begun.attempt) == (order.step, order.attempt)

    async def until_averaged(self) -> None:
        """Return when this peer has the averages of the attempt, or the attempt is over."""
        await self._has_averaged.wait()

    # Averages

    async def _average(self, incoming: Incoming[AverageOrder]) -> Averages:
        order, begun = incoming.message, self._begun
        if begun is None or not self._is_current(order):
            raise ProtocolError(f"attempt {order.attempt} of step {order.step} is not the one under way here")
        first = min(self._stages, default=-1)
        reach("pipeline.averaging", step=order.step, stage=first)
        divisor = begun.total_samples * begun.loss_scale
        running = [asyncio.create_task(self._average_unit(order, each, divisor)) for each in order.units]
        for task in running:  # they wait for others: the next attempt ends them
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        try:
            reports = await asyncio.gather(*running)
        except asyncio.CancelledError:
            if not self._is_current(order):
                raise ProtocolError(f"attempt {order.attempt} of step {order.step} is over") from None
            raise
        finally:
            await tasks.end(*running)
        reach("pipeline.averaged", step=order.step, stage=first)
        if self._is_current(order):
            self._has_averaged.set()
        return Averages(units=tuple(reports))

    async def _average_unit(self, order: AverageOrder, each: UnitOrder, divisor: float) -> UnitAverage:
        stages = {c.stage for c in each.contributors if c.server == self._self_id}
        shares = [Share(stage, *self.contribution(stage, each.unit)) for stage in sorted(stages)]
        task = AverageTask(order.step, order.attempt, each.unit, each.contributors, each.listeners, divisor)
        average, report = await self._group.average(task, shares, timeout_seconds=self._timeout_seconds)
        if not self._is_current(order):
            raise ProtocolError(f"attempt {order.attempt} of step {order.step} is over")
        self._averages[each.unit], self._digests[each.unit] = average, report.digest
        return report

    # Commits

    async def _commit(self, incoming: Incoming[CommitNotice]) -> Applied:
        if not await self._conductor.accepts(incoming.sender):
            raise ProtocolError("only the conductor tells of commits")
        await self._take_step(incoming.message)
        return Applied(step=self._holding.step)

    async def catch_up(self, life: int, last: CommitNotice | None) -> None:
        """The notice was lost, or is late: this peer was frozen, or the conductor new."""
        if last is not None and last.step == self._holding.step and life == self._holding.life:
            await self._take_step(last)

    async def _take_step(self, commit: CommitNotice) -> None:
        """Apply the averages where they are those that were committed; what lacks them is loaded again."""
        first = min(self._stages, default=-1)
        if await self._holding.committed(commit, dict(self._averages), dict(self._digests)):
            reach("pipeline.applied", step=commit.step, stage=first)
