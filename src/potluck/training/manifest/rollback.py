"""Carrying out an organiser's order to go back to an earlier epoch.

The manifest holds the order, and the lineage counts the orders carried out. So each order is carried out once, even if
the coordinator changes. The steps, in order:

1. A peer with the earlier state on disk reads it and offers it. The coordinator fetches it.
2. The coordinator commits an epoch whose state it is (`Commit.restored`). A round that is under way comes to nothing,
   by the same compare-and-set that agrees on every epoch.
3. Every peer that has it shows it as the state of that epoch. All trainers are behind by now, and fetch it.

An order to go back to a cut (run/cuts.py) is the same for `main`; the other groups are told by the coordinator of
`main`, and do it by themselves (state/returning.py).

If the coordinator dies between 2 and 3, anybody else who has the earlier state does step 3.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from potluck import tasks
from potluck.errors import RetryableError
from potluck.round.plan.messages import Commit, Restoration
from potluck.training.manifest.manifest import Manifest, Rollback

if TYPE_CHECKING:
    from potluck.round.averager import Averager
    from potluck.state.cutdesk import CutDesk
    from potluck.state.reinstating import Reinstating

logger = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 0.5
FETCH_SECONDS = 60.0
RETRY_SECONDS = 5.0


class RestorationDesk:
    """Carries out orders to go back. Lives on the event loop."""

    def __init__(
        self,
        averager: Averager,
        states: Reinstating,
        manifest: Callable[[], Manifest | None],
        cuts: CutDesk | None = None,
    ) -> None:
        """`manifest` returns the newest one; `cuts` has the other groups go back too."""
        self.counts: Counter[str] = Counter()
        self._averager = averager
        self._states = states
        self._manifest = manifest
        self._cuts = cuts
        self._offered = 0  # the last order whose state this peer has, or has not
        self._seen_to = 0  # the last epoch that went back, whose state this peer shows, or cannot
        self._task = asyncio.create_task(self._run(), name="restorations")

    async def close(self) -> None:
        """Carry out nothing more. Idempotent."""
        await tasks.end(self._task)

    async def _run(self) -> None:
        while True:
            pause_seconds = LOOK_EVERY_SECONDS
            try:
                await self._look()
            except RetryableError as error:
                self.counts["retries"] += 1
                logger.warning("the order to go back is tried again: %s", error)
                pause_seconds = RETRY_SECONDS
            except Exception:  # the run goes on from where it is; logged, counted, tried again
                self.counts["errors"] += 1
                logger.exception("going back to an earlier epoch failed")
                pause_seconds = RETRY_SECONDS
            await asyncio.sleep(pause_seconds)

    async def _look(self) -> None:
        head = self._averager.lineage.head
        if head is not None and head.restored is not None and head.epoch > self._seen_to:
            await self._show(head, head.restored)
        order = pending(self._manifest(), head)
        if order is None:
            return
        if self._averager.lease.token:
            await self._carry_out(order)
        elif order.number != self._offered:
            self._offered = order.number
            await self._states.bring(order.to_epoch, order.digest)

    async def _carry_out(self, order: Rollback) -> None:
        if order.cut and self._cuts is not None:
            answer = await self._cuts.order_return(order.cut, of_manifest=order.number)
            if answer.trouble:
                raise RetryableError(answer.trouble)
        await self._states.fetch(order.to_epoch, order.digest, timeout_seconds=FETCH_SECONDS)
        restored = Restoration(order=order.number, epoch=order.to_epoch, digest=order.digest)
        commit = await self._averager.restore(restored)
        self.counts["carried_out"] += 1
        logger.warning(
            "the run goes back to the state of epoch %d, as its organiser ordered: that is epoch %d now",
            order.to_epoch,
            commit.epoch,
        )
        await self._show(commit, restored)

    async def _show(self, head: Commit, restored: Restoration) -> None:
        """Show the state as that of the epoch that went back to it, where this peer has it."""
        if await self._states.bring(restored.epoch, restored.digest):
            is_shown = await self._states.show(head.epoch, restored.digest)
            self.counts["shown" if is_shown else "not_shown"] += 1
        self._seen_to = head.epoch


def pending(manifest: Manifest | None, head: Commit | None) -> Rollback | None:
    """The order that is yet to be carried out (pure)."""
    order = manifest.rollback if manifest is not None else None
    if order is None or head is None or head.num_restored >= order.number or head.epoch < order.given_at_epoch:
        return None
    return order
