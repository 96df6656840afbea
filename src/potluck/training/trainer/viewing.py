"""Looking at a run's model from outside: a member that may watch fetches the newest state, and sees what it does.

viewer = await StateViewer.start(peer)
fetched = await viewer.newest(at_least_epoch=1, timeout_seconds=60)
number, parts = await fetch_cut(peer)            # all groups at once
"""

from __future__ import annotations

import asyncio
import logging
from typing import Self

from potluck.errors import RetryableError
from potluck.hub.subjects import MAIN
from potluck.peer.lease import Lease
from potluck.round.lineage import Lineage
from potluck.round.plan.messages import Commit
from potluck.run.cutboard import CutPart
from potluck.run.cuts import propose
from potluck.run.group import Group, LinkedPeer
from potluck.state.config import StateConfig
from potluck.state.cutting import fetch_part
from potluck.state.fetched import FetchedState
from potluck.state.fetcher import Progress
from potluck.state.keeper import StateKeeper
from potluck.state.shelf import Held

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
CUT_SECONDS = 60.0  # until a cut is made
PART_SECONDS = 5.0  # until somebody serves a part of it
CUT_TRIES = 4


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

    async def part_of_cut(self, part: CutPart) -> Held:
        """The group's part of a cut, to be released; RetryableError where nobody serves it."""
        clock = self._group.session.clock
        until = clock.monotonic() + PART_SECONDS
        while True:
            try:
                return await fetch_part(part, self._group.session, self._keeper.directory, self._keeper)
            except RetryableError:  # who has it may not have said so yet
                if clock.monotonic() >= until:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    def _committed(self, _commit: Commit) -> None:
        self._moved.set()


async def fetch_cut(peer: LinkedPeer) -> tuple[int, dict[str, Held]]:
    """Have a cut made, and fetch the parts of all groups: its number, and the states by group, to be released.

    Keepers hold a part until it is on a trusted disk, or is fetched. A small one may be saved before it was asked for:
    then another cut is made.
    """
    groups = {MAIN, *(group for presence in peer.session.roster for group in presence.card.groups)}
    viewers: dict[str, StateViewer] = {}
    try:
        for group in sorted(groups):  # before the cut, so that nothing has to be heard of first
            viewers[group] = await StateViewer.start(peer, group)
        for num_left in reversed(range(CUT_TRIES)):
            cut = await propose(peer, {}, saved=False, timeout_seconds=CUT_SECONDS)
            for group in cut.parts.keys() - viewers.keys():
                viewers[group] = await StateViewer.start(peer, group)
            found = await asyncio.gather(
                *(viewers[group].part_of_cut(part) for group, part in cut.parts.items()), return_exceptions=True
            )
            held = {group: each for group, each in zip(cut.parts, found, strict=True) if isinstance(each, Held)}
            errors = [each for each in found if isinstance(each, BaseException)]
            if not errors:
                return cut.number, held
            for each in held.values():
                each.snapshot.release()
            if not num_left or not all(isinstance(error, RetryableError) for error in errors):
                raise errors[0]
            logger.info("another cut is made, since this one was over before it was fetched: %s", errors[0])
        raise AssertionError("the last try returns or raises")
    finally:
        for viewer in viewers.values():
            await viewer.close()
