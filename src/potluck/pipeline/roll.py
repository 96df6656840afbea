"""Who is in a pipeline, what each peer has and is to hold: peers enlist, are assigned blocks, and say what stands.

    enlisted peers ─▶ staffing ─▶ assignments        they load while the run trains on

What a peer says may be older than what the conductor knows, and what it has may be behind as soon as the step under way
is over. Only what will still stand then is counted on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from potluck import tasks
from potluck.clock import Clock
from potluck.errors import ConfigurationError, PermissionDeniedError, PotluckError
from potluck.link.dispatch import Incoming
from potluck.link.links import Links
from potluck.peer.roster import Roster, RosterEvent
from potluck.pipeline.blueprint import Blueprint
from potluck.pipeline.book import RunRecord
from potluck.pipeline.flows import FlowMeter
from potluck.pipeline.judging import Judge
from potluck.pipeline.layout import Layout
from potluck.pipeline.messages import Accepted, Assignment, Enlist, Enlisted, Held, Ready
from potluck.pipeline.staffing import Offer, Plan, Staff

logger = logging.getLogger(__name__)

OnEvent = Callable[[str, Mapping[str, Any]], None]


@dataclass
class RunState:
    """How far the run is, as its conductor knows."""

    record: RunRecord
    heard: dict[str, frozenset[int]] | None = None
    """Units whose averages each member hears in the step under way; None: between two steps."""
    restored_at: int | None = None
    """The step of the cut that the run went back to."""
    has_stepped: bool = False
    """Under this conductor."""


@dataclass
class PeerState:
    """One peer, as the conductor knows it."""

    offer: Enlist
    standing: frozenset[int] = frozenset()
    assigned: Assignment | None = None
    blocks: frozenset[int] = frozenset()
    """Assigned: what it holds or loads; it hears the averages of their units."""
    asking: asyncio.Task[None] | None = None

    def forget(self) -> None:
        """It says anew what it has, and is told anew what to hold."""
        self.standing, self.assigned, self.blocks = frozenset(), None, frozenset()


def _part_of(assignment: Assignment) -> Assignment:
    """What of an assignment is news when it changes."""
    return replace(assignment, step=0, holders=(), last=None)


class Roll:
    """The peers of a pipeline, under one conductor."""

    def __init__(
        self,
        links: Links,
        roster: Roster,
        clock: Clock,
        blueprint: Blueprint,
        staff: Staff,
        judge: Judge,
        state: RunState,
        *,
        request_seconds: float,
    ) -> None:
        self._links = links
        self._clock = clock
        self.blueprint = blueprint
        self.staff = staff
        self._judge = judge
        self._state = state
        self._request_seconds = request_seconds
        self.peers: dict[str, PeerState] = {}
        self.plan: Plan | None = None
        self.flows = FlowMeter()
        self.changed = asyncio.Event()
        """Something that may let the next step begin."""
        self.on_gone: Callable[[str, str], None] = lambda peer, reason: None
        self.on_feeder: Callable[[str], None] = lambda peer: None
        self.hears_also: Callable[[str, frozenset[int]], bool] = lambda peer, units: False
        """Have a member hear the averages of these units in the step under way, if it is not too late for that."""
        self.on_event: OnEvent = lambda event, about: None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unlisten = roster.listen(self._roster_changed)
        links.handle(Enlist, self._enlist)
        links.handle(Ready, self._ready)

    async def close(self) -> None:
        """Enlist nobody more. Idempotent."""
        self._unlisten()
        self._links.unhandle(Enlist)
        self._links.unhandle(Ready)
        await tasks.end(*self._tasks)

    # Who is there

    def _enlist(self, incoming: Incoming[Enlist]) -> Enlisted:
        offer, sender = incoming.message, incoming.sender
        if sender in self._judge.excluded:
            raise PermissionDeniedError(f"it is excluded from this pipeline: {self._judge.excluded[sender]}")
        num_stages = self.staff.num_stages or self.blueprint.num_blocks
        if any(stage >= num_stages for stage in offer.stages):
            raise ConfigurationError(
                f"--stage {max(offer.stages)}: there are stages 0 to {num_stages - 1}. Leave it out, and the run "
                "chooses"
            )
        known = self.peers.get(sender)
        if known is None:
            known = self.peers[sender] = PeerState(offer)
        known.offer = offer
        sent = {(each.server, each.stage): each.count for each in offer.sent}
        self.flows.heard(sender, sent, self._clock.monotonic())
        self._note_standing(sender, offer.life, offer.at_step, offer.standing)
        self.staff.offer(
            sender,
            Offer(
                serves=offer.serves,
                stages=offer.stages,
                feeds=offer.feeds,
                listens=offer.listens,
                room_bytes=offer.room_bytes,
                rate=self.rate_of(sender, offer),
                is_leaving=offer.is_leaving,
                standing=known.standing,
            ),
        )
        self._offer_feeders()
        self.restaff()
        return Enlisted(step=self._state.record.step)

    def rate_of(self, peer: str, offer: Enlist) -> float:
        """Compared with a machine that takes a block's cost in seconds; 0 until it is measured."""
        layout = self.layout
        stages = self.plan.serves.get(peer, ()) if self.plan is not None else ()
        if offer.rate <= 0 or layout is None or not stages or max(stages) >= layout.num_stages:
            return self.staff.offers[peer].rate if peer in self.staff.offers else 0.0
        costs = [sum(self.staff.costs[block] for block in layout.blocks_of(stage)) for stage in stages]
        return offer.rate * sum(costs) / len(costs)

    def _note_standing(self, name: str, life: int, step: int, standing: tuple[int, ...]) -> None:
        """What a peer says may be older than what we know: of an earlier step it says nothing about this one."""
        known = self.peers[name]
        if life != self._state.record.life:
            known.standing = frozenset()
        elif step == self._state.record.step or (step == self._state.record.step - 1 and not self._state.has_stepped):
            # A new conductor's peers may not have heard of the last commit: they do with its first fence.
            known.standing = self._lasting(name, standing)

    def _lasting(self, name: str, standing: Iterable[int]) -> frozenset[int]:
        """Of the blocks that stand at a peer, those that will after this step: it hears the averages of their units.

        One that gets a state in the middle of a step that it has no part in is behind as soon as the step is over. To
        count on it would leave it out of the next step, again and again, and let others forget what they alone have.
        """
        if self._state.heard is None:
            return frozenset(standing)
        heard = self._state.heard.get(name, frozenset())
        return frozenset(block for block in standing if heard.issuperset(self.blueprint.units_in([block])))

    def _ready(self, incoming: Incoming[Ready]) -> None:
        ready = incoming.message
        if incoming.sender in self.peers:
            self._note_standing(incoming.sender, ready.life, ready.step, ready.standing)
            self.restaff()

    def held(self, member: str, held: Held) -> None:
        """What a member answered to a fence."""
        if (known := self.peers.get(member)) is not None:
            known.standing = self._lasting(member, held.standing if held.at_step == self._state.record.step else ())

    def _roster_changed(self, event: RosterEvent) -> None:
        if event.presence.state in ("dead", "left") and event.peer in self.peers:
            self._gone(event.peer, event.presence.reason or event.presence.state)

    def _gone(self, peer: str, reason: str) -> None:
        known = self.peers.pop(peer, None)
        self.flows.gone(peer)
        self.staff.gone(peer)
        self.on_gone(peer, reason)
        self._offer_feeders()
        if known is not None and known.offer.serves:
            self.on_event("gone", {"peer": peer, "reason": reason})
        self.restaff()

    def exclude(self, peer: str) -> None:
        """It lied: it has no part any more."""
        self.peers.pop(peer, None)
        self.flows.gone(peer)
        self.staff.gone(peer)

    # Who does what

    @property
    def layout(self) -> Layout | None:
        """The one that counts."""
        return Layout(self.blueprint.num_blocks, self._state.record.starts) if self._state.record.starts else None

    def standing(self) -> dict[str, frozenset[int]]:
        """The blocks that each peer has."""
        return {name: known.standing for name, known in self.peers.items() if known.standing}

    def restaff(self) -> None:
        """Something has changed: plan anew, and tell those whose part is another one now."""
        self.staff.disputed, self.staff.arbiters = self._judge.suspects, self._judge.trusted
        plan = self.staff.plan(self._clock.monotonic())
        if plan is not None:
            for move in plan.moves:
                self.on_event("move", {"peer": move.server, "stage": move.target, "reason": move.reason})
            self.plan = plan
            now = self._serving()
            for name in list(self.peers):
                self._assign(name, plan, now)
        self.changed.set()

    def _serving(self) -> dict[str, set[int]]:
        """Blocks that peers are needed for now, whatever the plan says: until the plan's servers have them."""
        needed: dict[str, set[int]] = {}
        standing = self.standing()
        if (layout := self.layout) is None or self.plan is None:
            return needed
        for blocks in layout.stages:
            able = [name for name, held in standing.items() if held.issuperset(blocks)]
            staying = [name for name in able if self.plan.blocks_of(name).issuperset(blocks)]
            leaves_plan = layout != self.plan.layout
            for name in able if not staying or leaves_plan else ():
                needed.setdefault(name, set()).update(blocks)
        for block in range(layout.num_blocks):  # the last who has a block keeps it until another one does
            able = [name for name, held in standing.items() if block in held]
            if able and not any(block in self.plan.blocks_of(name) for name in able):
                needed.setdefault(able[0], set()).add(block)
        return needed

    def _assign(self, name: str, plan: Plan, serving: Mapping[str, set[int]]) -> None:
        known = self.peers[name]
        blocks = plan.blocks_of(name) | serving.get(name, set())
        if not blocks and known.assigned is None:
            return
        # One that is new hears the averages from the next step on. One that has blocks already must not be told of a
        # step before its commit: it would take all that it has for old.
        step = self._state.record.step + (self._state.heard is not None and not known.blocks and not known.standing)
        units = self.blueprint.units_in(blocks)
        holders = [
            tuple(
                other
                for other, peer in self.peers.items()
                if other != name and unit in set(self.blueprint.units_in(peer.standing))
            )
            if unit in units and not blocks <= known.standing
            else ()
            for unit in range(self.blueprint.num_units)
        ]
        is_cut = False
        lacking = [unit for unit in units if not holders[unit]] if not blocks <= known.standing else []
        if lacking and self._state.restored_at == self._state.record.step:
            savers = tuple(other for other, peer in self.peers.items() if peer.offer.saves)
            holders = [savers if unit in units else () for unit in range(self.blueprint.num_units)]
            is_cut = True
        assignment = Assignment(
            life=self._state.record.life,
            step=step,
            stages=plan.serves.get(name, ()),
            blocks=tuple(sorted(blocks)),
            holders=tuple(holders),
            cut=is_cut,
            starts=plan.layout.starts,
            why=plan.why.get(name, "")[:500],
            last=self._state.record.last,
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
        known.asking = task = asyncio.create_task(self._tell_assignment(name, known, assignment))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_assignment(self, name: str, known: PeerState, assignment: Assignment) -> None:
        try:
            answer = await self._links.request(name, assignment, reply=Accepted, timeout_seconds=self._request_seconds)
        except PotluckError as error:
            logger.warning("%s did not take its part: %s", name, error)
            if known.assigned is assignment:
                known.assigned = None  # it is told again when it enlists again
            return
        if known.assigned is assignment:
            known.blocks = frozenset(assignment.blocks)  # it hears their averages from the next step on
            self._have_hear(name, frozenset(self.blueprint.units_in(known.blocks)))
        if assignment.life == self._state.record.life and assignment.step == self._state.record.step:
            known.standing = self._lasting(name, answer.message.standing)
        self.changed.set()

    def _have_hear(self, name: str, units: frozenset[int]) -> None:
        """Let a member's new blocks count in the step under way: they stand at its end, and not one step later."""
        heard = self._state.heard
        if heard is not None and name in heard and self.hears_also(name, units):
            heard[name] |= units

    def feeders(self) -> tuple[str, ...]:
        """Who feeds: those who offer to, else one that can."""
        there = {name: peer.offer for name, peer in self.peers.items() if not peer.offer.is_leaving}
        feeders = tuple(name for name, offer in there.items() if offer.feeds)
        return feeders or tuple(name for name, offer in there.items() if offer.may_feed)[:1]

    def _offer_feeders(self) -> None:
        for name in self.feeders():
            self.on_feeder(name)

    def must_load(self, names: Iterable[str]) -> None:
        """These had no part in the step's end: if they live, they say what they have, and load what they lack."""
        for name in names:
            if (peer := self.peers.get(name)) is not None:
                peer.standing, peer.assigned, peer.blocks = frozenset(), None, frozenset()
