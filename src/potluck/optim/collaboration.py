"""One peer's averager, progress and keeper in a group: made, started and closed together.

Callers use these three directly. What needs two of them at once is here: standing by for a round, which
the run's progress confirms, and following the settings of the coordinator.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from potluck import tasks
from potluck.errors import HubUnavailableError
from potluck.hub.subjects import MAIN
from potluck.optim.cores import mark_trainer, share_cores_unless_chosen
from potluck.optim.parameters import RolesByPrefix
from potluck.optim.progress.progresskeeper import ProgressKeeper
from potluck.peer.groupsession import GroupSession
from potluck.peer.session import Session
from potluck.round.averager import Averager, AveragerConfig, RoundPeer
from potluck.round.codecs import CodecChoice, CodecSpec
from potluck.round.coordinator.coordinator import CoordinatorConfig
from potluck.round.member.intent import StandBy
from potluck.round.member.workers import Workers
from potluck.round.outcome import RoundResult
from potluck.round.plan.messages import Commit
from potluck.run.group import group_of
from potluck.run.joined import Joined
from potluck.state.keeper import StateKeeper

logger = logging.getLogger(__name__)

ROLES = RolesByPrefix()
LOOK_EVERY_SECONDS = 0.5
BACK_SECONDS = 5.0  # who wants to leave waits so long for a hub that is away


class CollaborationConfig(Protocol):
    """What all kinds of optimizers know about their rounds."""

    @property
    def target_batch_size(self) -> int | None:
        """Samples per epoch; None: it does not depend on them."""
        ...

    @property
    def group(self) -> str:
        """Whose rounds they are."""
        ...

    @property
    def codecs(self) -> CodecChoice:
        """How tensors travel."""
        ...

    @property
    def num_threads(self) -> int | None:
        """For averaging."""
        ...

    def coordinator(self) -> CoordinatorConfig:
        """How rounds are started where this peer coordinates."""
        ...


class Collaboration:
    """One peer's averager and progress, started and closed together."""

    def __init__(
        self,
        peer: RoundPeer,
        *,
        target: int | None,
        codecs: CodecChoice,
        coordinator: CoordinatorConfig,
        num_threads: int | None = None,
        workers: Workers | None = None,
    ) -> None:
        """Made on the event loop. `target` is the samples of an epoch; None: whatever the trainers say."""
        self.peer = peer = group_of(peer)
        """This peer's place in the group whose rounds they are."""
        config = AveragerConfig(codecs=codecs, roles=ROLES, coordinator=coordinator, num_threads=num_threads)
        self.averager = Averager(peer, config, workers=workers)
        self.progress = ProgressKeeper(peer.session, self.averager.lease, lambda: self.averager.epoch, target)
        self.progress.weight_cap = coordinator.gather.weight_cap
        self.keeper: StateKeeper | None = None
        """Of this peer's states, where it has one: its starter says so."""
        self.averager.listen(self._committed)

    def coordinate_by(self, config: CoordinatorConfig) -> None:
        """Where this peer coordinates, start and plan the next rounds by this."""
        self.averager.coordinate_by(config)
        self.progress.weight_cap = config.gather.weight_cap

    async def start(self) -> None:
        """Follow the run."""
        try:
            await self.averager.start()
            await self.progress.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Leave the round that is under way. Idempotent."""
        await self.progress.close()
        await self.averager.close()

    async def stand_by(
        self, stand_by: StandBy, tensors: Mapping[str, Tensor], *, weight: float, epoch: int, timeout_seconds: float
    ) -> RoundResult | None:
        """Be there for an epoch that is expected to be due in a moment; None when it is not."""
        confirming = asyncio.create_task(self._confirm_when_due(epoch - 1), name="progress: standing by")
        try:
            return await self.averager.stand_by(
                stand_by, tensors, weight=weight, epoch=epoch, timeout_seconds=timeout_seconds
            )
        finally:
            await tasks.end(confirming)

    async def _confirm_when_due(self, epoch: int) -> None:
        if await self.progress.until_due(epoch, None):
            self.averager.confirm()

    def _committed(self, _commit: Commit) -> None:
        self.progress.committed()


async def until_hub_is_there(session: Session | GroupSession) -> None:
    """Wait for a hub that is away just now, and say so. Raises why the session ended, if it does meanwhile."""
    has_said = False
    while not session.hub.is_connected:
        if session.ended.done():
            session.ended.result()
        if not has_said:
            has_said = True
            logger.warning("the hub is away just now: it is waited for")
        await asyncio.sleep(LOOK_EVERY_SECONDS)


async def require_hub(session: Session | GroupSession) -> None:
    """HubUnavailableError if the hub is away, and not back in a moment."""
    try:
        async with asyncio.timeout(BACK_SECONDS):
            await until_hub_is_there(session)
    except TimeoutError:
        raise HubUnavailableError(f"the hub is away, and was not back within {BACK_SECONDS:g} s") from None


async def has_other_trainers(session: GroupSession) -> bool:
    """Whether somebody else trains."""
    return any(p.card.role == "trainer" and p.peer != session.peer_id for p in session.roster.alive())


def join_collaboration(run: Joined, config: CollaborationConfig, codec: CodecSpec | None = None) -> Collaboration:
    """Start averaging and progress on the run's loop; they end with the run. `codec` is for gradients, if not None."""
    run.claim("an optimizer" if config.group == MAIN else f"an optimizer of group {config.group!r}")
    run.call_unless_leaving(until_hub_is_there(run.peer.session))
    group = run.group(config.group)
    if run.peer.session.card.role == "trainer":
        share_cores_unless_chosen()
        unmark = mark_trainer()

        async def close_mark() -> None:
            unmark()

        run.attach(close_mark)

    async def start() -> Collaboration:
        collaboration = Collaboration(
            group,
            target=config.target_batch_size,
            codecs=config.codecs if codec is None else config.codecs.with_gradients_in(codec),
            coordinator=config.coordinator(),
            num_threads=config.num_threads,
        )
        await collaboration.start()
        return collaboration

    collaboration = run.call(start())
    run.attach(collaboration.close)
    return collaboration
