"""The auditor's driver: asks the witnesses, recomputes, and brings the verdict (audit.py decides).

    draw chunks ──▶ ask reducer and contributors ──▶ examine each answer ──▶ recompute ──▶ verdict
                    (requests over links)            (in a worker)           (in a worker)

So many chunks are under way at once as fit into a fixed memory. A question may take `answer_seconds` and never reaches
beyond the round's own deadline; who has let one pass is not asked another, so that one silent member costs that time
once, however many chunks it has to do with. The draw comes from the operating system's randomness, after everybody has
reported.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from potluck import tasks
from potluck.errors import DeadlineExceededError, PotluckError
from potluck.faultpoints import reach
from potluck.link.carrier import Buffer
from potluck.link.grouplinks import GroupLinks
from potluck.peer.groupsession import GroupSession
from potluck.round.aggregators import aggregator_for
from potluck.round.audit.auditcore import Action, AskWitnesses, Audit, AuditConfig, AuditResult, Recompute, draw_chunks
from potluck.round.audit.disputes import UNPROVEN, Holding, read_holding, settle
from potluck.round.audit.exclusions import Exclusions, why_excluded
from potluck.round.audit.seals import Notary, sealed_hash
from potluck.round.audit.testimony import (
    Challenge,
    FalseTestimony,
    Holdings,
    HoldingsRequest,
    Testimony,
    WitnessAccount,
    examine,
)
from potluck.round.coordinator.director import OTHER_DIGEST, Director
from potluck.round.member.reduction import reduce_chunk
from potluck.round.member.workers import Workers
from potluck.round.plan.chunks import ChunkGrid
from potluck.round.plan.messages import Commit, Exclusion, Participant, Plan, Report

logger = logging.getLogger(__name__)

MEMORY_BYTES = 64 * 1024 * 1024  # for contributions that wait to be recomputed


class Auditor:
    """Audits rounds, one at a time, and remembers who lied."""

    def __init__(
        self,
        links: GroupLinks,
        session: GroupSession,
        workers: Workers,
        config: AuditConfig,
        counts: Counter[str],
        rng: random.Random | None = None,
    ) -> None:
        """`counts` are the coordinator's; `rng` draws the chunks, and reducers must not be able to foresee it."""
        self._links = links
        self._session = session
        self._workers = workers
        self._config = config
        self._counts = counts
        self._rng = rng or random.SystemRandom()
        self._exclusions = Exclusions()

    def excluded(self, head: Commit | None) -> dict[str, Exclusion]:
        """Peers that were found out, are still excluded and not pardoned by an organiser, given the newest commit."""
        pardons = {presence.peer: presence.pardoned_at for presence in self._session.roster if presence.pardoned_at}
        return self._exclusions.current(head, self._session.now(), pardons)

    def barred(self, head: Commit | None) -> dict[str, str]:
        """The same, in words."""
        now = self._session.now()
        return {peer: why_excluded(exclusion, now) for peer, exclusion in self.excluded(head).items()}

    async def audit(self, director: Director, digest: str, holders: tuple[int, ...]) -> AuditResult:
        """Look at a round that is complete: `holders` have the averages with this digest, as they have reported."""
        plan = director.plan
        reach("round.auditing", peer=self._session.peer_id, epoch=plan.key.epoch, role="coordinator")
        reports = {i: report for i in range(len(plan.members)) if (report := director.report_of(i)) is not None}
        dissenters = [index for index, report in reports.items() if _dissents(plan, index, report, digest)]
        inquiry = _Inquiry(
            self._links,
            self._workers,
            Notary(self._session.subjects.scope, plan.key),
            plan,
            reports,
            self._config.answer_seconds,
            self._session.now,
        )
        settled = await inquiry.settle(holders, dissenters) if dissenters else Settled()
        verdict = await inquiry.hear(Audit(plan, holders, draw_chunks(plan, self._config, self._rng), settled.liars))
        verdict = replace(verdict, missing={**settled.unshown, **verdict.missing})
        self._counts["audits"] += 1
        self._counts["audited_chunks"] += verdict.num_good
        self._counts["unanswered_audits"] += len(verdict.missing)
        for index, reason in verdict.liars.items():
            peer = plan.members[index].peer
            self._counts["liars"] += 1
            self._exclusions.add(peer, reason, self._session.now(), self._config.exclusion_seconds)
            logger.warning("%s lied in %s and is excluded: %s", peer, plan.key, reason)
        self._exclude_silent(plan, verdict.missing)
        return verdict

    def _exclude_silent(self, plan: Plan, missing: Mapping[int, str]) -> None:
        """Go on without those who live and do not testify; unless they are the most: then it may be us."""
        silent = {index: reason for index, reason in missing.items() if self._lives(plan.members[index])}
        if 2 * len(silent) > len(plan.members):
            logger.warning("%d of %d members of %s do not testify", len(silent), len(plan.members), plan.key)
            return
        for index, reason in silent.items():
            peer, seconds = plan.members[index].peer, self._config.silence_seconds
            self._exclusions.add(peer, reason, self._session.now(), seconds)
            logger.warning("%s takes part in nothing for %g s: %s", peer, seconds, reason)

    def _lives(self, member: Participant) -> bool:
        presence = self._session.roster.get(member.peer)
        return presence is not None and presence.state == "alive" and presence.card.session == member.session


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What came of members holding different averages."""

    liars: Mapping[int, str] = field(default_factory=dict)
    unshown: Mapping[int, str] = field(default_factory=dict)
    """Who should have shown the averages that are to be committed; empty if anybody has."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a member said of a chunk, or why it said nothing."""

    member: int
    account: WitnessAccount | FalseTestimony | str
    frame: Buffer | None = None


