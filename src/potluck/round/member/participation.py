"""This peer as a member of rounds: says that it is ready, follows the plan, reports, learns of the commit.

    enter ──▶ Ready, each second ──▶ plan ──▶ RoundWork ──▶ reports ──▶ commit ──▶ tensors
                        ▲                  │
                        └── aborted, or a new coordinator

Who only stands by says so ahead of the time at which an epoch is expected to be due, and until when. A plan made until
then finds it there. Being in one, or hearing that the epoch is due (`confirm`), makes it ready like everybody else.

A plan counts only if it is signed by the peer that owns its subject, and that peer holds the lease with the plan's
token. A member keeps the averages of a round that it has completed until an epoch is committed or a newer plan comes;
if the coordinator dies in between, it says so in its Ready, and the next coordinator can commit the round as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from potluck import tasks
from potluck.errors import ConfigurationError, PotluckError, ProtocolError, RoundFailedError
from potluck.hub.connection import Delivery, Subscription
from potluck.link.grouplinks import GroupLinks
from potluck.peer.groupsession import GroupSession
from potluck.peer.lease import LeaseView
from potluck.round.audit.exclusions import why_excluded
from potluck.round.audit.seals import Notary, Sealer
from potluck.round.audit.witness import Witness
from potluck.round.lineage import Lineage
from potluck.round.member.incoming import IncomingFrames
from potluck.round.member.intent import Intent, StandBy, ready_message
from potluck.round.member.lateaverages import LateAverages
from potluck.round.member.messenger import Messenger, ReportTarget
from potluck.round.member.roundwork import RoundWork
from potluck.round.member.tensorwork import SealedWork, TensorWork
from potluck.round.member.workers import Workers
from potluck.round.outcome import LeftBehind, MemberRole, PhaseSeconds, RoundResult
from potluck.round.plan.layout import FlatTensors
from potluck.round.plan.messages import Abort, Commit, Completed, Plan, Ready, RoundKey
from potluck.round.plan.signing import Word, read_word
from potluck.round.plan.specs import StartSpec

logger = logging.getLogger(__name__)

MAX_WORDS = 64  # that wait to be obeyed
AVERAGED_SECONDS = 0.1  # from values that arrive to an epoch that has them: averaged, sent back, reported


@dataclass(frozen=True, slots=True)
class _Heard:
    """A coordinator's message with a valid signature."""

    word: Word
    sender: str
    data: bytes


@dataclass(slots=True)
class _Round:
    """The round that this peer is in."""

    round_work: RoundWork
    coordinator: str
    word: bytes  # the newest revision of the plan as it was signed


