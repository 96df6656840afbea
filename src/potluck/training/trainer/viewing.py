"""Looking at a run's model from outside: whoever may watch fetches the newest state, and sees what it does.

viewer = await StateViewer.start(peer)
fetched = await viewer.newest(at_least_epoch=1, timeout_seconds=60)
"""

from __future__ import annotations

import asyncio
from typing import Self

from potluck.hub.subjects import MAIN
from potluck.peer.lease import Lease
from potluck.round.lineage import Lineage
from potluck.round.plan.messages import Commit
from potluck.run.group import Group, LinkedPeer
from potluck.state.config import StateConfig
from potluck.state.fetched import FetchedState
from potluck.state.fetcher import Progress
from potluck.state.keeper import StateKeeper


class StateViewer:
    """Fetches states, and keeps none. Lives on the event loop."""

    is_in_round = False  # it only looks

    def __init__(self, peer: LinkedPeer, group: str = MAIN) -> None:
        self._group = Group(peer, group)
        session = self._group.session
        self.lineage = Lineage(session.store("lineage"), session.subjects.scope, self._committed)
        self.lease = Lease(session.store("lease"), session.peer_id, session.clock)  # it never stands for it
        self._keeper = StateKeeper(self._group, self, StateConfig(keep="never", backups=None))
        self._moved = asyncio.Event()

    @classmethod
    async def start(cls, peer: LinkedPeer, group: str = MAIN) -> Self:
        """Follow a group of the run."""
        viewer = cls(peer, group)
        try:
            await viewer.lineage.start()
            await viewer._keeper.start()
        except BaseException:
            await viewer.close()
            raise
        return viewer

    async def close(self) -> None:
        """Follow no more. Idempotent."""
        await self._keeper.close()
        await self.lineage.close()
        self._group.close()

    async def until_epoch(self, epoch: int) -> None:
        """Wait until so many epochs are committed."""
        while self.lineage.epoch < epoch:
            self._moved.clear()
            await self._moved.wait()

    async def newest(
        self, *, at_least_epoch: int = 0, timeout_seconds: float, progress: Progress | None = None
    ) -> FetchedState:
        """The newest state that can be believed; StateUnavailableError when nobody serves one in time."""
        return await self._keeper.fetch(
            at_least_epoch=at_least_epoch, timeout_seconds=timeout_seconds, progress=progress
        )

    def _committed(self, _commit: Commit) -> None:
        self._moved.set()
