"""The conductor: one step after the other, with the peers that are there; it decides who does what.

There is one at a time: the coordinator of `main`, by its lease. All that a successor needs stands in the run's record
(book.py), and peers enlist anew with whoever conducts. So a conductor may die at any moment.

    enlisted peers ─▶ staffing ─▶ assignments        they load while the run trains on
    at each boundary: who can serve now? a new layout counts once its servers are ready
    a block that nobody has: the run goes back to its newest cut
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
    ConfigurationError,
    PeerError,
    PermissionDeniedError,
    PotluckError,
    RetryableError,
    RoundFailedError,
)
from potluck.faultpoints import reach
from potluck.link.dispatch import Incoming
from potluck.link.links import Links
from potluck.peer.roster import Roster, RosterEvent
from potluck.pipeline.blocks import units_of
from potluck.pipeline.blueprint import Blueprint
from potluck.pipeline.book import Book, RunRecord, with_loss
from potluck.pipeline.flows import FlowMeter
from potluck.pipeline.judging import Check, CheckResult, Finding, Judge
from potluck.pipeline.layout import Layout
from potluck.pipeline.messages import (
    Accepted,
    Applied,
    Assignment,
    CommitNotice,
    Cut,
    Enlist,
    Enlisted,
    Held,
    Locate,
    Located,
    Place,
    Ready,
    SaveCut,
    Saved,
)
from potluck.pipeline.staffing import Offer, Plan, Staff, is_ready, servers_now
from potluck.pipeline.stepledger import Commit, LossScale, Member
from potluck.pipeline.stepping import StageLostError, StepConfig, StepOutcome, StepPlan, StepRunner

logger = logging.getLogger(__name__)

SAVE_SECONDS = 3600.0
MAX_EXCLUDED = 64
MAX_SHOWN = 500


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
    look_seconds: float = 0.5
    """Between looks at what stands still."""


@dataclass
class _Peer:
    offer: Enlist
    standing: frozenset[int] = frozenset()
    assigned: Assignment | None = None
    blocks: frozenset[int] = frozenset()
    """Assigned: what it holds or loads; it hears the averages of their units."""
    asking: asyncio.Task[None] | None = None


def _part_of(assignment: Assignment) -> Assignment:
    """What of an assignment is news when it changes."""
    return replace(assignment, step=0, holders=(), last=None)


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
        self._runner.on_held = self._held
        self._runner.on_fenced = self._fenced
        self._runner.on_checked = self._checked
        self.judge = judge or Judge(rate=0.0)
        self._peers: dict[str, _Peer] = {}
        self._flows = FlowMeter()
        self._step_seconds = 0.0
        self.record = RunRecord()
        self._plan: Plan | None = None
        self._running: StepPlan | None = None
        self._restored_at: int | None = None
        self._lost_since: float | None = None
        self._has_stepped = False
        self._saving: asyncio.Task[None] | None = None
        self._cut_due: tuple[str, SaveCut] | None = None
        self._cut_wanted: asyncio.Future[None] | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started_at = clock.monotonic()
        self._told = ""
        self.on_event: Callable[[str, Mapping[str, Any]], None] = lambda event, about: None
        """For people: waiting, step, morph, move, lost, restored, saved, check failed, excluded."""
        self._unlisten = roster.listen(self._roster_changed)
        links.handle(Enlist, self._enlist)
        links.handle(Ready, self._ready)

    async def close(self) -> None:
        """Conduct no more. Idempotent."""
        self._unlisten()
        self._runner.close()
        self._links.unhandle(Enlist)
        self._links.unhandle(Ready)
        await tasks.end(*self._tasks, self._saving)

    # Who is there

    def _enlist(self, incoming: Incoming[Enlist]) -> Enlisted:
        offer, sender = incoming.message, incoming.sender
        if sender in self.judge.excluded:
            raise PermissionDeniedError(f"it is excluded from this pipeline: {self.judge.excluded[sender]}")
        num_stages = self._staff.num_stages or self._blueprint.num_blocks
        if any(stage >= num_stages for stage in offer.stages):
            raise ConfigurationError(
                f"--stage {max(offer.stages)}: there are stages 0 to {num_stages - 1}. Leave it out, and the run "
                "chooses"
            )
        known = self._peers.get(sender)
        if known is None:
            known = self._peers[sender] = _Peer(offer)
        known.offer = offer
        sent = {(each.server, each.stage): each.count for each in offer.sent}
        self._flows.heard(sender, sent, self._clock.monotonic())
        self._note_standing(sender, offer.life, offer.at_step, offer.standing)
        self._staff.offer(
            sender,
            Offer(
                serves=offer.serves,
                stages=offer.stages,
                feeds=offer.feeds,
                listens=offer.listens,
                room_bytes=offer.room_bytes,
                rate=self._rate_of(sender, offer),
                is_leaving=offer.is_leaving,
                standing=known.standing,
            ),
        )
        self._offer_feeders()
        self._restaff()
        return Enlisted(step=self.record.step)

    def _rate_of(self, peer: str, offer: Enlist) -> float:
        """Compared with a machine that takes a block's cost in seconds; 0 until it is measured."""
        layout = self.layout
        stages = self._plan.serves.get(peer, ()) if self._plan is not None else ()
        if offer.rate <= 0 or layout is None or not stages or max(stages) >= layout.num_stages:
            return self._staff.offers[peer].rate if peer in self._staff.offers else 0.0
        costs = [sum(self._staff.costs[block] for block in layout.blocks_of(stage)) for stage in stages]
        return offer.rate * sum(costs) / len(costs)

    def _note_standing(self, name: str, life: int, step: int, standing: tuple[int, ...]) -> None:
        """What a peer says may be older than what we know: of an earlier step it says nothing about this one."""
        known = self._peers[name]
        if life != self.record.life:
            known.standing = frozenset()
        elif step == self.record.step or (step == self.record.step - 1 and not self._has_stepped):
            # A new conductor's peers may not have heard of the last commit: they do with its first fence.
            known.standing = self._lasting(name, standing)

    def _lasting(self, name: str, standing: Iterable[int]) -> frozenset[int]:
        """Of the blocks that stand at a peer, those that will after this step: it hears the averages of their units.

        One that gets a state in the middle of a step that it has no part in is behind as soon as the step is over. To
        count on it would leave it out of the next step, again and again, and let others forget what they alone have.
        """
        if self._running is None:
            return frozenset(standing)
        member = self._running.members.get(name)
        heard = (member.units if member is not None else None) or frozenset()
        return frozenset(block for block in standing if heard.issuperset(self._blueprint.units_in([block])))

    def _ready(self, incoming: Incoming[Ready]) -> None:
        ready = incoming.message
        if incoming.sender in self._peers:
            self._note_standing(incoming.sender, ready.life, ready.step, ready.standing)
            self._restaff()

    def _held(self, member: str, held: Held) -> None:
        if (known := self._peers.get(member)) is not None:
            known.standing = self._lasting(member, held.standing if held.at_step == self.record.step else ())

    def _roster_changed(self, event: RosterEvent) -> None:
        if event.presence.state in ("dead", "left") and event.peer in self._peers:
            self._gone(event.peer, event.presence.reason or event.presence.state)

    def _gone(self, peer: str, reason: str) -> None:
        known = self._peers.pop(peer, None)
        self._flows.gone(peer)
        self._staff.gone(peer)
        self._runner.gone(peer, reason)
        self._offer_feeders()
        if known is not None and known.offer.serves:
            self.on_event("gone", {"peer": peer, "reason": reason})
        self._restaff()

    # Who does what

    @property
    def layout(self) -> Layout | None:
        """The one that counts."""
        return Layout(self._blueprint.num_blocks, self.record.starts) if self.record.starts else None

    def _standing(self) -> dict[str, frozenset[int]]:
        return {name: known.standing for name, known in self._peers.items() if known.standing}

    def _restaff(self) -> None:
        """Something has changed: plan anew, and tell those whose part is another one now."""
        self._staff.disputed, self._staff.arbiters = self.judge.suspects, self.judge.trusted
        plan = self._staff.plan(self._clock.monotonic())
        if plan is not None:
            for move in plan.moves:
                self.on_event("move", {"peer": move.server, "stage": move.target, "reason": move.reason})
            self._plan = plan
            now = self._serving()
            for name in list(self._peers):
                self._assign(name, plan, now)
        self._changed.set()

    def _serving(self) -> dict[str, set[int]]:
        """Blocks that peers are needed for now, whatever the plan says: until the plan's servers have them."""
        needed: dict[str, set[int]] = {}
        standing = self._standing()
        if (layout := self.layout) is None or self._plan is None:
            return needed
        for blocks in layout.stages:
            able = [name for name, held in standing.items() if held.issuperset(blocks)]
            staying = [name for name in able if self._plan.blocks_of(name).issuperset(blocks)]
            leaves_plan = layout != self._plan.layout
            for name in able if not staying or leaves_plan else ():
                needed.setdefault(name, set()).update(blocks)
        for block in range(layout.num_blocks):  # the last who has a block keeps it until another one does
            able = [name for name, held in standing.items() if block in held]
            if able and not any(block in self._plan.blocks_of(name) for name in able):
                needed.setdefault(able[0], set()).add(block)
        return needed

    def _assign(self, name: str, plan: Plan, serving: Mapping[str, set[int]]) -> None:
        known = self._peers[name]
        blocks = plan.blocks_of(name) | serving.get(name, set())
        if not blocks and known.assigned is None:
            return
        # One that is new hears the averages from the next step on. One that has blocks already must not be told of a
        # step before its commit: it would take all that it has for old.
        step = self.record.step + (self._running is not None and not known.blocks and not known.standing)
        units = self._blueprint.units_in(blocks)
        holders = [
            tuple(
                other
                for other, peer in self._peers.items()
                if other != name and unit in set(self._blueprint.units_in(peer.standing))
            )
            if unit in units and not blocks <= known.standing
            else ()
            for unit in range(self._blueprint.num_units)
        ]
        is_cut = False
        lacking = [unit for unit in units if not holders[unit]] if not blocks <= known.standing else []
        if lacking and self._restored_at == self.record.step:
            savers = tuple(other for other, peer in self._peers.items() if peer.offer.saves)
            holders = [savers if unit in units else () for unit in range(self._blueprint.num_units)]
            is_cut = True
        assignment = Assignment(
            life=self.record.life,
            step=step,
            stages=plan.serves.get(name, ()),
            blocks=tuple(sorted(blocks)),
            holders=tuple(holders),
            cut=is_cut,
            starts=plan.layout.starts,
            why=plan.why.get(name, "")[:500],
            last=self.record.last,
        )
        old = known.assigned
        # Where to load from is told only where something is to be loaded.
        sources_matter = not blocks <= known.standing and old is not None and old.holders != assignment.holders
        is_same = old is not None and _part_of(old) == _part_of(assignment)
        if is_same and not sources_matter:
            return
        known.assigned = assignment
        if known.asking is not None:
            known.asking.cancel()
        known.asking = self._spawn(self._tell_assignment(name, known, assignment))

    async def _tell_assignment(self, name: str, known: _Peer, assignment: Assignment) -> None:
        try:
            answer = await self._links.request(
                name, assignment, reply=Accepted, timeout_seconds=self._config.request_seconds
            )
        except PotluckError as error:
            logger.warning("%s did not take its part: %s", name, error)
            if known.assigned is assignment:
                known.assigned = None  # it is told again when it enlists again
            return
        if known.assigned is assignment:
            known.blocks = frozenset(assignment.blocks)  # from the next step on it hears their averages
        if assignment.life == self.record.life and assignment.step == self.record.step:
            known.standing = self._lasting(name, answer.message.standing)
        self._changed.set()

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
            self._changed.clear()
            self._restaff()
            self._changed.clear()
            if (wanted := self._cut_wanted) is not None and not wanted.done():
                await self._save_as_it_is()
                wanted.set_result(None)
            reason = self._course.stands_still(self.record.step) or await self._obstacle()
            if not reason:
                self._told = ""
                return
            if reason != self._told:
                self._told = reason
                self.on_event("waiting", {"step": self.record.step, "reason": reason})
            try:
                async with asyncio.timeout(self._config.look_seconds):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _obstacle(self) -> str:
        """Why no step can be taken now; empty: it can. Changes the layout, or goes back to a cut, where that helps."""
        plan, standing = self._plan, self._standing()
        if plan is None:
            return "nobody serves: potluck join on another machine"
        held = frozenset().union(*standing.values())
        lost = [block for block in range(self._blueprint.num_blocks) if block not in held]
        is_fresh = self.record.step == 0 or self._restored_at == self.record.step
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
        if not self._feeders():
            return "nobody feeds data: potluck join --feed on another machine"
        return ""

    def _feeders(self) -> tuple[str, ...]:
        there = {name: peer.offer for name, peer in self._peers.items() if not peer.offer.is_leaving}
        feeders = tuple(name for name, offer in there.items() if offer.feeds)
        return feeders or tuple(name for name, offer in there.items() if offer.may_feed)[:1]

    def _offer_feeders(self) -> None:
        for name in self._feeders():
            self._runner.feeder_came(name)

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
        cuts = [cut for peer in self._peers.values() for cut in peer.offer.cuts if cut.step <= self.record.step]
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
        self._restored_at = cut.step
        for peer in self._peers.values():
            peer.standing, peer.assigned, peer.blocks = frozenset(), None, frozenset()
        self._restaff()

    # A step

    def _step_plan(self) -> StepPlan:
        layout, plan, record = self.layout, self._plan, self.record
        assert layout is not None, "looked at before"
        assert plan is not None, "looked at before"
        standing = self._standing()
        serving = servers_now(layout, plan, standing, frozenset(self._staff.servers))
        assert serving is not None, "looked at before"
        members = {}
        for name, peer in self._peers.items():
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
            feeders=self._feeders(),
            loss_scale=record.loss_scale,
            last=record.last,
            loss=record.loss,
            pins=self._pins(standing),
            are_checked=self.judge.rate > 0,
            checks=self._checks(layout, members),
            arithmetics={name: peer.offer.arithmetic for name, peer in self._peers.items()},
        )

    def _checks(self, layout: Layout, members: Mapping[str, Member]) -> tuple[Check, ...]:
        """Who is checked in the next step, and by whom."""

        def blocks(stages: Iterable[int]) -> frozenset[int]:
            return frozenset(block for stage in stages for block in layout.blocks_of(stage))

        serving = {name: blocks(member.stages) for name, member in members.items() if member.stages}
        holding = {name: self._peers[name].standing for name in members}
        self.judge.has_arbiter = any(
            peer.offer.listens for name, peer in self._peers.items() if name in self.judge.trusted
        )
        return self.judge.choose(serving, holding)

    def _checked(self, check: Check, result: CheckResult) -> Finding:
        """A verifier has answered: whoever lied is excluded, in this and all later steps."""
        arithmetics = {name: peer.offer.arithmetic for name, peer in self._peers.items()}
        finding = self.judge.hear(check, result, arithmetics)
        if finding.failed:
            about = {"step": self.record.step, "peer": check.server, "verifier": check.verifier}
            self.on_event("check failed", {**about, "reason": finding.failed})
        for peer, reason in finding.excluded.items():
            logger.warning("%s is excluded: %s", peer, reason)
            self.on_event("excluded", {"step": self.record.step, "peer": peer, "reason": reason})
            self._peers.pop(peer, None)
            self._staff.gone(peer)
        excluded = tuple((peer, reason[:500]) for peer, reason in self.judge.excluded.items())[-MAX_EXCLUDED:]
        self.record = replace(self.record, excluded=excluded)  # written with the step's commit
        return finding

    async def take_step(self) -> StepOutcome:
        """One step, with whoever is ready."""
        plan = self._step_plan()
        self._running = plan
        locating = self._spawn(self._locate(plan))
        started = self._clock.monotonic()

        async def book(commit: Commit) -> None:
            place = await locating
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
            self._must_load(error.excluded)
            raise
        finally:
            self._running = None
            locating.cancel()
        # Written with the next commit: what people look at need not be exact.
        self.record = replace(
            self.record, loss=outcome.loss, losses=with_loss(self.record.losses, plan.step, outcome.loss)
        )
        self._has_stepped = True
        reach("pipeline.conductor.committed", step=plan.step)
        notice = self.record.last
        assert notice is not None
        for name in outcome.members:
            self._spawn(self._tell(name, notice))
        self._must_load(set(plan.members) - set(outcome.members))
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

    def _must_load(self, names: Iterable[str]) -> None:
        """These had no part in the step's end: if they live, they say what they have, and load what they lack."""
        for name in names:
            if (peer := self._peers.get(name)) is not None:
                peer.standing, peer.assigned, peer.blocks = frozenset(), None, frozenset()

    async def _locate(self, plan: StepPlan) -> Place:
        """Where the next step's data begin, asked of a feeder."""
        while True:
            for name in self._feeders():
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
        """Whoever does not hear it now hears it with the next step's fence."""
        try:
            await self._links.request(member, notice, reply=Applied, timeout_seconds=self._config.request_seconds)
        except PotluckError as error:
            logger.info("%s did not hear of the commit of step %d: %s", member, notice.step, error)

    # Cuts

    def _saver(self) -> str | None:
        return next((name for name, peer in self._peers.items() if peer.offer.saves), None)

    def _pins(self, standing: Mapping[str, frozenset[int]]) -> dict[str, tuple[int, ...]]:
        """For a cut at this step: which member keeps which unit as it is now, until it is on disk."""
        self._cut_due = None
        saver = self._saver()
        every = self._peers[saver].offer.saves_every if saver is not None else 0
        record = self.record
        is_busy = self._saving is not None and not self._saving.done()
        if saver is None or not every or is_busy or record.step == 0 or record.step < record.cut_step + every:
            return {}
        keepers: list[tuple[str, ...]] = []
        pins: dict[str, list[int]] = {}
        for unit in range(self._blueprint.num_units):
            able = [n for n, held in sorted(standing.items()) if unit in self._blueprint.units_in(held)]
            keepers.append(tuple(able[:1]))
            if able:
                pins.setdefault(able[0], []).append(unit)
        cut = Cut(step=record.step, place=record.place, loss_scale=record.loss_scale)
        self._cut_due = (saver, SaveCut(life=record.life, cut=cut, holders=tuple(keepers)))
        return {name: tuple(units) for name, units in pins.items()}

    def _fenced(self) -> None:
        """All have heard the step begin, so the pins are made: the saver may fetch them."""
        if self._cut_due is not None:
            saver, order = self._cut_due
            self._cut_due = None
            self._saving = asyncio.create_task(self._save(saver, order), name="pipeline-save")

    async def _save(self, saver: str, order: SaveCut) -> None:
        try:
            saved = await self._links.request(saver, order, reply=Saved, timeout_seconds=SAVE_SECONDS)
        except PotluckError as error:
            logger.warning("step %d is not saved: %s", order.cut.step, error)
            self.on_event("not saved", {"step": order.cut.step, "reason": str(error)})
            return
        self.record = replace(self.record, cut_step=order.cut.step)  # written with the next commit
        if (peer := self._peers.get(saver)) is not None:
            peer.offer = replace(peer.offer, cuts=(*peer.offer.cuts, order.cut)[-64:])
        self.on_event("saved", {"step": order.cut.step, "bytes": saved.message.num_bytes})

    async def save_now(self, seconds: float) -> bool:
        """Save a cut at the next boundary, as before the host leaves; whether the newest step is on disk then."""
        if self._saver() is None or self.record.step == 0:
            return False
        if self._cut_wanted is None or self._cut_wanted.done():
            self._cut_wanted = asyncio.get_running_loop().create_future()
        self._changed.set()
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._cut_wanted)
        except TimeoutError:
            return False
        return self.record.cut_step == self.record.step

    async def _save_as_it_is(self) -> None:
        """Between two steps nothing changes: once all have taken the last one, their states are the cut."""
        saver, record = self._saver(), self.record
        if saver is None or record.cut_step == record.step:
            return
        standing = self._standing()
        if record.last is not None and record.last.step == record.step - 1:
            await asyncio.gather(*(self._tell(name, record.last) for name in standing))
        holders = tuple(
            tuple(name for name, held in sorted(standing.items()) if unit in self._blueprint.units_in(held))
            for unit in range(self._blueprint.num_units)
        )
        cut = Cut(step=record.step, place=record.place, loss_scale=record.loss_scale)
        await tasks.end(self._saving)
        await self._save(saver, SaveCut(life=record.life, cut=cut, holders=holders))
        await self._write(self.record)

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

    # For people

    def overview(self) -> dict[str, Any]:
        """Who does what now, and where micro-batches flow."""
        layout, plan = self.layout, self._plan
        flows = self._flows.per_second(self._clock.monotonic(), self._peers)
        return {
            "step": self.record.step,
            "life": self.record.life,
            "loss": self.record.loss,
            "step_seconds": self._step_seconds,
            "phase": self._runner.phase,
            "waits": self._told,
            "first_blocks": list(self.record.starts),
            "target_first_blocks": list(plan.layout.starts) if plan is not None else [],
            "peers": {name: self._shown(name, peer) for name, peer in list(self._peers.items())[:MAX_SHOWN]},
            "stages": layout.num_stages if layout is not None else 0,
            "rows": self._stage_rows(layout, plan) if layout is not None and plan is not None else [],
            "flows": [
                {"source": source, "target": target, "stage": stage, "per_second": round(rate, 3)}
                for (source, target, stage), rate in sorted(flows.items())[:MAX_SHOWN]
            ],
            "cut_step": self.record.cut_step,
            "losses": list(self.record.losses),
            "morphs": list(self.record.morphs),
            "moves": [
                {"peer": m.server, "from": m.source, "to": m.target, "reason": m.reason} for m in self._staff.moves
            ],
            "checks": {
                "rate": self.judge.rate,
                "made": self.judge.num_checks,
                "failed": self.judge.num_failed,
                "not_possible": self.judge.num_unchecked,
                "excluded": dict(self.record.excluded),
                "tolerances": [
                    {"one": one, "other": other, "of": kind, "limit": limit}
                    for one, other, kind, limit in self.judge.tolerances.table()
                ],
            },
        }

    def _shown(self, name: str, peer: _Peer) -> dict[str, Any]:
        plan = self._plan
        return {
            "serves": list(plan.serves.get(name, ())) if plan is not None else [],
            "listens": list(plan.listens.get(name, ())) if plan is not None else [],
            "feeds": peer.offer.feeds,
            "saves": peer.offer.saves,
            "standing": sorted(peer.standing),
            "loading": sorted(peer.blocks - peer.standing),
            "rate": peer.offer.rate,
            "waiting": peer.offer.waiting,
            "why": plan.why.get(name, "") if plan is not None else "",
        }

    def _stage_rows(self, layout: Layout, plan: Plan) -> list[dict[str, Any]]:
        """Of each stage: its blocks, its servers, and how many samples per second they can compute together."""
        rows: list[dict[str, Any]] = []
        for stage, blocks in enumerate(layout.stages):
            is_planned = plan.layout == layout
            offers = {
                name: self._peers[name].offer
                for name, stages in plan.serves.items()
                if is_planned and stage in stages and name in self._peers
            }
            rates = [offer.rate / len(plan.serves[name]) for name, offer in offers.items()]
            rows.append(
                {
                    "first_block": blocks.start,
                    "last_block": blocks.stop - 1,
                    "servers": list(offers),
                    "listeners": [name for name, stages in plan.listens.items() if stage in stages],
                    "samples_per_second": sum(rates) if rates and all(rates) else 0.0,
                    "waiting": sum(offer.waiting for offer in offers.values()),
                }
            )
        slowest = min((row["samples_per_second"] for row in rows), default=0.0)
        for row in rows:  # nobody is, while one of them is not measured
            row["is_bottleneck"] = bool(slowest) and len(rows) > 1 and row["samples_per_second"] == slowest
        return rows
