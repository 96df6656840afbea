"""A coordinator's other work for each commit, in a queue, so that no round has to wait for it."""

from __future__ import annotations

import abc
import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING

from potluck import tasks
from potluck.round.plan.messages import Commit

if TYPE_CHECKING:
    from potluck.round.averager import Averager

logger = logging.getLogger(__name__)

MAX_WAITING = 1000  # commits, while the hub is away


class CommitDesk(abc.ABC):
    """Sees to every commit that is made while this peer holds the coordinator's lease. Lives on the event loop."""

    def __init__(self, averager: Averager, name: str) -> None:
        """`name` is for logs."""
        self.counts: Counter[str] = Counter()
        self.averager = averager
        self._name = name
        self._waiting: asyncio.Queue[Commit] = asyncio.Queue(MAX_WAITING)
        self._task = asyncio.create_task(self._keep_working(), name=name)
        averager.listen(self._committed)

    @abc.abstractmethod
    async def see_to(self, commits: list[Commit]) -> None:
        """Do what is to be done about these; those that come meanwhile are the next ones."""

    async def close(self) -> None:
        """See to nothing more. Idempotent."""
        await tasks.end(self._task)

    def _committed(self, commit: Commit) -> None:
        if not self.averager.lease.token:
            return
        if self._waiting.full():
            self.counts["passed_over"] += 1
        else:
            self._waiting.put_nowait(commit)

    async def _keep_working(self) -> None:
        while True:
            commits = [await self._waiting.get()]
            while not self._waiting.empty():
                commits.append(self._waiting.get_nowait())
            try:
                await self.see_to(commits)
            except Exception:  # no reason for a run to end: logged and counted; the next commits may fare better
                self.counts["errors"] += 1
                logger.exception("%s: %d commits could not be seen to", self._name, len(commits))
