"""The conductor: one step after the other, with the peers that are there; it decides who does what.

There is one conductor at a time: the coordinator of `main`, by its lease. The run's record (book.py) holds all that a
successor needs, and peers enlist again with the new conductor. So a conductor may die at any moment.

    roll.py      enlisted peers ─▶ staffing ─▶ assignments: they load while the run trains on
    here         at each boundary: who can serve now? a new layout counts once its servers are ready
                 a block that nobody has: the run goes back to its newest cut
    stepping.py  the step itself        saving.py  cuts        evaluating.py  held-out data        showing.py  overview
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec.structs import replace

from potluck import tasks
from potluck.clock import Clock
from potluck.errors import (
    PeerError,
    PotluckError,
    RetryableError,
    RoundFailedError,
)
from potluck.faultpoints import reach
from potluck.link.links import Links
from potluck.peer.roster import Roster
from potluck.pipeline.blocks import units_of
from potluck.pipeline.blueprint import Blueprint
from potluck.pipeline.book import Book, RunRecord, with_loss
from potluck.pipeline.evaluating import Evaluations
from potluck.pipeline.judging import Check, CheckResult, Finding, Judge
from potluck.pipeline.layout import Layout
from potluck.pipeline.messages import (
    Applied,
    CommitNotice,
    Cut,
    Locate,
    Located,
    Place,
)
from potluck.pipeline.roll import OnEvent, Roll, RunState
from potluck.pipeline.saving import CutMaker
from potluck.pipeline.showing import overview
from potluck.pipeline.staffing import Plan, Staff, is_ready, servers_now
from potluck.pipeline.stepledger import Commit, LossScale, Member
from potluck.pipeline.stepping import StageLostError, StepConfig, StepOutcome, StepPlan, StepRunner

logger = logging.getLogger(__name__)

MAX_EXCLUDED = 64


class Course(Protocol):
    """What the run's organiser says about its steps."""

    def sizes(self, step: int, num_stages: int) -> tuple[int, ...]:
        """Samples of each micro-batch of this step."""

    def max_norm(self, step: int) -> float:
        """Gradients are clipped to this total norm over all stages; 0: not clipped."""

    def stands_still(self, step: int) -> str:
        """Why this step is not taken now: paused, or over; empty: it is."""


@dataclass(frozen=True, kw_only=True)
class ConductorConfig:
    """Patience."""

    step: StepConfig = field(default_factory=StepConfig)
    request_seconds: float = 15.0
    gather_seconds: float = 12.0
    """A new conductor waits so long for holders of blocks before it gives them up."""
    lost_seconds: float = 5.0
    """So long a block may have no holder before the run goes back to a cut."""
    evaluate_seconds: float = 60.0
    """So long a commit waits for an evaluation through the pipeline."""
    look_seconds: float = 0.5
    """Between looks at what stands still."""


