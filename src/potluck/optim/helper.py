"""How an aux peer helps: it stands ready for every epoch, reduces for others, and coordinates if it may."""

from __future__ import annotations

import asyncio
import logging

from potluck import tasks
from potluck.errors import RoundFailedError
from potluck.optim.collaboration import Collaboration
from potluck.run.joined import Joined

logger = logging.getLogger(__name__)

HELP_SECONDS = 3600.0  # how long an aux peer stands ready for one epoch before it says so anew


class Helper:
    """An aux peer's part in training."""

    def __init__(self, run: Joined, collaboration: Collaboration) -> None:
        self._run = run
        self._collaboration = collaboration
        self._task = run.call(self._begin())
        run.attach(self._end)

    def wait(self) -> None:
        """Until an epoch is committed."""
        epoch = self._collaboration.epoch
        self._run.call(self._until_after(epoch))

    async def _begin(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._help(), name="optimizer: helping")

    async def _end(self) -> None:
        await tasks.end(self._task)

    async def _help(self) -> None:
        while True:
            epoch = self._collaboration.epoch + 1
            try:
                await self._collaboration.average(None, weight=0.0, epoch=epoch, timeout_seconds=HELP_SECONDS)
            except RoundFailedError as error:
                logger.debug("epoch %d came to nothing while this peer helped: %s", epoch, error)

    async def _until_after(self, epoch: int) -> None:
        while self._collaboration.epoch <= epoch and not self._task.done():
            await self._collaboration.until_due(epoch, 1.0)
            if self._collaboration.epoch <= epoch:
                await asyncio.sleep(0.05)
