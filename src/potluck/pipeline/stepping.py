"""One step, carried out: the ledger's actions as messages to feeders and servers, their answers as its events.

It moves no tensors. The conductor (conducting.py) runs one step after the other.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from potluck import tasks
from potluck.errors import PeerError, PotluckError, RetryableError, RoundFailedError
from potluck.faultpoints import reach
from potluck.link.dispatch import Incoming
from potluck.link.links import Links
from potluck.pipeline.judging import Check, CheckResult, Finding
from potluck.pipeline.layout import Layout
from potluck.pipeline.messages import (
    AverageOrder,
    Averages,
    Begin,
    Checked,
    CheckOrder,
    CommitNotice,
    Contributor,
    Fed,
    Feed,
    FeedItem,
    Held,
    Lost,
    Place,
    SpotCheck,
    UnitOrder,
)
from potluck.pipeline.stepledger import (
    Action,
    Average,
    Commit,
    Dispute,
    Exclude,
    Fence,
    Member,
    Phase,
    StageLost,
    StepLedger,
    Verify,
)
from potluck.pipeline.stepledger import Feed as FeedAction

logger = logging.getLogger(__name__)

TERM_BITS = 12  # attempts of one step in a conductor's term


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Patience."""

    fence_seconds: float = 15.0
    """A member that does not answer a fence for so long is given up for this step."""

    stall_seconds: float = 30.0
    """Nothing came through for so long: a fence finds out who is frozen."""

    average_seconds: float = 600.0
    check_seconds: float = 120.0
    """A verifier that does not answer for so long after the averages has found nothing."""
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
    members: tuple[str, ...] = ()
    """Who stands at the next step now."""


class StageLostError(RetryableError):
    """All holders of a stage are gone."""

    def __init__(self, stages: tuple[int, ...]) -> None:
        super().__init__(f"nobody is left who holds stage {', '.join(map(str, stages))}")
        self.stages = stages
        self.excluded: tuple[str, ...] = ()
        """Who was given up in this step."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What a step is about, and who takes part."""

    step: int
    life: int
    term: int
    """Attempts count on from here."""
    samples: tuple[int, ...]
    """Of each micro-batch."""
    place: Place
    layout: Layout
    units: tuple[tuple[int, ...], ...]
    members: Mapping[str, Member]
    feeders: tuple[str, ...]
    loss_scale: float
    last: CommitNotice | None = None
    loss: float = 0.0
    pins: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    are_checked: bool = False
    """Spot checks are on, be there one in this step or not."""
    checks: tuple[Check, ...] = ()
    arithmetics: Mapping[str, str] = field(default_factory=dict)
    trusted: frozenset[str] = frozenset()

    def checks_for(self, member: str) -> tuple[SpotCheck, ...]:
        """Those that a member hears of: nobody is told that it is checked itself."""
        return tuple(SpotCheck(server=c.server, verifier=c.verifier) for c in self.checks if c.server != member)


@dataclass
class _Running:
    """A step under way."""

    plan: StepPlan
    ledger: StepLedger
    book: CommitBook
    events: asyncio.Queue[Callable[[], list[Action]]] = field(default_factory=asyncio.Queue)
    losses: dict[int, float] = field(default_factory=dict)
    excluded: list[str] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    commit: Commit | None = None
    why: str = ""


CommitBook = Callable[[Commit], Awaitable[None]]
"""Records a commit as that of its step, once; raises where that cannot be."""


