"""One peer's part in a pipeline: enlists, holds what it is assigned, serves, feeds, saves.

member = PipelineMember(links, clock, self_id, following, blueprint, …, part=Part(serves=True))
await member.start()        # from then on it follows the present conductor
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from potluck import tasks
from potluck.clock import Clock
from potluck.errors import ConfigurationError, PermissionDeniedError, PotluckError, ProtocolError
from potluck.faultpoints import reach
from potluck.link.dispatch import Incoming
from potluck.link.links import Links
from potluck.pipeline.arithmetic import arithmetic_of
from potluck.pipeline.averaging import LinkedGroup
from potluck.pipeline.cuts import CutShelf
from potluck.pipeline.evaluating import Evaluation, Evaluator
from potluck.pipeline.feeding import Feeder, FeederConfig, Source
from potluck.pipeline.following import Following
from potluck.pipeline.holding import Holding
from potluck.pipeline.messages import (
    Accepted,
    Assignment,
    Begin,
    Enlist,
    Enlisted,
    FetchUnit,
    Ready,
    SaveCut,
    Saved,
)
from potluck.pipeline.serving import ServerConfig, StageServer
from potluck.pipeline.stepend import StepEnd
from potluck.pipeline.transfer import UnitServer, fetch_unit
from potluck.pipeline.verifying import Verifier
from potluck.pipeline.witnessing import Witness

logger = logging.getLogger(__name__)

ENLIST_EVERY_SECONDS = 3.0  # again, so that a conductor that forgot us, or is new, knows
RETRY_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Part:
    """What this peer would do."""

    serves: bool = False
    stages: tuple[int, ...] = ()
    feeds: bool = False
    listens: bool = False
    room_bytes: int = 0
    saves_every: int = 0
    is_leaving: bool = False


@dataclass(frozen=True, kw_only=True)
class MemberConfig:
    """How it works."""

    server: ServerConfig = field(default_factory=ServerConfig)
    feeder: FeederConfig = field(default_factory=FeederConfig)
    fetch_seconds: float = 60.0
    """For one piece of a state: nothing comes for so long."""


class PipelineMember:
    """Lives on the event loop."""

    def __init__(
        self,
        links: Links,
        clock: Clock,
        self_id: str,
        following: Following,
        holding: Holding,
        part: Part,
        *,
        source: Source | None = None,
        cuts: CutShelf | None = None,
        evaluation: Evaluation | None = None,
        config: MemberConfig | None = None,
    ) -> None:
        self._links = links
        self._clock = clock
        self._self_id = self_id
        self.following = following
        self.holding = holding
        self.part = part
        self._config = config or MemberConfig()
        group = LinkedGroup(links, self_id, holding.blueprint.num_values)
        self._group = group
        self.witness = witness = Witness(links)
        seed, server_config = holding.blueprint.seed, self._config.server
        self.end = StepEnd(links, self_id, following, holding, group, server_config.timeout_seconds)
        self.server = StageServer(links, clock, self_id, following, holding, self.end, witness, server_config, seed)
        self.server.on_begin = self._begun
        self.verifier = Verifier(
            links,
            following,
            holding,
            group,
            self_id=self_id,
            codec=server_config.codec,
            averaged=self.end.until_averaged,
        )
        self.feeder = (
            Feeder(links, clock, following, source, witness, self._config.feeder) if source is not None else None
        )
        self._evaluation = evaluation
        self._evaluator = Evaluator(links, clock, following, evaluation) if evaluation is not None else None
        self.units = UnitServer(links, clock, holding)
        self.cuts = cuts
        if cuts is not None:
            self.units.cuts = cuts
            links.handle(SaveCut, self._save)
        if part.feeds and source is None:
            raise ConfigurationError("a peer that feeds needs data")
        self._assignment: Assignment | None = None
        self._loading: asyncio.Task[None] | None = None
        self._enlisting: asyncio.Task[None] | None = None
        self._again = asyncio.Event()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.bytes_loaded = 0
        self.on_assigned: Callable[[Assignment], None] = lambda assignment: None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_step: Callable[[Begin], None] = lambda begin: None
        self._told_step = -1
        self.on_saved: Callable[[int], None] = lambda step: None
        self.on_refused: Callable[[PotluckError], None] = lambda error: None
        """The conductor does not want this peer: asking again does not help."""
        links.handle(Assignment, self._assigned)
        holding.on_standing = self._tell_ready
        following.on_change = self._again.set

    async def start(self) -> None:
        """Begin to take part."""
        await self.server.start()
        self._enlisting = asyncio.create_task(self._keep_enlisted(), name="pipeline-enlist")

    async def close(self) -> None:
        """Take part no more. Idempotent."""
        await tasks.end(self._enlisting, self._loading, *self._tasks)
        self._links.unhandle(Assignment)
        self._links.unhandle(SaveCut)
        self._group.close()
        self.units.close()
        self.verifier.close()
        await self.witness.close()
        await self.server.close()
        await self.end.close()
        if self.feeder is not None:
            await self.feeder.close()
        if self._evaluator is not None:
            self._evaluator.close()
        await self.holding.close()

    # Enlisting

    def offer(self) -> Enlist:
        """What it says to the conductor."""
        part, holding = self.part, self.holding
        return Enlist(
            serves=part.serves,
            stages=part.stages,
            feeds=part.feeds,
            may_feed=self.feeder is not None,
            listens=part.listens,
            saves=self.cuts is not None,
            saves_every=part.saves_every,
            evaluates_every=self._evaluation.every_steps if self._evaluation is not None else 0,
            room_bytes=part.room_bytes,
            rate=self.server.rate(),
            life=holding.life,
            at_step=holding.step,
            standing=holding.standing,
            cuts=self.cuts.cuts if self.cuts is not None else (),
            is_leaving=part.is_leaving,
            arithmetic=arithmetic_of(holding.device),
            waiting=self.server.num_waiting,
            sent=(*self.server.sent(), *(self.feeder.sent() if self.feeder is not None else ())),
        )

    async def _keep_enlisted(self) -> None:
        while True:
            self._again.clear()
            if self.following.peer:
                try:
                    await self._links.request(
                        self.following.peer, self.offer(), reply=Enlisted, timeout_seconds=ENLIST_EVERY_SECONDS * 2
                    )
                except (ConfigurationError, PermissionDeniedError) as error:
                    self.on_refused(error)
                except PotluckError as error:
                    logger.debug("the conductor does not answer: %s", error)
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
            try:
                async with asyncio.timeout(ENLIST_EVERY_SECONDS):
                    await self._again.wait()
            except TimeoutError:
                pass

    async def leave(self, seconds: float) -> bool:
        """Hand over, at most for so long: whether others have what this peer held."""
        self.part = replace(self.part, is_leaving=True)
        self._again.set()
        try:
            async with asyncio.timeout(seconds):
                while self.holding.blocks or self.server.stages:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    # Holding

    async def _assigned(self, incoming: Incoming[Assignment]) -> Accepted:
        assignment = incoming.message
        if not await self.following.accepts(incoming.sender):
            raise ProtocolError("only the conductor says who does what")
        num_blocks = self.holding.blueprint.num_blocks
        if any(block >= num_blocks for block in assignment.blocks):
            raise ProtocolError(f"the model has {num_blocks} blocks")
        is_new = self._assignment is None or self._assignment.stages != assignment.stages
        self._assignment = assignment
        await self.end.catch_up(assignment.life, assignment.last)
        from_seed = assignment.step == 0  # before the first step all have the values that the seed gives
        await self.holding.hold(assignment.blocks, life=assignment.life, step=assignment.step, from_seed=from_seed)
        if is_new:
            self.on_assigned(assignment)
        if self.holding.missing and (self._loading is None or self._loading.done()):
            self._loading = asyncio.create_task(self._load(), name="pipeline-load")
        return Accepted(standing=self.holding.standing)

    async def _load(self) -> None:
        """Fetch what is missing, until nothing is."""
        while missing := self.holding.missing:
            assignment = self._assignment
            assert assignment is not None
            progressed = False
            for unit in missing:
                ask = FetchUnit(
                    unit=unit,
                    life=assignment.life,
                    step=assignment.step if assignment.cut else self.holding.needed_from(unit),
                    is_exact=assignment.cut,
                    is_cut=assignment.cut,
                )
                try:
                    reach("pipeline.loading", unit=unit)
                    fetched = await fetch_unit(
                        self._links, assignment.holders[unit], ask, timeout_seconds=self._config.fetch_seconds
                    )
                    self.bytes_loaded += fetched.num_bytes
                    progressed |= await self.holding.loaded(unit, fetched.step, fetched.tensors, life=assignment.life)
                except PotluckError as error:
                    logger.debug("unit %d does not come yet: %s", unit, error)
            if not progressed:
                self._again.set()  # the conductor may know other holders by now
                await asyncio.sleep(RETRY_SECONDS)
        self.on_ready()

    def _tell_ready(self) -> None:
        self._changed.set()

        async def tell() -> None:
            holding = self.holding
            ready = Ready(life=holding.life, step=holding.step, standing=holding.standing)
            try:
                await self._links.send(self.following.peer, ready, timeout_seconds=ENLIST_EVERY_SECONDS)
            except PotluckError as error:
                logger.debug("the conductor was not told: %s", error)

        if self.following.peer:
            self._spawn(tell())

    async def _begun(self, begin: Begin) -> None:
        self.verifier.begin(begin)
        self._changed.set()
        if begin.step != self._told_step:
            self._told_step = begin.step
            self.on_step(begin)
        if begin.pins and begin.life == self.holding.life and begin.step == self.holding.step:
            await self.units.pin(begin.pins)
        if self.holding.missing and self._assignment is not None and (self._loading is None or self._loading.done()):
            self._loading = asyncio.create_task(self._load(), name="pipeline-load")

    # Saving

    async def _save(self, incoming: Incoming[SaveCut]) -> Saved:
        order = incoming.message
        if self.cuts is None or not await self.following.accepts(incoming.sender):
            raise ProtocolError("only the conductor orders cuts")

        async def fetch(unit: int) -> dict[str, object]:
            ask = FetchUnit(unit=unit, life=order.life, step=order.cut.step, is_exact=True)
            fetched = await fetch_unit(
                self._links, order.holders[unit], ask, timeout_seconds=self._config.fetch_seconds
            )
            return dict(fetched.tensors)

        num_bytes = await self.cuts.save(order.cut, len(order.holders), fetch)
        self.on_saved(order.cut.step)
        return Saved(step=order.cut.step, num_bytes=num_bytes)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