class Conductor:
    """Runs the pipeline while this peer has the lease."""

    def __init__(
        self,
        links: Links,
        roster: Roster,
        clock: Clock,
        *,
        blueprint: Blueprint,
        staff: Staff,
        course: Course,
        book: Book,
        term: int = 0,
        judge: Judge | None = None,
        config: ConductorConfig | None = None,
    ) -> None:
        self._links = links
        self._clock = clock
        self._blueprint = blueprint
        self._staff = staff
        self._course = course
        self._book = book
        self._term = term
        self._config = config or ConductorConfig()
        self._runner = StepRunner(links, self._config.step)
        self._state = RunState(RunRecord())
        self.judge = judge or Judge(rate=0.0)
        seconds = self._config.request_seconds
        self.roll = Roll(links, roster, clock, blueprint, staff, self.judge, self._state, request_seconds=seconds)
        self.roll.on_gone = self._gone
        self.roll.on_feeder = self._runner.feeder_came
        self.roll.hears_also = self._runner.hears_also
        self._cuts = CutMaker(links, self.roll, self._state, self._write, self._settle)
        seconds = self._config.evaluate_seconds
        self._evaluations = Evaluations(links, self.roll, self._state, self._runner, seconds=seconds)
        self._runner.on_held = self.roll.held
        self._runner.on_fenced = self._fenced
        self._runner.on_checked = self._checked
        self._runner.on_dispute = lambda suspects, reason: self._exclude(self.judge.disagree(suspects, reason))
        self._step_seconds = 0.0
        self._lost_since: float | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started_at = clock.monotonic()
        self._told = ""

    async def close(self) -> None:
        """Conduct no more. Idempotent."""
        self._runner.close()
        await self.roll.close()
        await self._cuts.close()
        await tasks.end(*self._tasks)

    @property
    def on_event(self) -> OnEvent:
        """For people: waiting, step, morph, move, lost, restored, saved, check failed, excluded."""
        return self.roll.on_event

    @on_event.setter
    def on_event(self, told: OnEvent) -> None:
        self.roll.on_event = told

    @property
    def record(self) -> RunRecord:
        """How far the run is."""
        return self._state.record

    @record.setter
    def record(self, record: RunRecord) -> None:
        self._state.record = record

    @property
    def layout(self) -> Layout | None:
        """The one that counts."""
        return self.roll.layout

    async def save_now(self, seconds: float) -> bool:
        """Save a cut at the next boundary, as before the host leaves; whether one is on disk then."""
        return await self._cuts.save_now(seconds)

    def overview(self) -> dict[str, Any]:
        """Who does what now, and where micro-batches flow."""
        return overview(
            self.roll,
            self.record,
            self.judge,
            phase=self._runner.phase,
            waits=self._told,
            step_seconds=self._step_seconds,
            now=self._clock.monotonic(),
        )

    # The run

    async def run(self) -> None:
        """Take steps until cancelled, or until another conductor has gone on."""
        record = await self._persist(self._book.read)
        if record is not None:
            self.record = record
            self.judge.excluded |= dict(record.excluded)
        self._started_at = self._clock.monotonic()
        while True:
            await self.until_ready()
            try:
                await self.take_step()
            except StageLostError as error:
                logger.warning("step %d: %s", self.record.step, error)
                self.on_event("lost", {"step": self.record.step, "stages": list(error.stages)})
            except RoundFailedError as error:
                self.on_event("failed", {"step": self.record.step, "reason": str(error)})
                await asyncio.sleep(1.0)

    async def until_ready(self) -> None:
        """Return once a step can be taken."""
        while True:
            self.roll.changed.clear()
            self.roll.restaff()
            self.roll.changed.clear()
            await self._cuts.save_if_wanted()
            reason = self._course.stands_still(self.record.step) or await self._obstacle()
            if not reason:
                self._told = ""
                return
            if reason != self._told:
                self._told = reason
                self.on_event("waiting", {"step": self.record.step, "reason": reason})
            try:
                async with asyncio.timeout(self._config.look_seconds):
                    await self.roll.changed.wait()
            except TimeoutError:
                pass

    async def _obstacle(self) -> str:
        """Why no step can be taken now; empty: it can. Changes the layout, or goes back to a cut, where that helps."""
        plan, standing = self.roll.plan, self.roll.standing()
        if plan is None:
            return "nobody serves: potluck join on another machine"
        held = frozenset().union(*standing.values())
        lost = [block for block in range(self._blueprint.num_blocks) if block not in held]
        is_fresh = self.record.step == 0 or self._state.restored_at == self.record.step
        if lost and not is_fresh:
            now = self._clock.monotonic()
            if self._lost_since is None:
                self._lost_since = now
            patience = max(self._started_at + self._config.gather_seconds, self._lost_since + self._config.lost_seconds)
            if now < patience:  # a hub that was away takes everybody for dead, for a moment
                return f"nobody who is here has block {', '.join(map(str, lost))}"
            await self._go_back(lost)
            return "the run went back: its peers load"
        self._lost_since = None
        layout = self.layout
        if layout != plan.layout and is_ready(plan, standing):
            await self._morph(plan)
            layout = plan.layout
        if layout is None:
            return f"{len(self._staff.servers)} servers load their first blocks"
        if servers_now(layout, plan, standing, frozenset(self._staff.servers)) is None:
            stages = [
                s for s, blocks in enumerate(layout.stages) if not any(h.issuperset(blocks) for h in standing.values())
            ]
            return f"stage {', '.join(map(str, stages))} is being loaded"
        if not self.roll.feeders():
            return "nobody feeds data: potluck join --feed on another machine"
        return ""

    async def _morph(self, plan: Plan) -> None:
        old = self.layout
        words = f"step {self.record.step}: {plan.layout.num_stages} stages for {len(plan.serves)} servers" + (
            f", {old.num_stages} before" if old is not None else ""
        )
        morphs = (*self.record.morphs, words)[-16:]
        await self._write(replace(self.record, starts=plan.layout.starts, morphs=morphs))
        reach("pipeline.conductor.morphed", step=self.record.step)
        self.on_event(
            "morph", {"step": self.record.step, "stages": plan.layout.num_stages, "servers": len(plan.serves)}
        )

    async def _go_back(self, lost: list[int]) -> None:
        """Nobody has these blocks: the whole run goes on from its newest cut."""
        cuts = [cut for peer in self.roll.peers.values() for cut in peer.offer.cuts if cut.step <= self.record.step]
        cut = max(cuts, key=lambda each: each.step, default=Cut(step=0, place=Place()))
        steps = self.record.step - cut.step
        self.on_event("restored", {"from": self.record.step, "to": cut.step, "lost_steps": steps, "blocks": lost})
        logger.warning("nobody has block %s: the run goes back from step %d to %d", lost, self.record.step, cut.step)
        await self._write(
            replace(
                self.record,
                step=cut.step,
                life=self.record.life + 1,
                place=cut.place,
                loss_scale=cut.loss_scale,
                last=None,
                losses=tuple(each for each in self.record.losses if each[0] < cut.step),
            )
        )
        self._state.restored_at = cut.step
        for peer in self.roll.peers.values():
            peer.forget()
        self.roll.restaff()

    # A step

    def _step_plan(self) -> StepPlan:
        layout, plan, record = self.layout, self.roll.plan, self.record
        assert layout is not None, "looked at before"
        assert plan is not None, "looked at before"
        standing = self.roll.standing()
        serving = servers_now(layout, plan, standing, frozenset(self._staff.servers))
        assert serving is not None, "looked at before"
        members = {}
        for name, peer in self.roll.peers.items():
            held = [s for s, blocks in enumerate(layout.stages) if peer.standing.issuperset(blocks)]
            served = tuple(stage for stage in held if name in serving[stage])
            heard = frozenset(self._blueprint.units_in(peer.blocks | peer.standing))
            if served or heard:
                members[name] = Member(served, units=heard, spare=tuple(stage for stage in held if stage not in served))
        units = tuple(
            stages if self._blueprint.num_values[unit] else ()
            for unit, stages in enumerate(units_of(layout.stages, self._blueprint.ties))
        )
        return StepPlan(
            step=record.step,
            life=record.life,
            term=self._term,
            samples=self._course.sizes(record.step, layout.num_stages),
            place=record.place,
            layout=layout,
            units=units,
            members=members,
            feeders=self.roll.feeders(),
            loss_scale=record.loss_scale,
            last=record.last,
            loss=record.loss,
            pins=self._cuts.pins(standing),
            are_checked=self.judge.rate > 0,
            checks=self._checks(layout, members),
            arithmetics={name: peer.offer.arithmetic for name, peer in self.roll.peers.items()},
            trusted=self.judge.trusted,
        )

    def _checks(self, layout: Layout, members: Mapping[str, Member]) -> tuple[Check, ...]:
        """Which servers are checked in the next step, and which check them."""

        def blocks(stages: Iterable[int]) -> frozenset[int]:
            return frozenset(block for stage in stages for block in layout.blocks_of(stage))

        serving = {name: blocks(member.stages) for name, member in members.items() if member.stages}
        holding = {name: self.roll.peers[name].standing for name in members}
        self.judge.has_arbiter = any(
            peer.offer.listens for name, peer in self.roll.peers.items() if name in self.judge.trusted
        )
        return self.judge.choose(serving, holding)

    def _checked(self, check: Check, result: CheckResult) -> Finding:
        """A verifier has answered: a server that lied is excluded, in this and all later steps."""
        arithmetics = {name: peer.offer.arithmetic for name, peer in self.roll.peers.items()}
        finding = self.judge.hear(check, result, arithmetics)
        if finding.failed:
            about = {"step": self.record.step, "peer": check.server, "verifier": check.verifier}
            self.on_event("check failed", {**about, "reason": finding.failed})
        self._exclude(finding.excluded)
        return finding

    def _exclude(self, found: Mapping[str, str]) -> None:
        for peer, reason in found.items():
            logger.warning("%s is excluded: %s", peer, reason)
            self.on_event("excluded", {"step": self.record.step, "peer": peer, "reason": reason})
            self.roll.exclude(peer)
        excluded = tuple((peer, reason[:500]) for peer, reason in self.judge.excluded.items())[-MAX_EXCLUDED:]
        self.record = replace(self.record, excluded=excluded)  # written with the step's commit

    async def take_step(self) -> StepOutcome:
        """One step, with all peers that are ready."""
        plan = self._step_plan()
        self._state.heard = {name: member.units or frozenset() for name, member in plan.members.items()}
        locating = self._spawn(self._locate(plan))
        started = self._clock.monotonic()

        async def book(commit: Commit) -> None:
            place = await locating
            await self._evaluations.until_over()
            factor, most = 1.0, self._course.max_norm(plan.step)
            if most and commit.is_applied and commit.total_norm > most:
                factor = most / (commit.total_norm + 1e-6)
            scale = LossScale(self.record.loss_scale, grow_after=0)
            scale.update(is_finite=commit.is_applied)
            notice = CommitNotice(
                step=commit.step,
                attempt=commit.attempt,
                digests=commit.digests,
                factor=factor,
                is_applied=commit.is_applied,
            )
            await self._write(
                replace(self.record, step=plan.step + 1, place=place, loss_scale=scale.scale, last=notice)
            )

        try:
            outcome = await self._runner.run(plan, book)
        except StageLostError as error:
            self.roll.must_load(error.excluded)
            raise
        finally:
            self._state.heard = None
            locating.cancel()
            self._evaluations.stop()
        # Written with the next commit: what people look at need not be exact.
        self.record = replace(
            self.record, loss=outcome.loss, losses=with_loss(self.record.losses, plan.step, outcome.loss)
        )
        self._state.has_stepped = True
        reach("pipeline.conductor.committed", step=plan.step)
        notice = self.record.last
        assert notice is not None
        for name in outcome.members:
            self._spawn(self._tell(name, notice))
        self.roll.must_load(set(plan.members) - set(outcome.members))
        self._step_seconds = self._clock.monotonic() - started
        self.on_event(
            "step",
            {
                "step": plan.step,
                "loss": outcome.loss,
                "samples": sum(plan.samples),
                "seconds": self._step_seconds,
                "attempts": outcome.attempts,
                "replayed": outcome.replayed,
                "excluded": list(outcome.excluded),
            },
        )
        return outcome

    def _fenced(self) -> None:
        """An attempt's members have all answered."""
        self._cuts.fenced()
        self._evaluations.fenced()

    def _gone(self, peer: str, reason: str) -> None:
        self._evaluations.stop()
        self._runner.gone(peer, reason)

    async def _locate(self, plan: StepPlan) -> Place:
        """Where the next step's data begin, asked of a feeder."""
        while True:
            for name in self.roll.feeders():
                try:
                    answer = await self._links.request(
                        name,
                        Locate(step=plan.step, place=plan.place, samples=sum(plan.samples)),
                        reply=Located,
                        timeout_seconds=self._config.step.average_seconds,
                    )
                except (PeerError, RetryableError) as error:
                    logger.info("%s cannot say where the data go on: %s", name, error)
                else:
                    return answer.message.place
            await asyncio.sleep(self._config.look_seconds)

    async def _tell(self, member: str, notice: CommitNotice) -> None:
        """A peer that misses the notice gets it with the next step's fence."""
        try:
            await self._links.request(member, notice, reply=Applied, timeout_seconds=self._config.request_seconds)
        except PotluckError as error:
            logger.info("%s did not hear of the commit of step %d: %s", member, notice.step, error)

    async def _settle(self) -> None:
        """At a boundary: have all who hold something take the last step."""
        last = self.record.last
        if last is not None and last.step == self.record.step - 1:
            await asyncio.gather(*(self._tell(name, last) for name in self.roll.standing()))

    # Writing

    async def _write(self, record: RunRecord) -> None:
        await self._persist(lambda: self._book.write(record))
        self.record = record

    async def _persist(self, work: Callable[[], Any]) -> Any:
        """While the hub is away, again and again; a lease that passes on meanwhile ends us."""
        while True:
            try:
                return await work()
            except RetryableError as error:
                logger.info("the hub does not answer: %s", error)
                await asyncio.sleep(self._config.look_seconds)

    def _spawn(self, work: Any) -> Any:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
