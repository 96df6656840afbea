"""The coordinator's driver: convenes rounds, publishes plans, watches over the round, commits.

    lease taken ──▶ open the term ──▶ convene ──▶ plan ──▶ direct ──▶ commit ──▶ convene …
                                        ▲  └─ adopt ────────────────────▲
                                        └──────── give up ───┘

It runs on every peer that may coordinate, and acts only while that peer holds the lease. It keeps nothing that the next
one would need: who is ready is said again each second, what members hold they report, and the rest is in the lineage.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from potluck import tasks
from potluck.errors import ProtocolError, RetryableError
from potluck.hub.connection import Delivery, Subscription
from potluck.link.grouplinks import GroupLinks
from potluck.link.links import Incoming
from potluck.messages import decode
from potluck.peer.groupsession import GroupSession
from potluck.peer.lease import Lease
from potluck.peer.roster import RosterEvent
from potluck.peer.session import HubChange
from potluck.round.audit.auditcore import AuditResult
from potluck.round.audit.auditor import Auditor
from potluck.round.coordinator.adoption import Adoption
from potluck.round.coordinator.announcing import RETRY_SECONDS, Announcer
from potluck.round.coordinator.commitment import make_commit, make_restoration
from potluck.round.coordinator.convening import Convener, NoPlan, Term, Wait
from potluck.round.coordinator.director import Decision, Director, DirectorTimeouts, Finish, GiveUp, Publish
from potluck.round.coordinator.gathering import GatherConfig, Proposal
from potluck.round.coordinator.trigger import Quorum, Trigger
from potluck.round.lineage import Lineage
from potluck.round.member.workers import Workers
from potluck.round.outcome import FailedRound
from potluck.round.plan.messages import Abort, Commit, Plan, Ready, Report, Restoration, RoundKey

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1  # while a round is under way
IDLE_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 2.0
COMPLAIN_EVERY_SECONDS = 2.0
QUIET_SHARE = 0.05  # of the time that a round should take at most: so long may a member be silent …
MOST_QUIET_SECONDS = 15.0  # … up to this
NAME_EVERY_SECONDS = 60.0  # each peer that claims too much


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """How a run's rounds are started and watched over."""

    gather: GatherConfig = field(default_factory=GatherConfig)
    """How plans are made."""

    trigger: Trigger = field(default_factory=Quorum)
    """When to start."""

    patience: DirectorTimeouts = field(default_factory=DirectorTimeouts)
    """How long to wait for which peers."""


