"""How an aux peer helps: it stands ready for every epoch, reduces for others, coordinates if it may, keeps states.

It needs no model and no options: plans say how tensors are cut and encoded, and trainers say in their beacons how many
samples make an epoch, and when they are ready how long a round should wait for the others. So the peer of a host can
serve any run.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Self

from potluck import tasks
from potluck.errors import RoundFailedError
from potluck.optim.collaboration import Collaboration
from potluck.optim.methods.quorum import ByMost
from potluck.round.averager import RoundPeer
from potluck.round.codecs import CodecChoice
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.round.plan.specs import StartSpec
from potluck.state.config import StateConfig
from potluck.state.following import Follower
from potluck.state.keeper import StateKeeper
from potluck.state.returning import Returning

logger = logging.getLogger(__name__)

HELP_SECONDS = 3600.0  # how long it stands ready for one epoch before it says so anew
# Until most trainers have said something. One in the middle of a long step must find the round still open: never less
# than what trainers count on.
OTHERWISE = StartSpec(least_seconds=3.0, most_seconds=30.0)


class AuxiliaryPeer:
    """An aux peer's part in training. Lives on the event loop."""

    def __init__(self, collaboration: Collaboration, keeper: StateKeeper, follower: Follower) -> None:
        """They are the helper's from now on, and closed with it."""
        self.collaboration = collaboration
        self._keeper = keeper
        self._follower = follower
        self._returning: Returning | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def of(
        cls,
        peer: RoundPeer,
        *,
        coordinator: CoordinatorConfig | None = None,
        num_threads: int | None = None,
        state: StateConfig | None = None,
    ) -> Self:
        """Help with whatever this peer's run does; the peer must have joined as aux."""
        collaboration = Collaboration(
            peer,
            target=None,
            codecs=CodecChoice(),
            coordinator=coordinator or CoordinatorConfig(trigger=ByMost(OTHERWISE)),
            num_threads=num_threads,
        )
        await collaboration.start()
        return await cls.start(collaboration, state or StateConfig())

    @classmethod
    async def start(cls, collaboration: Collaboration, state: StateConfig) -> Self:
        """Stand ready, with a collaboration that was started; it is closed with the helper."""
        keeper = collaboration.keeper = StateKeeper(collaboration.peer, collaboration.averager, state)
        session = collaboration.peer.session
        follower = Follower(
            keeper,
            collaboration.averager,
            session.roster,
            session.clock,
            num_training=lambda: collaboration.latest.num_trainers if collaboration.latest is not None else 0,
        )
        helper = cls(collaboration, keeper, follower)
        try:
            await keeper.start()
        except BaseException:
            await helper.close()
            raise
        helper._returning = keeper.go_back_with(collaboration.averager)
        follower.start()
        helper._task = asyncio.create_task(helper._help(), name="optimizer: helping")
        return helper

    async def close(self) -> None:
        """Leave the round that is under way. Calling it twice does no harm."""
        await tasks.end(self._task)
        if self._returning is not None:
            await self._returning.close()
        await self._follower.close()
        await self._keeper.close()
        await self.collaboration.close()

    @property
    def kept_epoch(self) -> int | None:
        """The newest epoch whose state this peer keeps for others."""
        return self._keeper.kept_epoch

    async def until_after(self, epoch: int) -> None:
        """Wait until an epoch after this one is committed."""
        while not await self.collaboration.progress.until_committed(epoch, HELP_SECONDS):
            pass

    async def _help(self) -> None:
        while True:
            epoch = self.collaboration.epoch + 1
            try:
                await self.collaboration.average(None, weight=0.0, epoch=epoch, timeout_seconds=HELP_SECONDS)
            except RoundFailedError as error:
                logger.debug("epoch %d came to nothing while this peer helped: %s", epoch, error)