class _Inquiry:
    """One audit under way."""

    def __init__(
        self,
        links: GroupLinks,
        workers: Workers,
        notary: Notary,
        plan: Plan,
        reports: Mapping[int, Report],
        answer_seconds: float,
        now: Callable[[], float],
    ) -> None:
        """`now` is hub time, as is the plan's deadline."""
        self._links = links
        self._workers = workers
        self._notary = notary
        self._plan = plan
        self._reports = reports
        self._answer_seconds = answer_seconds
        self._now = now
        self._silent: dict[int, str] = {}  # who has let a question's time pass
        self._grid = ChunkGrid(runs=plan.runs, chunk_bytes=plan.chunk_bytes)
        self._aggregator = aggregator_for(plan.aggregator)
        self._generations = {n: part.generation for part in plan.parts for n in range(part.start, part.stop)}
        num_senders = max(1, sum(member.weight > 0 for member in plan.members))
        self._room = asyncio.Semaphore(max(1, MEMORY_BYTES // (plan.chunk_bytes * num_senders)))
        self._verdict: AuditResult | None = None

    async def settle(self, holders: Collection[int], dissenters: Collection[int]) -> Settled:
        """Who lied so that members hold different averages, as far as they can show it.

        All of that may take `answer_seconds`: each who is asked has half of what is left of them.
        """
        until = self._now() + self._answer_seconds
        liars: dict[int, str] = {}
        unshown: dict[int, str] = {}
        agreed: Holding | None = None
        for holder in holders:
            agreed = await self._take_inventory(holder, until, liars, unshown)
            if agreed is not None:
                unshown.clear()
                break
        for dissenter in dissenters:
            other = await self._take_inventory(dissenter, until, liars, {})
            if agreed is not None and other is not None:
                found = await self._workers.run(partial(settle, self._plan, self._notary, agreed, other))
                liars = {**found, **liars}
        return Settled(liars=liars, unshown=unshown)

    async def _take_inventory(
        self, member: int, until: float, liars: dict[int, str], unshown: dict[int, str]
    ) -> Holding | None:
        """What a member holds; None if it cannot say, or lies."""
        peer = self._plan.members[member].peer
        try:
            incoming = await self._links.request(
                peer,
                HoldingsRequest(key=self._plan.key),
                reply=Holdings,
                timeout_seconds=self._patience((until - self._now()) / 2),
            )
        except PotluckError as error:
            logger.info("%s cannot say what it holds of %s: %s", peer, self._plan.key, error)
            unshown[member] = f"it did not show the averages that others do not have: {error}"
            return None
        holding = read_holding(self._plan, member, self._reports[member].digest, incoming.frames)
        if holding is None:
            liars[member] = UNPROVEN
        return holding

    def _patience(self, seconds: float) -> float:
        """So long, if the round has that long."""
        return max(0.0, min(seconds, self._plan.deadline - self._now()))

    async def hear(self, audit: Audit) -> AuditResult:
        """Ask everybody everything about the chunks that were drawn."""
        async with asyncio.TaskGroup() as group:
            for action in self._note(audit.start()):
                assert isinstance(action, AskWitnesses), "there is nothing to recompute yet"
                group.create_task(self._hear_chunk(audit, action))
        assert self._verdict is not None, "every chunk was looked at"
        return self._verdict

    def _note(self, actions: list[Action]) -> list[Action]:
        """Keep the verdict, if it is there; returns what is left to do."""
        for action in actions:
            if isinstance(action, AuditResult):
                self._verdict = action
        return [action for action in actions if not isinstance(action, AuditResult)]

    async def _hear_chunk(self, audit: Audit, ask: AskWitnesses) -> None:
        """All about one chunk."""
        frames: dict[int, Buffer] = {}
        async with self._room:
            questions = [asyncio.create_task(self._ask(ask.chunk, member)) for member in ask.members]
            try:
                for question in asyncio.as_completed(questions):
                    answer = await question
                    if answer.frame is not None:
                        frames[answer.member] = answer.frame
                    for action in self._note(_take(audit, ask.chunk, answer)):
                        assert isinstance(action, Recompute), "all was asked at the start"
                        self._note(audit.recomputed(ask.chunk, await self._recompute(action, frames)))
                    if audit.is_closed(ask.chunk):
                        break  # who has not answered about it was not needed
            finally:
                await tasks.end(*questions)

    async def _ask(self, chunk: int, member: int) -> _Answer:
        """One member's answer about one chunk."""
        if member in self._silent:
            return _Answer(member, self._silent[member])
        challenge = Challenge(key=self._plan.key, chunk=chunk, generation=self._generations[chunk])
        try:
            incoming = await self._links.request(
                self._plan.members[member].peer,
                challenge,
                reply=Testimony,
                timeout_seconds=self._patience(self._answer_seconds),
                bulk=True,
            )
        except PotluckError as error:
            reason = f"it did not testify in the audit: {error}"
            if isinstance(error, DeadlineExceededError):
                self._silent[member] = reason
            return _Answer(member, reason)
        testimony, frames, report = incoming.message, incoming.frames, self._reports[member]
        account = await self._workers.run(
            lambda: examine(self._plan, self._notary, challenge, member, report, testimony, frames)
        )
        return _Answer(member, account, frames[0] if frames else None)

    async def _recompute(self, action: Recompute, frames: Mapping[int, Buffer]) -> bytes:
        """The hash of the average of what the contributors showed."""
        chunk = self._grid.chunks[action.chunk]
        members = self._plan.members
        shown = {members[index].peer: frames[index] for index in action.contributors}
        weights = {members[index].peer: members[index].weight for index in action.contributors}

        def work() -> bytes:
            frame = reduce_chunk(chunk, self._aggregator, shown, weights, None).frame
            return sealed_hash(frame) if frame is not None else b""

        return await self._workers.run(work)


def _dissents(plan: Plan, index: int, report: Report, digest: str) -> bool:
    """Whether a member holds other averages of this very revision, before the director's next one took it out."""
    is_fresh = report.revision >= plan.revision - 1
    return plan.members[index].trouble == OTHER_DIGEST and is_fresh and report.digest not in ("", digest)


def _take(audit: Audit, chunk: int, answer: _Answer) -> list[Action]:
    if isinstance(answer.account, str):
        return audit.unheard(answer.member, chunk, answer.account)
    return audit.testified(answer.member, chunk, answer.account)
