"""The auditor's driver: asks the witnesses, recomputes, and brings the verdict (audit.py decides).

    draw chunks ──▶ ask reducer and contributors ──▶ examine each answer ──▶ recompute ──▶ verdict
                    (requests over links)            (in a worker)           (in a worker)

So many chunks are under way at once as fit into a fixed memory; every question has a deadline, and none reaches beyond
the round's own. The draw comes from the operating system's randomness, after everybody has reported.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from potluck import tasks
from potluck.errors import PotluckError
from potluck.faultpoints import reach
from potluck.link.carrier import Buffer
from potluck.link.links import Links
from potluck.peer.session import Session
from potluck.round.aggregators import aggregator_for
from potluck.round.audit import Action, Ask, Audit, AuditConfig, Recompute, Verdict, draw_chunks
from potluck.round.chunks import ChunkGrid
from potluck.round.director import Director
from potluck.round.exclusions import Exclusions, why_excluded
from potluck.round.plan import Commit, Exclusion, Plan, Report
from potluck.round.reduction import reduce_chunk
from potluck.round.seals import Notary, sealed_hash
from potluck.round.testimony import Account, Challenge, Fault, Testimony, examine
from potluck.round.workers import Workers

logger = logging.getLogger(__name__)

MEMORY_BYTES = 64 * 1024 * 1024  # for contributions that wait to be recomputed


class Auditor:
    """Audits rounds, one at a time, and remembers who lied."""

    def __init__(
        self,
        links: Links,
        session: Session,
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
        self._exclusions = Exclusions(config.exclusion_seconds)

    def excluded(self, head: Commit | None) -> dict[str, Exclusion]:
        """Liars whose time is not over, given the newest commit."""
        return self._exclusions.current(head, self._session.now())

    def barred(self, head: Commit | None) -> dict[str, str]:
        """The same, in words."""
        now = self._session.now()
        return {peer: why_excluded(exclusion, now) for peer, exclusion in self.excluded(head).items()}

    async def audit(self, director: Director, holders: tuple[int, ...]) -> Verdict:
        """Look at a round that is complete: `holders` have the averages, as they have reported."""
        plan = director.plan
        reach("round.auditing", peer=self._session.peer_id, epoch=plan.key.epoch, role="coordinator")
        hearing = _Hearing(
            self._links,
            self._workers,
            Notary(self._session.subjects.run, plan.key),
            plan,
            {index: report for index in holders if (report := director.report_of(index)) is not None},
            draw_chunks(plan, self._config, self._rng),
            min(self._config.answer_seconds, max(0.0, plan.deadline - self._session.now())),
        )
        verdict = await hearing.hold()
        self._counts["audits"] += 1
        self._counts["audited_chunks"] += verdict.num_good
        self._counts["unanswered_audits"] += len(verdict.missing)
        for index, reason in verdict.liars.items():
            peer = plan.members[index].peer
            self._counts["liars"] += 1
            self._exclusions.add(peer, reason, self._session.now())
            logger.warning("%s lied in %s and is excluded: %s", peer, plan.key, reason)
        return verdict


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a member said of a chunk, or why it said nothing."""

    member: int
    account: Account | Fault | str
    frame: Buffer | None = None


class _Hearing:
    """One audit under way."""

    def __init__(
        self,
        links: Links,
        workers: Workers,
        notary: Notary,
        plan: Plan,
        reports: Mapping[int, Report],
        chunks: Collection[int],
        answer_seconds: float,
    ) -> None:
        self._links = links
        self._workers = workers
        self._notary = notary
        self._plan = plan
        self._reports = reports
        self._answer_seconds = answer_seconds
        self._audit = Audit(plan, reports.keys(), chunks)
        self._grid = ChunkGrid(runs=plan.runs, chunk_bytes=plan.chunk_bytes)
        self._aggregator = aggregator_for(plan.aggregator)
        self._generations = {n: part.generation for part in plan.parts for n in range(part.start, part.stop)}
        num_senders = max(1, sum(member.weight > 0 for member in plan.members))
        self._room = asyncio.Semaphore(max(1, MEMORY_BYTES // (plan.chunk_bytes * num_senders)))
        self._verdict: Verdict | None = None

    async def hold(self) -> Verdict:
        """Ask everybody everything."""
        async with asyncio.TaskGroup() as group:
            for action in self._note(self._audit.start()):
                assert isinstance(action, Ask), "there is nothing to recompute yet"
                group.create_task(self._hear(action))
        assert self._verdict is not None, "every chunk was looked at"
        return self._verdict

    def _note(self, actions: list[Action]) -> list[Action]:
        """Keep the verdict, if it is there; returns what is left to do."""
        for action in actions:
            if isinstance(action, Verdict):
                self._verdict = action
        return [action for action in actions if not isinstance(action, Verdict)]

    async def _hear(self, ask: Ask) -> None:
        """All about one chunk."""
        frames: dict[int, Buffer] = {}
        async with self._room:
            questions = [asyncio.create_task(self._ask(ask.chunk, member)) for member in ask.members]
            try:
                for question in asyncio.as_completed(questions):
                    answer = await question
                    if answer.frame is not None:
                        frames[answer.member] = answer.frame
                    for action in self._note(self._take(ask.chunk, answer)):
                        assert isinstance(action, Recompute), "all was asked at the start"
                        self._note(self._audit.recomputed(ask.chunk, await self._recompute(action, frames)))
                    if self._audit.is_closed(ask.chunk):
                        break  # who has not answered about it was not needed
            finally:
                await tasks.end(*questions)

    def _take(self, chunk: int, answer: _Answer) -> list[Action]:
        if isinstance(answer.account, str):
            return self._audit.unheard(answer.member, chunk, answer.account)
        return self._audit.testified(answer.member, chunk, answer.account)

    async def _ask(self, chunk: int, member: int) -> _Answer:
        """One member's answer about one chunk."""
        challenge = Challenge(key=self._plan.key, chunk=chunk, generation=self._generations[chunk])
        try:
            incoming = await self._links.request(
                self._plan.members[member].peer,
                challenge,
                reply=Testimony,
                timeout_seconds=self._answer_seconds,
                bulk=True,
            )
        except PotluckError as error:
            return _Answer(member, f"it did not testify in the audit: {error}")
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
