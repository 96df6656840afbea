"""How an aux peer helps: it stands ready for every epoch, reduces for others, coordinates if it may, keeps states.

It needs no model and no options: plans say how tensors are cut and encoded, and trainers say in their beacons how many
samples make an epoch, and when they are ready how long a round should wait for the others. So the peer of a host can
serve any run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils.hooks import RemovableHandle

from potluck import tasks
from potluck.errors import ConfigurationError, RoundFailedError
from potluck.optim.collaboration import Collaboration, join_collaboration
from potluck.optim.methods.quorum import ByMost
from potluck.optim.options import OptimizerConfig, check_target
from potluck.round.averager import RoundPeer
from potluck.round.codecs import CodecChoice
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.round.plan.specs import StartSpec
from potluck.run.joined import Joined
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
        codecs: CodecChoice | None = None,
        num_threads: int | None = None,
        state: StateConfig | None = None,
    ) -> Self:
        """Help with whatever this peer's run does; the peer must have joined as aux.

        `codecs` are those of the trainers, for helpers that read averages: plans say all that others need.
        """
        collaboration = Collaboration(
            peer,
            target=None,
            codecs=codecs or CodecChoice(),
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
            num_training=lambda: collaboration.progress.num_trainers,
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
        """Leave the round that is under way. Idempotent."""
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

    def wait_for_states(self, seconds: float) -> None:
        """Give up loading a state when nothing of it comes for so long."""
        self._follower.load_seconds = seconds

    @property
    def keeper(self) -> StateKeeper:
        """Of the group's states."""
        return self._keeper

    async def until_after(self, epoch: int) -> None:
        """Wait until an epoch after this one is committed."""
        while not await self.collaboration.progress.until_committed(epoch, HELP_SECONDS):
            pass

    async def _help(self) -> None:
        while True:
            epoch = self.collaboration.averager.epoch + 1
            try:
                await self.collaboration.averager.average(None, weight=0.0, epoch=epoch, timeout_seconds=HELP_SECONDS)
            except RoundFailedError as error:
                logger.debug("epoch %d came to nothing while this peer helped: %s", epoch, error)


class AuxiliaryOptimizer(torch.optim.Optimizer):
    """`potluck.Optimizer(run, None, auxiliary=True, …)`: the same interface for a peer that trains nothing.

    It has no parameters and no state, `step` waits for the next epoch of the run, and what concerns samples is empty.
    """

    def __init__(self, run: Joined, config: OptimizerConfig) -> None:
        # torch's own __init__ is left out on purpose: it wants parameters.
        self.run = run
        self.config = config
        self.collaboration = join_collaboration(run, config)
        self._peer = run.call(AuxiliaryPeer.start(self.collaboration, config.state))
        self._peer.wait_for_states(config.load_state_timeout_seconds)
        run.attach(self._peer.close)
        self.param_groups = []
        self.state = defaultdict(dict)
        self.defaults = {}
        self.samples = 0

    @property
    def epoch(self) -> int:
        """How many updates the run has."""
        return self.collaboration.averager.epoch

    @property
    def target_batch_size(self) -> int:
        """How many samples of all peers together make an epoch. Set it on all of them, for the same epoch."""
        return self.collaboration.progress.target or self.config.target_batch_size

    @target_batch_size.setter
    def target_batch_size(self, samples: int) -> None:
        self.collaboration.progress.target = check_target(samples)

    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, batch_size: int | None = None, grad_scaler: object = None
    ) -> None:
        """Wait for the next epoch of the run."""
        self.run.check()
        self.run.call(self._peer.until_after(self.epoch))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """There are no gradients."""

    def statistics(self) -> dict[str, int | float]:
        """Counters of the run's rounds."""
        return self.collaboration.averager.statistics()

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is nothing to load."""

    def hand_in(self, timeout_seconds: float) -> int:
        """There are no samples to hand in."""
        return 0

    def rest(self) -> None:
        """It computes nothing anyway."""

    def go_on(self) -> None:
        """It computes nothing anyway."""

    def shutdown(self) -> None:
        """It goes on until the run is left."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused."""
        raise ConfigurationError("an auxiliary peer trains no parameters")

    def _refuse_hook(self, *_args: Any, **_options: Any) -> RemovableHandle:
        """Refuse a hook."""
        raise ConfigurationError("an auxiliary peer takes no steps: hooks would never be called")

    register_step_pre_hook = register_step_post_hook = _refuse_hook
    register_state_dict_pre_hook = register_state_dict_post_hook = _refuse_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _refuse_hook

    def __repr__(self) -> str:
        return "potluck.Optimizer(auxiliary)"