class Participation:
    """One peer's part in all rounds."""

    def __init__(
        self,
        links: GroupLinks,
        session: GroupSession,
        lease: LeaseView,
        lineage: Lineage,
        workers: Workers,
        start: StartSpec | None = None,
    ) -> None:
        """`start` is when this peer would have rounds start."""
        self.counts: Counter[str] = Counter()
        self._seconds = PhaseSeconds()  # of all rounds together
        self._links = links
        self._session = session
        self._lease = lease
        self._lineage = lineage
        self._workers = workers
        self._start = start
        self._clock = session.clock
        self._wish: Intent | None = None
        self._round: _Round | None = None
        self._last_abort = ""
        self._waiting_word: _Heard | None = None  # of a lease that we have not heard of yet
        self._words: asyncio.Queue[_Heard] = asyncio.Queue(MAX_WORDS)
        self._obeying: asyncio.Task[None] | None = None
        self._subscription: Subscription | None = None
        self._incoming_frames = IncomingFrames(links, self._round_work, self._expects)
        self._messenger = Messenger(links, session, ready=self._ready, target=self._target)
        self._witness = Witness(links, workers, self._target)
        self._late = LateAverages(links, session, workers)

    async def start(self) -> None:
        """Listen to coordinators, and speak."""
        self._subscription = await self._session.hub.subscribe(self._session.subjects.plan("*"), self._word_came)
        self._obeying = asyncio.create_task(self._keep_obeying(), name="round: words")
        self._messenger.start()

    async def close(self) -> None:
        """Take part in nothing more. Idempotent."""
        if self._wish is not None and not self._wish.committed.done():
            self._wish.committed.set_exception(RoundFailedError("the averager was closed while a round was under way"))
        if self._subscription is not None:
            await self._subscription.cancel()
            self._subscription = None
        await tasks.end(self._obeying)
        await self._messenger.close()
        await self._leave_round()

    def statistics(self) -> dict[str, int | float]:
        """Counters of all rounds that are over, and the seconds that went into those that were committed."""
        seconds = {f"{phase}_seconds": seconds for phase, seconds in asdict(self._seconds).items()}
        return {**self.counts, **seconds, **self._incoming_frames.counts, **self._witness.counts, **self._late.counts}

    @property
    def is_in_round(self) -> bool:
        """Whether others count on this peer: it is in a plan that is not committed yet."""
        return self._round is not None

    # What the caller wants

    async def enter(
        self,
        tensors: FlatTensors | None,
        *,
        weight: float,
        epoch: int,
        reduces: bool = True,
        stand_by: StandBy | None = None,
        timeout_seconds: float,
        phases: float = 0.0,
    ) -> RoundResult | None:
        """Be ready for an epoch until it is committed; RoundFailedError when that does not happen in time.

        None, and nothing has changed, when this peer only stood by and no round began.
        """
        if self._wish is not None:
            raise ConfigurationError("this peer is in a round already: await the first call before the next one")
        loop = asyncio.get_running_loop()
        wish = self._wish = Intent(
            ready_message(self._session.card.session, tensors, weight, epoch, reduces, phases),
            tensors,
            self._clock.monotonic(),
            committed=loop.create_future(),
            wanted=loop.create_future(),
        )
        self._last_abort = ""
        try:
            if self._lineage.head is not None:
                self.committed(self._lineage.head)
            if stand_by is not None:
                self.counts["stood_by"] += 1
                if not await self._is_wanted(wish, stand_by):
                    self.counts["stood_by_in_vain"] += 1
                    if not stand_by.stays:
                        return None
            wish.confirm()
            self._messenger.announce()
            commit = await self._until_committed(wish, timeout_seconds)
            return await self._conclude(wish, commit)
        finally:
            self._wish = None
            await self._leave_round()
            if not wish.committed.done():
                wish.committed.cancel()
                if not self._session.ended.done():
                    await self._messenger.publish(msgspec.structs.replace(wish.ready, withdrawn=True))

    async def _is_wanted(self, wish: Intent, stand_by: StandBy) -> bool:
        """Stand by until there is a plan, the epoch is due, or was committed by others; False: none of it in time."""
        until = 0.0 if stand_by.stays else self._session.now() + stand_by.seconds
        wish.ready = msgspec.structs.replace(wish.ready, awaits=stand_by.awaits, until=until)
        self._messenger.announce()
        either: set[asyncio.Future[Any]] = {wish.wanted, wish.committed, self._session.ended}
        done, _ = await asyncio.wait(
            either, timeout=stand_by.seconds + stand_by.word_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done)

    def confirm(self) -> None:
        """The epoch that this peer stands by for is due."""
        if self._wish is not None:
            self._wish.confirm()

    async def hear_late(self, tensors: FlatTensors, epoch: int) -> None:
        """The averages of an epoch that was committed without this peer; StateUnavailableError if nobody has them."""
        await self._late.fetch(epoch, tensors)

    def can_hear_late(self, epoch: int) -> bool:
        """Whether somebody who is there should have the averages of a past epoch."""
        return self._late.can_fetch(epoch)

    async def tell_late(self, epoch: int, weight: float) -> None:
        """Say that this peer would be ready for an epoch now that others have made: so it is seen how late it is."""
        session = self._session.card.session
        await self._messenger.publish(Ready(session=session, epoch=epoch, weight=weight, token=self._lease.token))

    async def _until_committed(self, wish: Intent, timeout_seconds: float) -> Commit:
        """The commit; a round in which bytes move is not given up, however slow the lines are."""
        ended = self._session.ended
        either: set[asyncio.Future[Any]] = {wish.committed, ended}
        done: set[asyncio.Future[Any]] = set()
        moved_at = self._clock.monotonic()
        while not done and (left := moved_at + timeout_seconds - self._clock.monotonic()) > 0:
            done, _ = await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if self._round is not None:
                moved_at = max(moved_at, self._round.round_work.moved_at)
        if wish.committed.done():
            return wish.committed.result()
        self.counts["failed"] += 1
        if ended.done():
            ended.result()  # raises why this peer is out, if it was thrown out
            raise RoundFailedError(f"the run was left before epoch {wish.epoch} was committed")
        raise RoundFailedError(
            f"epoch {wish.epoch} was not committed, and nothing moved for {timeout_seconds:g} s: "
            f"{self._describe_trouble()}"
        )

    async def _conclude(self, wish: Intent, commit: Commit) -> RoundResult:
        now = self._clock.monotonic()
        current, self._round = self._round, None
        if current is None:
            seconds = PhaseSeconds(gathering=now - wish.since)
            return self._result(wish, commit, None, seconds, "it was not in the plan")
        round_work = current.round_work
        await self._end(round_work)
        completed_at = round_work.completed_at
        seconds = PhaseSeconds(
            gathering=round_work.started_at - wish.since,
            exchanging=(completed_at or now) - round_work.started_at,
            committing=now - completed_at if completed_at is not None else 0.0,
        )
        if round_work.key != commit.key or round_work.digest != commit.digest:
            return self._result(wish, commit, round_work, seconds, "it lacked averages when the epoch was committed")
        alone = len(round_work.plan.members) == 1  # it takes its own values, which were never encoded
        round_work.applying()
        if not alone and wish.tensors is not None:
            await round_work.averages.write(wish.tensors, self._workers)
        if not alone:
            self._late.keep(commit.epoch, commit.digest, round_work.averages)
        seconds = replace(seconds, applying=self._clock.monotonic() - now)
        return replace(self._result(wish, commit, round_work, seconds, ""), alone=alone)

    def _result(
        self, wish: Intent, commit: Commit, round_work: RoundWork | None, seconds: PhaseSeconds, reason: str
    ) -> RoundResult:
        behind = None
        if reason:
            head = self._lineage.head or commit
            me = self._session.peer_id
            if me in commit.excluded:  # not named as left out if we were ready only after the round had begun
                reason = why_excluded(commit.excluded[me], commit.committed_at)
            reason = commit.restored.describe() if commit.restored is not None else commit.left_out.get(me, reason)
            behind = LeftBehind(head_epoch=head.epoch, holders=head.holders, reason=reason)
            self.counts["left_behind"] += 1
        self.counts["committed"] += 1
        self._seconds += seconds
        return RoundResult(
            commit=commit,
            role=_role(round_work),
            sent_bytes=round_work.counts.sent_bytes if round_work is not None else 0,
            received_bytes=round_work.counts.received_bytes if round_work is not None else 0,
            seconds=seconds,
            left_behind=behind,
            contributed=self._contributed(commit, round_work),
        )

    def _contributed(self, commit: Commit, round_work: RoundWork | None) -> float:
        """The share of our values that can be in an epoch: what arrived when it was committed, or later, is not."""
        if round_work is None or round_work.key != commit.key:
            return 0.0
        committed_at = self._clock.monotonic() - (self._session.now() - commit.committed_at)
        return round_work.contributed_by(committed_at - AVERAGED_SECONDS)

    def _describe_trouble(self) -> str:
        """Phase and peers, for an error."""
        abort = f" (the last attempt was given up: {self._last_abort})" if self._last_abort else ""
        current = self._round
        if current is None:
            holder = self._lease.holder
            who = f"coordinator {holder} has made no plan with this peer in it" if holder else "nobody coordinates"
            return f"gathering; {who}{abort}"
        round_work = current.round_work
        if round_work.digest:
            return f"committing {round_work.key}; coordinator {current.coordinator} has not committed it{abort}"
        return f"exchanging {round_work.key}; {round_work.describe_trouble()}{abort}"

    # What the coordinator says

    def lease_changed(self) -> None:
        """Another coordinator, or none."""
        self._messenger.announce()
        waiting, self._waiting_word = self._waiting_word, None
        if waiting is not None:
            self._weigh(waiting)

    def committed(self, commit: Commit) -> None:
        """The head of the lineage has moved."""
        self._late.committed(commit)
        wish = self._wish
        if wish is not None and commit.epoch >= wish.epoch and not wish.committed.done():
            wish.committed.set_result(commit)

    def _word_came(self, delivery: Delivery) -> None:
        sender = delivery.subject.rsplit(".", 1)[-1]
        try:
            word = read_word(delivery.payload, sender, self._session.subjects.scope)
        except ProtocolError as error:
            self.counts["bad_words"] += 1
            logger.warning("a plan from %s is ignored: %s", sender, error)
            return
        self._weigh(_Heard(word, sender, delivery.payload))

    def _weigh(self, heard: _Heard) -> None:
        token = heard.word.key.token
        if self._lease.accepts(heard.sender, token):
            if self._words.full():
                self.counts["dropped_words"] += 1  # a plan that is not answered is said again
            else:
                self._words.put_nowait(heard)
        elif token > self._lease.largest_token:
            self._waiting_word = heard  # the news of the lease comes another way and may come later
        else:
            self.counts["foreign_words"] += 1
            logger.info("a plan for %s from %s is ignored: it does not hold the lease", heard.word.key, heard.sender)

    async def _keep_obeying(self) -> None:
        while True:
            heard = await self._words.get()
            try:
                await self._obey(heard.word, heard.sender, heard.data)
            except Exception:  # the next plan may be better; logged and counted
                self.counts["errors"] += 1
                logger.exception("obeying %s failed", heard.word.key)
            self._incoming_frames.look_again()

    async def _obey(self, word: Word, sender: str, data: bytes) -> None:
        current = self._round
        if current is not None and word.key < current.round_work.key:
            self.counts["late_words"] += 1
        elif isinstance(word, Abort):
            self._last_abort = word.reason
            if current is not None and word.key == current.round_work.key:
                logger.info("%s was given up: %s", word.key, word.reason)
                await self._leave_round()
                self._messenger.announce()
        elif current is not None and word.key == current.round_work.key:
            await self._revise(current, word, data)
        else:
            if current is not None:
                logger.info("%s came to nothing: %s comes in its place", current.round_work.key, word.key)
            await self._leave_round()
            self._enter_round(word, sender, data)

    async def _revise(self, current: _Round, plan: Plan, data: bytes) -> None:
        if plan.revision > current.round_work.plan.revision:
            current.word = data
            await current.round_work.revise(plan)
        self._messenger.report()

    def _enter_round(self, plan: Plan, sender: str, data: bytes) -> None:
        wish = self._wish
        me = plan.index_of(self._session.peer_id)
        if (
            wish is None
            or me is None
            or not self._expects(plan.key)
            or plan.members[me].session != self._session.card.session
            or not plan.members[me].receives
        ):
            self.counts["plans_without_us"] += 1
            return
        try:
            wish.check(plan, me)
            round_work = RoundWork(
                self._links,
                self._workers,
                plan,
                me,
                wish.tensors,
                self._clock,
                on_news=self._messenger.report,
                on_broken=lambda error: self._broke(wish, error),
                on_room=self._incoming_frames.look_again,
                work=self._work(plan),
            )
        except PotluckError as error:
            self.counts["bad_plans"] += 1
            logger.warning("the plan for %s cannot be followed: %s", plan.key, error)
            return
        self._round = _Round(round_work, sender, data)
        wish.confirm()
        round_work.start()
        self._messenger.report()

    def _work(self, plan: Plan) -> TensorWork:
        if not plan.audit:
            return TensorWork()
        run = self._session.subjects.scope
        return SealedWork(Sealer(self._session.identity, run, plan.key), Notary(run, plan.key))

    def _broke(self, wish: Intent, error: Exception) -> None:
        if not wish.committed.done():
            failure = RoundFailedError(f"epoch {wish.epoch}: this peer's own work on the tensors failed with {error!r}")
            failure.__cause__ = error
            wish.committed.set_exception(failure)

    async def _leave_round(self) -> None:
        current, self._round = self._round, None
        if current is not None:
            await self._end(current.round_work)

    async def _end(self, round_work: RoundWork) -> None:
        await round_work.stop()
        self.counts.update(asdict(round_work.counts))

    # What incoming_frames and messenger ask

    def _round_work(self) -> RoundWork | None:
        return self._round.round_work if self._round is not None else None

    def _expects(self, key: RoundKey) -> bool:
        return self._wish is not None and not self._wish.committed.done() and key.epoch == self._wish.epoch

    def _target(self) -> ReportTarget | None:
        return ReportTarget(self._round.coordinator, self._round.round_work) if self._round is not None else None

    def _ready(self) -> Ready | None:
        wish, current = self._wish, self._round
        if wish is None or wish.committed.done():
            return None
        ready = msgspec.structs.replace(wish.ready, token=self._lease.token, start=self._start)
        if current is None or not (digest := current.round_work.digest):
            return ready
        if self._lease.accepts(current.coordinator, current.round_work.key.token):
            return ready
        completed = Completed(coordinator=current.coordinator, plan=current.word, digest=digest)
        return msgspec.structs.replace(ready, completed=completed)


def _role(round_work: RoundWork | None) -> MemberRole:
    if round_work is None:
        return "none"
    return "reducer" if any(part.reducer == round_work.me for part in round_work.plan.parts) else "sender"
