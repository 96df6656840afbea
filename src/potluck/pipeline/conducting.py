"""The conductor: carries out a step's ledger among feeders and servers, and commits the step.

There is one at a time, on a peer that may coordinate. It moves no tensors. `StepBook` is the seam to the record that
makes a commit happen once: a compare-and-set from one step to the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from potluck import tasks
from potluck.errors import ConfigurationError, FatalError, PeerError, PotluckError, RetryableError, RoundFailedError
from potluck.faultpoints import reach
from potluck.link.dispatch import Incoming
from potluck.link.links import Links
from potluck.peer.roster import Roster, RosterEvent
from potluck.pipeline.messages import (
    Applied,
    AverageOrder,
    Averages,
    Begin,
    CommitNotice,
    Contributor,
    Enlist,
    Enlisted,
    Fed,
    Feed,
    FeedItem,
    Held,
    Lost,
)
from potluck.pipeline.stepledger import (
    Action,
    Average,
    Commit,
    Exclude,
    Fence,
    LossScale,
    Member,
    Phase,
    StageLost,
    StepLedger,
)
from potluck.pipeline.stepledger import Feed as FeedAction

logger = logging.getLogger(__name__)


class StepBook(Protocol):
    """Where commits are recorded, once each."""

    async def commit(self, commit: Commit) -> bool:
        """Record it as the commit of its step; False where that step has another one already."""


class MemoryBook:
    """A book in the conductor's own memory."""

    def __init__(self) -> None:
        self.commits: dict[int, Commit] = {}

    async def commit(self, commit: Commit) -> bool:
        """As in StepBook."""
        return self.commits.setdefault(commit.step, commit) == commit


@dataclass(frozen=True, kw_only=True)
class ConductorConfig:
    """Patience, and what a step does with its gradient."""

    max_norm: float = 0.0
    """Gradients are clipped to this total norm over all stages; 0: not clipped."""

    fence_seconds: float = 15.0
    """A member that does not answer a fence for so long is given up for this step."""

    stall_seconds: float = 30.0
    """Nothing came through for so long: a fence finds out who is frozen."""

    average_seconds: float = 600.0
    max_attempts: int = 50
    """Of one step; a model that fails everywhere must not be tried for ever."""


@dataclass(frozen=True)
class StepOutcome:
    """What became of a step."""

    step: int
    commit: Commit
    loss: float
    attempts: int
    replayed: int
    excluded: tuple[str, ...]


class StageLostError(FatalError):
    """All holders of a stage are gone."""


@dataclass
class _Running:
    """A step under way."""

    ledger: StepLedger
    events: asyncio.Queue[Callable[[], list[Action]]] = field(default_factory=asyncio.Queue)
    losses: dict[int, float] = field(default_factory=dict)
    excluded: list[str] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    commit: Commit | None = None
    why: str = ""


