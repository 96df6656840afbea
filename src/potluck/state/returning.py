"""Carrying out an order to go back to a cut, for one group (run/cuts.py).

The order stands in the hub, and how many were carried out stands in the group's lineage: so each group does it once,
also when the coordinator changes. The coordinator gets the state, from its disk or from a peer that offers it,
and commits an epoch with that state; then every peer that has it shows it, and all members fetch it.
Groups do so at their own time: one that has no coordinator now goes back when it has one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING

from potluck import tasks
from potluck.errors import RetryableError
from potluck.hub.subjects import MAIN
from potluck.round.plan.messages import Commit, Restoration
from potluck.run.cutboard import CutBoard, CutPart, ReturnOrder
from potluck.state.reinstating import Reinstating

if TYPE_CHECKING:
    from potluck.round.averager import Averager

logger = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 1.0
FETCH_SECONDS = 60.0
RETRY_SECONDS = 5.0


class Returning:
    """One peer's part in going back to cuts, in one group. Lives on the event loop."""

    def __init__(self, group: str, averager: Averager, states: Reinstating, board: CutBoard) -> None:
        """The board is started by the keeper, which outlives this."""
        self.counts: Counter[str] = Counter()
        self._group = group
        self._averager = averager
        self._states = states
        self._board = board
        self._offered = 0  # the last order whose state this peer has offered, or has not
        self._shown = 0  # the last epoch that went back, whose state this peer shows, or cannot
        self._wake = asyncio.Event()
        self._stop_listening = board.listen(self._wake.set)
        self._task = asyncio.create_task(self._run(), name="cuts: going back")

    async def close(self) -> None:
        """Go back no more. Idempotent."""
        self._stop_listening()
        await tasks.end(self._task)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            pause_seconds: float | None = LOOK_EVERY_SECONDS
            try:
                pause_seconds = LOOK_EVERY_SECONDS if await self._look() else None
            except RetryableError as error:
                self.counts["failed"] += 1
                logger.warning("group %s has not gone back to the cut yet: %s", self._group, error)
                pause_seconds = RETRY_SECONDS
            except Exception:  # the group trains on; logged, counted, tried again
                self.counts["errors"] += 1
                logger.exception("going back to a cut failed")
                pause_seconds = RETRY_SECONDS
            try:
                async with asyncio.timeout(pause_seconds):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _look(self) -> bool:
        """Do what is due; whether there may be more to do soon."""
        order = self._board.returning
        cut = self._board.made.get(order.number) if order is not None else None
        if order is None or cut is None or self._group not in cut.parts or (order.of_manifest and self._group == MAIN):
            return False
        head = self._averager.lineage.head
        if head is not None and head.num_returned >= order.order:
            if head.restored is not None and head.restored.cut and head.epoch > self._shown:
                await self._show(head, head.restored)
            return False
        part = cut.parts[self._group]
        if self._averager.lease.token:
            await self._carry_out(order, part)
        elif order.order != self._offered:
            self._offered = order.order
            await self._states.bring(part.epoch, part.digest)
        return True

    async def _carry_out(self, order: ReturnOrder, part: CutPart) -> None:
        await self._states.fetch(part.epoch, part.digest, timeout_seconds=FETCH_SECONDS)
        restored = Restoration(order=order.order, epoch=part.epoch, digest=part.digest, cut=order.number)
        commit = await self._averager.restore(restored)
        self.counts["carried_out"] += 1
        logger.warning(
            "group %s goes back to cut %d: the state of its epoch %d is that of epoch %d now",
            self._group,
            order.number,
            part.epoch,
            commit.epoch,
        )
        await self._show(commit, restored)

    async def _show(self, head: Commit, restored: Restoration) -> None:
        if await self._states.bring(restored.epoch, restored.digest):
            await self._states.show(head.epoch, restored.digest)
            self.counts["shown"] += 1
        self._shown = head.epoch