class Coordinator:
    """One candidate's work as coordinator."""

    def __init__(
        self,
        links: GroupLinks,
        session: GroupSession,
        lease: Lease,
        lineage: Lineage,
        workers: Workers,
        config: CoordinatorConfig,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.on_failure: Callable[[FailedRound], None] = lambda _failed: None
        """Called for each round that is given up, and now and then while no plan is possible."""
        self._links = links
        self._session = session
        self._lease = lease
        self._lineage = lineage
        self._config = config
        self._clock = session.clock
        self._auditor = Auditor(links, session, workers, config.gather.audit, self.counts)
        self._convener = Convener(
            session, lease.view, lineage, self._auditor.barred, config.gather, config.trigger, self.counts
        )
        self._announcer = Announcer(session, lease, lineage, self.counts)
        self._term: Term | None = None
        self._last_term: Term | None = None
        self._director: Director | None = None
        self._complained_at = -math.inf
        self._named_at: dict[str, float] = {}  # when the claims of a peer were last told
        self._decisions: list[Decision] = []
        self._wake = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self._stop_listening: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen to those who are ready, and be prepared."""
        session = self._session
        self._links.handle(Report, self._reported)
        self._stop_listening = [session.roster.listen(self._roster_changed), session.listen(self._hub_changed)]
        for topic, came in (("ready", self._ready_came), ("report", self._report_came)):
            self._subscriptions.append(await session.hub.subscribe(session.subjects.news("*", topic), came))
        self._task = asyncio.create_task(self._run(), name="coordinator")

    async def close(self) -> None:
        """Coordinate nothing more. Idempotent."""
        for stop in self._stop_listening:
            stop()
        while self._subscriptions:
            await self._subscriptions.pop().cancel()
        await tasks.end(self._task)
        self._task = None

    def configure(self, config: CoordinatorConfig) -> None:
        """Start and plan the next rounds by this; how they are audited stays."""
        self._config = config
        self._convener.configure(config.gather, config.trigger)

    @property
    def is_in_round(self) -> bool:
        """Whether a round is under way that this peer directs."""
        return self._director is not None

    def measured(self, allowances: Mapping[str, float]) -> None:
        """How many medians each peer may give to an epoch over time, by its measured speed (weights.py)."""
        self._convener.measured(allowances)

    # What happens

    def lease_changed(self) -> None:
        """This peer or another one has got or lost the lease."""
        self._wake.set()

    def committed(self, commit: Commit) -> None:
        """The head of the lineage has moved."""
        self._convener.committed(commit)
        if self._director is not None and self._director.plan.key.epoch <= commit.epoch:
            self._end_round()
        if self._term is not None:
            self._term.attempt, self._term.not_before = 0, 0.0
        self._wake.set()

    def _ready_came(self, delivery: Delivery) -> None:
        peer = delivery.subject.rsplit(".", 2)[-2]
        try:
            ready = decode(Ready, delivery.payload)
        except ProtocolError as error:
            self.counts["bad_readies"] += 1
            logger.debug("what %s says of being ready cannot be read: %s", peer, error)
            return
        if peer not in self._session.roster:
            self.counts["readies_of_strangers"] += 1
            return
        self._convener.ready_came(peer, ready)
        if ready.withdrawn:
            self._member_gone(peer, ready.session, "it stopped waiting for the epoch")
        self._wake.set()

    def _roster_changed(self, event: RosterEvent) -> None:
        if event.change in ("dead", "left"):
            self._convener.gone(event.peer)
            self._member_gone(event.peer, event.presence.card.session, event.presence.reason or event.change)
        self._wake.set()

    def _hub_changed(self, change: HubChange) -> None:
        if change == "back":
            self._convener.hub_came_back()

    def _member_gone(self, peer: str, session: str, reason: str) -> None:
        director = self._director
        if director is None or (index := director.plan.index_of(peer)) is None:
            return
        if director.plan.members[index].session == session:
            self._decisions += director.member_gone(index, reason, self._clock.monotonic())
            self._wake.set()

    def _report_came(self, delivery: Delivery) -> None:
        peer = delivery.subject.rsplit(".", 2)[-2]
        try:
            report = decode(Report, delivery.payload)
        except ProtocolError as error:
            self.counts["bad_reports"] += 1
            logger.debug("a report of %s cannot be read: %s", peer, error)
            return
        self.counts["reports_by_hub"] += 1
        self._take_report(peer, report)

    def _reported(self, incoming: Incoming[Report]) -> None:
        self._take_report(incoming.sender, incoming.message)

    def _take_report(self, sender: str, report: Report) -> None:
        director = self._director
        index = director.plan.index_of(sender) if director is not None else None
        if director is None or index is None or report.key != director.plan.key:
            self.counts["late_reports"] += 1
            return
        decisions = director.report_arrived(index, report, self._clock.monotonic())
        if decisions:
            self._decisions += decisions
            self._wake.set()

    # What to do about it

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                pause_seconds = await self._step()
            except RetryableError as error:
                self.counts["retries"] += 1
                logger.info("the coordinator tries again: %s", error)
                pause_seconds = RETRY_SECONDS
            except Exception:  # the run must not stop for one round's fault; logged and counted
                self.counts["errors"] += 1
                logger.exception("the coordinator failed at a round and starts another")
                self._end_round()
                pause_seconds = IDLE_SECONDS
            await self._pause(pause_seconds)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _step(self) -> float:
        """Do what is due; returns how long to wait if nothing happens."""
        token = self._lease.token
        if self._term is not None and self._term.token != token:
            self._term = None
            self._end_round()
        if not token:
            return IDLE_SECONDS
        if self._term is None:
            await self._lineage.open_term(token)
            before = self._last_term
            # A lease that lapsed for a moment and was renewed has its old token: no other round may get an old key.
            attempt = before.attempt if before is not None and before.token == token else 0
            self._term = self._last_term = Term(token, self._clock.monotonic(), attempt)
            self.counts["terms"] += 1
            self._convener.resume()
        if self._director is None:
            return await self._convene(self._term)
        await self._direct(self._term, self._director)
        return TICK_SECONDS if self._director is not None else 0.0

    async def _convene(self, term: Term) -> float:
        """Commit what a coordinator before us left, or start a round when it is due."""
        match self._convener.next_step(term):
            case Wait(seconds):
                return IDLE_SECONDS if seconds is None else min(seconds, IDLE_SECONDS)
            case Adoption() as adoption:
                await self._adopt(adoption)
                return 0.0
            case NoPlan(key, reason):
                await self._complain(key, reason)
            case Proposal() as proposal:
                await self._begin(term, proposal)
        return TICK_SECONDS

    async def _begin(self, term: Term, proposal: Proposal) -> None:
        term.attempt += 1
        plan = proposal.plan
        self.counts["rounds"] += 1
        now, myself = self._clock.monotonic(), self._session.peer_id
        self._director = Director(plan, self._patience(proposal), now, coordinator=myself)
        logger.debug("%s begins with %d members and %d parts", plan.key, len(plan.members), len(plan.parts))
        self._name_claims(plan, now)
        await self._announcer.publish(plan, "round.plan_published")

    def _name_claims(self, plan: Plan, now: float) -> None:
        """Name in the log the peers that claim more than can be."""
        self._named_at = {peer: at for peer, at in self._named_at.items() if now - at < NAME_EVERY_SECONDS}
        for member in plan.members:
            if member.claimed and member.peer not in self._named_at:
                self._named_at[member.peer] = now
                self.counts["claims_cut"] += 1
                presence = self._session.roster.get(member.peer)
                logger.warning(
                    "%s (%s) claims %.6g samples for epoch %d, and %.6g count: more than others' speed and its own "
                    "make plausible. If it really is so fast, invite it as trusted, or raise weight_cap in [exchange] "
                    "of run.toml and start the host again; if not, ban it",
                    presence.card.name if presence is not None else "a peer",
                    member.peer,
                    member.claimed,
                    plan.key.epoch,
                    member.weight,
                )

    def _patience(self, proposal: Proposal) -> DirectorTimeouts:
        """Seconds of silence do not end a round that takes minutes by its lines: reports wait behind bulk there."""
        patience = self._config.patience
        expected_seconds = 2 * proposal.predicted_seconds if proposal.is_measured else 0.0
        share = min(QUIET_SHARE * expected_seconds, MOST_QUIET_SECONDS)
        return replace(
            patience,
            expected_seconds=expected_seconds,
            stalled_seconds=max(patience.stalled_seconds, 4 * proposal.chunk_seconds, share),
            silent_seconds=max(patience.silent_seconds, 2 * proposal.chunk_seconds, share),
        )

    async def _complain(self, key: RoundKey, reason: str) -> None:
        """No plan is possible: members should know why they wait."""
        now = self._clock.monotonic()
        if now - self._complained_at >= COMPLAIN_EVERY_SECONDS:
            self._complained_at = now
            logger.warning("no plan is possible for %s: %s", key, reason)
            self.on_failure(FailedRound(key=key, phase="planning", reason=reason))
            await self._announcer.say(Abort(key=key, reason=reason))

    async def _direct(self, term: Term, director: Director) -> None:
        """Carry out what the director decides."""
        now = self._clock.monotonic()
        if not self._session.hub.is_connected:
            return  # nobody hears our plans, and nothing can be committed; the director excuses the pause afterwards
        self._decisions += director.tick(now)
        if self._session.now() > director.plan.deadline:
            self._decisions += director.expired()
        while self._decisions and self._director is director:
            match self._decisions.pop(0):
                case Publish(plan):
                    await self._announcer.publish(plan, "round.revision_published")
                case Finish() as finish:
                    try:
                        await self._finish(director, finish)
                    except RetryableError as error:  # the director takes the round for over, and would say no more
                        if self._director is director:
                            await self._give_up(term, director, f"it could not be finished: {error}")
                case GiveUp(reason):
                    self._convener.given_up(director.lost)
                    await self._give_up(term, director, reason)

    async def _finish(self, director: Director, finish: Finish) -> None:
        """Commit, unless an audit says otherwise."""
        plan, digest, holders = finish.plan, finish.digest, finish.holders
        verdict = await self._auditor.audit(director, digest, holders) if plan.audit else AuditResult()
        if self._director is not director:
            return
        if verdict.is_good:
            await self._commit(plan, digest, holders, director, audited=verdict.num_good)
        else:
            now = self._clock.monotonic()
            self._decisions += director.overrule(verdict.liars, verdict.missing, verdict.stale, now)

    async def _give_up(self, term: Term, director: Director, reason: str) -> None:
        plan = director.plan
        self._end_round()
        self.counts["aborts"] += 1
        self.on_failure(director.failure(reason, self._clock.monotonic()))
        delay = min(RETRY_SECONDS * term.attempt, LONGEST_RETRY_SECONDS)
        term.not_before = self._clock.monotonic() + delay
        logger.warning("%s is given up: %s", plan.key, reason)
        await self._announcer.say(Abort(key=plan.key, reason=reason))

    async def _adopt(self, adoption: Adoption) -> None:
        self.counts["adoptions"] += 1
        logger.info("%s was complete when its coordinator went: committing it", adoption.plan.key)
        await self._commit(adoption.plan, adoption.digest, adoption.holders, None)

    async def _commit(
        self, plan: Plan, digest: str, holders: tuple[int, ...], director: Director | None, *, audited: int = 0
    ) -> None:
        assert self._term is not None, "only the holder of the lease commits"
        commit = make_commit(
            plan,
            digest,
            holders,
            director,
            term=self._term.token,
            coordinator=self._session.peer_id,
            parent=self._lineage.parent_digest(),
            committed_at=self._session.now(),
            seconds=self._clock.monotonic() - director.started_at if director is not None else 0.0,
            grace_seconds=self._config.trigger.grace_seconds,
            audited=audited,
            excluded=self._auditor.excluded(self._lineage.head),
            num_restored=self._lineage.head.num_restored if self._lineage.head is not None else 0,
            num_returned=self._lineage.head.num_returned if self._lineage.head is not None else 0,
        )
        await self._announcer.commit(commit, plan)
        self._end_round()

    async def restore(self, restored: Restoration) -> Commit:
        """Make an earlier state that of the next epoch; a round that is under way comes to nothing.

        RetryableError when this peer does not coordinate now, or another epoch was committed first.
        """
        term = self._term
        if term is None or self._lease.token != term.token:
            raise RetryableError("this peer does not coordinate (any more): the peer that does carries the order out")
        key = RoundKey(epoch=self._lineage.epoch + 1, token=term.token, attempt=term.attempt)
        term.attempt += 1  # no other round has this key
        commit = make_restoration(
            restored,
            self._lineage.head,
            key=key,
            coordinator=self._session.peer_id,
            parent=self._lineage.parent_digest(),
            committed_at=self._session.now(),
            excluded=self._auditor.excluded(self._lineage.head),
        )
        await self._lineage.commit(commit, self._session.identity)
        self.counts["restorations"] += 1
        return commit

    def _end_round(self) -> None:
        self._director = None
        self._decisions.clear()