class Conductor:
    """Runs one step after the other."""

    def __init__(
        self,
        links: Links,
        roster: Roster,
        *,
        num_stages: int,
        units: Sequence[tuple[int, ...]] = (),
        book: StepBook | None = None,
        loss_scale: LossScale | None = None,
        config: ConductorConfig | None = None,
    ) -> None:
        self._links = links
        self._num_stages = num_stages
        self._units = tuple(units)
        self._book = book or MemoryBook()
        self._scale = loss_scale or LossScale(grow_after=0)
        self._config = config or ConductorConfig()
        self.members: dict[str, Member] = {}
        self.feeders: list[str] = []
        self._last: CommitNotice | None = None
        self._running: _Running | None = None
        self._next_step = 0
        self._unlisten = roster.listen(self._roster_changed)
        links.handle(Enlist, self._enlist)
        links.handle(Fed, self._fed)
        links.handle(Lost, self._lost)

    def close(self) -> None:
        """Hear no more of the roster. Idempotent."""
        self._unlisten()

    # What peers say

    def _enlist(self, incoming: Incoming[Enlist]) -> Enlisted:
        offer = incoming.message
        if any(stage >= self._num_stages for stage in offer.stages):
            raise ConfigurationError(f"stages {list(offer.stages)}: there are stages 0 to {self._num_stages - 1}")
        if offer.stages:
            self.members[incoming.sender] = Member(offer.stages, offer.listens)
        if offer.feeds and incoming.sender not in self.feeders:
            self.feeders.append(incoming.sender)
        return Enlisted(step=self._next_step)

    def _fed(self, incoming: Incoming[Fed]) -> None:
        fed, running = incoming.message, self._running
        if running is not None and fed.step == running.ledger.step:
            running.losses[fed.id] = fed.loss
            running.events.put_nowait(lambda: running.ledger.fed(fed.id, fed.attempt))

    def _lost(self, incoming: Incoming[Lost]) -> None:
        lost, running = incoming.message, self._running
        if running is None or lost.step != running.ledger.step:
            return

        def event() -> list[Action]:
            if lost.attempt != running.ledger.attempt:
                return []
            running.why = f"{incoming.sender} says of {lost.peer or 'itself'}: {lost.reason}"
            logger.warning("step %d, attempt %d: %s", lost.step, lost.attempt, running.why)
            return running.ledger.stalled()

        running.events.put_nowait(event)

    def _roster_changed(self, event: RosterEvent) -> None:
        if event.presence.state in ("dead", "left"):
            self._gone(event.peer, event.presence.reason or event.presence.state)

    def _gone(self, peer: str, reason: str) -> None:
        self.members.pop(peer, None)
        if peer in self.feeders:
            self.feeders.remove(peer)
        if (running := self._running) is not None:
            running.events.put_nowait(lambda: running.ledger.gone(peer, reason))

    # A step

    async def run_step(self, step: int, samples: Sequence[int]) -> StepOutcome:
        """Feed, average and commit one step; StageLostError where a stage has nobody left."""
        if not self.feeders:
            raise ConfigurationError("nobody feeds this pipeline: start a feeder")
        ledger = StepLedger(
            step=step,
            num_stages=self._num_stages,
            samples=list(samples),
            members=self.members,
            feeders=self.feeders,
            units=self._units,
        )
        running = self._running = _Running(ledger)
        self._next_step = step
        try:
            await self._carry_out(running, ledger.begin())
            while running.commit is None:
                await self._next_event(running)
            await self._announce(running, running.commit)
        finally:
            self._running = None
            await tasks.end(*running.tasks)
        self._next_step = step + 1
        total = sum(samples)
        loss = sum(running.losses.get(micro, float("nan")) * size for micro, size in enumerate(samples)) / total
        return StepOutcome(step, running.commit, loss, ledger.attempt, ledger.num_replayed, tuple(running.excluded))

    async def _next_event(self, running: _Running) -> None:
        ledger = running.ledger
        try:
            async with asyncio.timeout(self._config.stall_seconds):
                event = await running.events.get()
        except TimeoutError:
            if ledger.phase is not Phase.FEEDING:
                return  # requests have deadlines of their own
            running.why = f"nothing came through for {self._config.stall_seconds:.0f} s"
            await self._carry_out(running, ledger.stalled())
            return
        await self._carry_out(running, event())

    async def _carry_out(self, running: _Running, actions: Sequence[Action]) -> None:
        ledger = running.ledger
        for action in actions:
            if isinstance(action, Fence):
                if action.attempt > self._config.max_attempts:
                    raise RoundFailedError(f"step {ledger.step} failed {action.attempt - 1} times. Last: {running.why}")
                for task in running.tasks:
                    task.cancel()
                for member in action.members:
                    self._spawn(running, self._fence(running, member, action))
            elif isinstance(action, FeedAction):
                self._spawn(running, self._feed(running, action))
            elif isinstance(action, Average):
                reach("pipeline.conductor.averaging", step=ledger.step)
                order = self._order(ledger, action)
                for member in sorted(ledger.members):
                    self._spawn(running, self._average(running, member, order))
            elif isinstance(action, Commit):
                reach("pipeline.conductor.committing", step=ledger.step)
                if not await self._book.commit(action):
                    raise FatalError(f"step {action.step} was committed by another conductor: this one must stop")
                running.commit = action
            elif isinstance(action, Exclude):
                running.excluded.append(action.member)
                running.why = f"{action.member}: {action.reason}"
                self.members.pop(action.member, None)
                logger.warning("step %d goes on without %s: %s", ledger.step, action.member, action.reason)
            elif isinstance(action, StageLost):
                raise StageLostError(
                    f"nobody is left who holds stage {', '.join(map(str, action.stages))}: the run must go back to its "
                    "newest checkpoint"
                )

    # What is asked of the others

    async def _fence(self, running: _Running, member: str, fence: Fence) -> None:
        ledger = running.ledger
        begin = Begin(
            step=ledger.step,
            attempt=fence.attempt,
            total_samples=sum(ledger.samples),
            loss_scale=self._scale.scale,
            servers=fence.servers,
            last=self._last,
        )
        try:
            answer = await self._links.request(member, begin, reply=Held, timeout_seconds=self._config.fence_seconds)
        except (PeerError, RetryableError) as error:
            reason = f"it does not answer: {error}"
            running.events.put_nowait(lambda: self._give_up(running, fence.attempt, member, reason))
            return
        if answer.message.at_step != ledger.step:
            behind = f"it stands at step {answer.message.at_step}"
            running.events.put_nowait(lambda: self._give_up(running, fence.attempt, member, behind))
            return
        held = {each.stage: frozenset(each.ids) for each in answer.message.held}
        for each in answer.message.held:  # whose micro-batch came through, but not the news of it
            running.losses |= dict(zip(each.ids, each.losses, strict=False))
        running.events.put_nowait(lambda: ledger.held(member, fence.attempt, held))

    @staticmethod
    def _give_up(running: _Running, attempt: int, member: str, reason: str) -> list[Action]:
        return running.ledger.gone(member, reason) if attempt == running.ledger.attempt else []

    async def _feed(self, running: _Running, action: FeedAction) -> None:
        ledger = running.ledger
        feed = Feed(
            step=ledger.step,
            attempt=action.attempt,
            items=tuple(FeedItem(id=i.id, samples=i.samples, held_by=i.held_by) for i in action.items),
            servers=ledger.servers[0],
        )
        try:
            await self._links.send(action.feeder, feed, timeout_seconds=self._config.fence_seconds)
        except (PeerError, RetryableError) as error:
            reason = str(error)
            running.events.put_nowait(lambda: ledger.gone(action.feeder, reason))

    @staticmethod
    def _order(ledger: StepLedger, action: Average) -> AverageOrder:
        units = []
        for stages, members in zip(ledger.units, action.members, strict=True):
            units.append(
                tuple(
                    Contributor(server=member, stage=stage)
                    for member in members
                    for stage in stages
                    if stage in ledger.members[member].stages
                )
            )
        return AverageOrder(step=ledger.step, attempt=action.attempt, units=tuple(units))

    async def _average(self, running: _Running, member: str, order: AverageOrder) -> None:
        ledger = running.ledger
        try:
            answer = await self._links.request(
                member, order, reply=Averages, timeout_seconds=self._config.average_seconds
            )
        except PotluckError as error:
            running.why = f"{member} has no average: {error}"
            attempt = order.attempt
            running.events.put_nowait(lambda: ledger.stalled() if ledger.attempt == attempt else [])
            return
        for each in answer.message.units:
            contributions = {(c.server, c.stage): c.ids for c in each.contributions}
            running.events.put_nowait(
                partial(
                    ledger.averaged,
                    member,
                    order.attempt,
                    each.unit,
                    digest=each.digest,
                    squared_norm=each.squared_norm,
                    contributions=contributions,
                )
            )

    async def _announce(self, running: _Running, commit: Commit) -> None:
        factor, most = 1.0, self._config.max_norm
        if most and commit.total_norm > most:
            factor = most / (commit.total_norm + 1e-6)
        self._scale.update(is_finite=commit.is_applied)
        self._last = notice = CommitNotice(
            step=commit.step,
            attempt=commit.attempt,
            digests=commit.digests,
            factor=factor,
            is_applied=commit.is_applied,
        )
        reach("pipeline.conductor.committed", step=commit.step)
        await asyncio.gather(*(self._tell(member, notice) for member in running.ledger.members))

    async def _tell(self, member: str, notice: CommitNotice) -> None:
        """Whoever does not hear it now hears it with the next step's fence."""
        try:
            await self._links.request(member, notice, reply=Applied, timeout_seconds=self._config.fence_seconds)
        except (PeerError, RetryableError) as error:
            logger.warning("%s did not hear of the commit of step %d: %s", member, notice.step, error)

    @staticmethod
    def _spawn(running: _Running, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        running.tasks.add(task)
        task.add_done_callback(running.tasks.discard)