class StepRunner:
    """Runs one step at a time."""

    def __init__(self, links: Links, config: StepConfig | None = None) -> None:
        self._links = links
        self._config = config or StepConfig()
        self._running: _Running | None = None
        self._tried = (0, 0, 0)  # life, step, attempt: a step that is begun again counts on
        self.on_held: Callable[[str, Held], None] = lambda member, held: None
        self.on_fenced: Callable[[], None] = lambda: None
        self.on_checked: Callable[[Check, CheckResult], Finding] = lambda check, result: Finding()
        self.on_dispute: Callable[[frozenset[str], str], None] = lambda suspects, reason: None
        links.handle(Fed, self._fed)
        links.handle(Lost, self._lost)

    def close(self) -> None:
        """Hear nothing more."""
        self._links.unhandle(Fed)
        self._links.unhandle(Lost)

    # What peers say

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
            logger.warning("step %d, attempt %d: %s", lost.step, running.ledger.num_attempts, running.why)
            return running.ledger.stalled()

        running.events.put_nowait(event)

    def gone(self, peer: str, reason: str) -> None:
        """A peer is dead, or left."""
        if (running := self._running) is not None:
            running.events.put_nowait(lambda: running.ledger.gone(peer, reason))

    def hears_also(self, member: str, units: frozenset[int]) -> bool:
        """A member loads more blocks: whether it hears the averages of their units in the step under way."""
        return self._running is not None and self._running.ledger.hears_also(member, units)

    def feeder_came(self, peer: str) -> None:
        """A step that nobody feeds goes on with this one."""
        running = self._running
        if running is None or peer in running.ledger.feeders:  # no event: those put off the look for a standstill
            return

        def event() -> list[Action]:
            ledger = running.ledger
            had_none = not ledger.feeders
            if peer not in ledger.feeders:
                ledger.feeders.append(peer)
            return ledger.stalled() if had_none else []

        running.events.put_nowait(event)

    # A step

    async def run(self, plan: StepPlan, book: CommitBook) -> StepOutcome:
        """Feed, average and commit one step; StageLostError where a stage has nobody left."""
        tried = self._tried[2] if self._tried[:2] == (plan.life, plan.step) else 0
        ledger = StepLedger(
            step=plan.step,
            num_stages=plan.layout.num_stages,
            samples=plan.samples,
            members=dict(plan.members),
            feeders=list(plan.feeders),
            units=plan.units,
            checks={check.server: check.verifier for check in plan.checks},
            trusted=plan.trusted,
            attempt=max(plan.term << TERM_BITS, tried),
        )
        running = self._running = _Running(plan, ledger, book)
        try:
            await self._carry_out(running, ledger.begin())
            while running.commit is None:
                await self._next_event(running)
        except StageLostError as error:
            error.excluded = tuple(running.excluded)
            raise
        finally:
            self._running = None
            self._tried = (plan.life, plan.step, ledger.attempt)
            await tasks.end(*running.tasks)
        total = sum(plan.samples)
        loss = sum(running.losses.get(m, math.nan) * size for m, size in enumerate(plan.samples)) / total
        return StepOutcome(
            plan.step,
            running.commit,
            loss,
            ledger.num_attempts,
            ledger.num_replayed,
            tuple(running.excluded),
            tuple(sorted(ledger.members)),
        )

    @property
    def phase(self) -> str:
        """How far the step is."""
        return self._running.ledger.phase.value if self._running is not None else "waiting"

    @property
    def under_way(self) -> tuple[int, tuple[str, ...], tuple[int, ...]]:
        """The attempt's number, the servers of its first stage, and the samples of each micro-batch."""
        assert self._running is not None, "asked in a step"
        ledger = self._running.ledger
        return ledger.attempt, ledger.servers[0], tuple(ledger.samples)

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
                if ledger.num_attempts > self._config.max_attempts:
                    raise RoundFailedError(
                        f"step {ledger.step} failed {ledger.num_attempts - 1} times. Last: {running.why}"
                    )
                for task in running.tasks:
                    task.cancel()
                for member in action.members:
                    self._spawn(running, self._fence(running, member, action))
            elif isinstance(action, FeedAction):
                self._spawn(running, self._feed(running, action))
            elif isinstance(action, Average):
                reach("pipeline.conductor.averaging", step=ledger.step)
                self._average_all(running, action)
            elif isinstance(action, Verify):
                self._spawn(running, self._verify(running, action))
            elif isinstance(action, Commit):
                reach("pipeline.conductor.committing", step=ledger.step)
                await running.book(action)
                running.commit = action
            elif isinstance(action, Exclude):
                running.excluded.append(action.member)
                running.why = f"{action.member}: {action.reason}"
                logger.warning("step %d goes on without %s: %s", ledger.step, action.member, action.reason)
            elif isinstance(action, Dispute):
                self.on_dispute(action.suspects, action.reason)
            elif isinstance(action, StageLost):
                raise StageLostError(action.stages)

    # What is asked of the others

    async def _fence(self, running: _Running, member: str, fence: Fence) -> None:
        ledger, plan = running.ledger, running.plan
        begin = Begin(
            step=ledger.step,
            attempt=fence.attempt,
            total_samples=sum(ledger.samples),
            loss_scale=plan.loss_scale,
            servers=fence.servers,
            starts=plan.layout.starts,
            life=plan.life,
            loss=plan.loss,
            last=plan.last,
            pins=plan.pins.get(member, ()),
            valid_from=fence.valid_from,
            are_checked=plan.are_checked,
            checks=plan.checks_for(member),
        )
        try:
            answer = await self._links.request(member, begin, reply=Held, timeout_seconds=self._config.fence_seconds)
        except (PeerError, RetryableError) as error:
            reason = f"it does not answer: {error}"
            running.events.put_nowait(lambda: self._give_up(running, fence.attempt, member, reason))
            return
        self.on_held(member, answer.message)
        standing = set(answer.message.standing) if answer.message.at_step == ledger.step else set()
        for stage, names in enumerate(fence.servers):
            if member in names and not standing.issuperset(plan.layout.blocks_of(stage)):
                behind = f"stage {stage} does not stand at step {ledger.step} there"
                running.events.put_nowait(partial(self._give_up, running, fence.attempt, member, behind))
                return
        held = {each.stage: frozenset(each.ids) for each in answer.message.held}
        for each in answer.message.held:  # whose micro-batch came through, but not the news of it
            running.losses |= dict(zip(each.ids, each.losses, strict=False))

        def event() -> list[Action]:
            actions = ledger.held(member, fence.attempt, held)
            if ledger.phase is not Phase.FENCING:
                self.on_fenced()
            return actions

        running.events.put_nowait(event)

    @staticmethod
    def _give_up(running: _Running, attempt: int, member: str, reason: str) -> list[Action]:
        return running.ledger.gone(member, reason) if attempt == running.ledger.attempt else []

    async def _feed(self, running: _Running, action: FeedAction) -> None:
        ledger = running.ledger
        feed = Feed(
            step=ledger.step,
            attempt=action.attempt,
            items=tuple(
                FeedItem(id=i.id, first=sum(ledger.samples[: i.id]), samples=i.samples, held_by=i.held_by)
                for i in action.items
            ),
            servers=ledger.servers[0],
            place=running.plan.place,
            total_samples=sum(ledger.samples),
            life=running.plan.life,
            checks=running.plan.checks_for(action.feeder),
        )
        try:
            await self._links.send(action.feeder, feed, timeout_seconds=self._config.fence_seconds)
        except (PeerError, RetryableError) as error:
            reason = str(error)
            running.events.put_nowait(lambda: ledger.gone(action.feeder, reason))

    def _average_all(self, running: _Running, action: Average) -> None:
        ledger = running.ledger
        orders: dict[str, list[UnitOrder]] = {name: [] for name in ledger.members}
        serving = {(name, stage) for stage, names in enumerate(ledger.servers) for name in names}
        for unit, (stages, members) in enumerate(zip(ledger.units, action.members, strict=True)):
            contributors = tuple(
                Contributor(server=name, stage=stage)
                for name in sorted(ledger.members)
                for stage in stages
                if (name, stage) in serving
            )
            servers = {each.server for each in contributors}
            listeners = tuple(name for name in members if name not in servers)
            for name in members:
                orders[name].append(UnitOrder(unit=unit, contributors=contributors, listeners=listeners))
        for name, units in orders.items():
            if units:
                order = AverageOrder(step=ledger.step, attempt=action.attempt, units=tuple(units))
                self._spawn(running, self._average(running, name, order))

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

    async def _verify(self, running: _Running, action: Verify) -> None:
        ledger, plan = running.ledger, running.plan
        stages = tuple(stage for stage, names in enumerate(ledger.servers) if action.server in names)
        order = CheckOrder(
            step=ledger.step,
            attempt=action.attempt,
            server=action.server,
            stages=stages,
            arithmetic=plan.arithmetics.get(action.server, ""),
        )
        seconds = self._config.average_seconds + self._config.check_seconds
        try:
            answer = await self._links.request(action.verifier, order, reply=Checked, timeout_seconds=seconds)
            result = result_of(answer.message)
        except PotluckError as error:
            result = CheckResult(compared=0, note=str(error))

        def event() -> list[Action]:
            if ledger.attempt != action.attempt:
                return []
            finding = self.on_checked(Check(action.server, action.verifier), result)
            for liar in finding.excluded.keys() - {action.server}:
                running.events.put_nowait(partial(ledger.gone, liar, finding.excluded[liar]))
            if finding.failed:
                running.losses.clear()
                return ledger.lied(action.server, action.attempt, finding.failed)
            return ledger.checked(action.server, action.attempt)

        running.events.put_nowait(event)

    @staticmethod
    def _spawn(running: _Running, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        running.tasks.add(task)
        task.add_done_callback(running.tasks.discard)


def result_of(checked: Checked) -> CheckResult:
    """What a verifier says, as the judge takes it."""
    errors = {"output": checked.output_error, "gradient": checked.gradient_error, "sum": checked.sum_error}
    return CheckResult(
        compared=checked.compared,
        missing=checked.missing,
        errors={kind: error for kind, error in errors.items() if error is not None},  # type: ignore[misc]
        contradicted_by=checked.contradicted_by,
        note=checked.note,
    )
