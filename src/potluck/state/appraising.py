"""Comparing states by value, where their digests differ: who holds the same but for rounding, and who is damaged.

A peer that needs a verdict asks the keepers of states, over links:

    HoldState   which state of this epoch do you hold? The answer binds its sender, and the state is held for a while
    AskSketch   the sketch (sketch.py) of that state, under a seed that is drawn only now: nobody could fit to it

Joiners do so when no digest has a majority, and check what they fetched against the answers: a keeper that answered for
another state than it serves is found by the first who fetches from it. Trainers do so when their own digest is not that
of the others, now and then: where machines compute differently this finds nothing to do, and nobody fetches anything.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from potluck import tasks
from potluck.errors import PotluckError, RetryableError
from potluck.link.grouplinks import GroupLinks
from potluck.link.links import Incoming
from potluck.messages import Message
from potluck.peer.groupsession import GroupSession
from potluck.round.lineage import Lineage
from potluck.round.member.workers import Workers
from potluck.state.announcement import Appraised, Counted, Digest, KeptState, Verdict
from potluck.state.directory import APPRAISED_SECONDS, StateDirectory
from potluck.state.inventory import MAX_METADATA_BYTES
from potluck.state.shelf import Held, Shelf
from potluck.state.sketch import SEED_BYTES, Difference, Sketch, camps, difference, read_sketch, sketch
from potluck.state.snapshot import Snapshot

logger = logging.getLogger(__name__)

HELD_SECONDS = APPRAISED_SECONDS  # how long a state stays that somebody compares
ANSWER_SECONDS = 30.0  # for a sketch: it takes as long as hashing the state, and a busy machine longer
MANY_SKETCHES = 10  # that one peer is given …
MANY_SECONDS = 10.0  # … within so long
REFUSALS = 5  # after so many in a row a peer is not waited for
SAME_EPOCH_SECONDS = 5.0  # for others to have made the state that this peer has just made
NEXT_EPOCH_SECONDS = 10.0  # for the next epoch, where epochs pass faster than announcements
CHECK_SHARE = 0.01  # of each keeper's time, for comparing values: all who compare together
RETRY_SECONDS = 3.0
NAMED_EVERY_SECONDS = 60.0


class HoldState(Message, frozen=True, kw_only=True, tag="state.hold"):
    """Which state of this epoch do you hold? Hold it; where it is still to come, wait for it."""

    epoch: Counted
    seconds: Annotated[float, msgspec.Meta(ge=0.0, le=60.0)] = 0.0


class HeldAnswer(Message, frozen=True, kw_only=True, tag="state.hold.answer"):
    """This one."""

    state: KeptState


class AskSketch(Message, frozen=True, kw_only=True, tag="state.sketch"):
    """The sketch of a state that was held."""

    digest: Digest
    seed: Annotated[bytes, msgspec.Meta(min_length=SEED_BYTES, max_length=SEED_BYTES)]


class SketchAnswer(Message, frozen=True, kw_only=True, tag="state.sketch.answer"):
    """Its sums and hashes are the frames beside it."""

    exact: Digest
    numbers: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]


@dataclass(frozen=True, slots=True)
class Answers:
    """What was answered about one epoch."""

    seed: bytes
    states: dict[str, KeptState]
    sketches: dict[str, Sketch]


class Appraiser:
    """Asks others for sketches, and answers them. Lives on the event loop."""

    def __init__(
        self,
        session: GroupSession,
        links: GroupLinks,
        directory: StateDirectory,
        shelf: Shelf,
        workers: Workers,
        lineage: Lineage,
        *,
        check_every_seconds: float,
        on_checked: Callable[[KeptState], None],
    ) -> None:
        """`on_checked` is told which state of this peer was compared, at most every `check_every_seconds`."""
        self._check_every_seconds = check_every_seconds
        self.counts: Counter[str] = Counter()
        self._session = session
        self._links = links
        self._directory = directory
        self._shelf = shelf
        self._workers = workers
        self._lineage = lineage
        self._on_checked = on_checked
        self._answers: dict[int, Answers] = {}
        self._newest = -1  # the epoch of the state that came last
        self._came = asyncio.Event()  # set, and replaced by another, with each state
        self._given_at: dict[str, list[float]] = {}  # times of sketches, by the peer that asked
        self._refusals: Counter[str] = Counter()
        self._named_at: dict[str, float] = {}
        self._is_suspect = False
        self._check_at = 0.0  # not before
        self._checking: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        links.handle(HoldState, self._hold_asked)
        links.handle(AskSketch, self._sketch_asked)
        directory.settle = self.settle

    async def close(self) -> None:
        """Compare nothing more. Idempotent."""
        await tasks.end(self._checking)

    # This peer's own state

    def came(self, held: Held) -> None:
        """This peer has another state."""
        self._newest = held.epoch
        came, self._came = self._came, asyncio.Event()
        came.set()
        self._shelf.expire(self._session.clock.monotonic())
        if self._is_suspect:
            self._check(held)

    def suspect(self, state: KeptState) -> bool:
        """Compare values soon, if somebody announces another state than this one of this peer; whether that is so."""
        claims = self._directory.claims(state.epoch)
        if all(claim.state is None or claim.state.compared == state.compared for claim in claims):
            return False
        self._is_suspect = True
        held = self._shelf.get(state.epoch)
        if held is not None and state.epoch not in self._answers:
            self._check(held)
        return True

    def difference(self, verdict: Verdict) -> Difference | None:
        """How this peer's state differs from the one that counts; None: values were not compared."""
        answers, own = self._answers.get(verdict.epoch), self._session.peer_id
        if answers is None or own not in answers.sketches:
            return None
        reference = next((peer for peer in verdict.vouchers if peer in answers.sketches and peer != own), None)
        if reference is None:
            return None
        return difference(answers.sketches[own], answers.sketches[reference])

    def _check(self, held: Held) -> None:
        now = self._session.clock.monotonic()
        if now < self._check_at or (self._checking is not None and not self._checking.done()):
            return
        snapshot = held.snapshot.hold()
        self._checking = asyncio.create_task(self._check_own(held, snapshot), name="state: comparing values")

    async def _check_own(self, held: Held, snapshot: Snapshot) -> None:
        clock, began = self._session.clock, self._session.clock.monotonic()
        try:
            is_whole = await self._appraise(held.epoch, own=held, seconds=SAME_EPOCH_SECONDS)
        except Exception:  # without it the run goes on; logged, counted, tried again
            self.counts["errors"] += 1
            logger.exception("states could not be compared by value")
            is_whole = False
        finally:
            snapshot.release()
        now = clock.monotonic()
        if is_whole:
            self._is_suspect = False
            self.counts["checks"] += 1
            num_trainers = sum(presence.card.role == "trainer" for presence in self._session.roster)
            self._check_at = now + max(self._check_every_seconds, num_trainers * (now - began) / CHECK_SHARE / 10)
        else:
            self.counts["failed_checks"] += 1
            self._check_at = now + RETRY_SECONDS
        self._on_checked(held.announced())

    # What the others hold

    async def look(self) -> None:
        """Where the newest states differ, see whether one of them is damaged, and name its peer."""
        offered = self._directory.offered(self._lineage.epoch)
        if offered is None:
            return
        epoch, _ = offered
        claims = self._directory.claims(epoch)
        if len({claim.state.compared for claim in claims if claim.state is not None}) > 1:
            await self._appraise(epoch, own=self._shelf.get(epoch))

    async def settle(self, epoch: int | None, at_least: int) -> bool:
        """Where digests alone decide nothing, compare values; whether that brought a verdict."""
        disputed = self._directory.disputed(self._lineage.epoch, at_least=at_least, epoch=epoch)
        if disputed is None:
            return False
        await self._appraise(disputed, own=self._shelf.get(disputed))
        if self._directory.verdict(disputed) is not None:
            return True
        if epoch is not None:
            return False
        # Epochs pass faster than announcements: have everybody hold the next one.
        following = max(self._lineage.epoch + 1, at_least)
        await self._appraise(following, own=None, seconds=NEXT_EPOCH_SECONDS)
        return self._directory.verdict(following) is not None

    async def _appraise(self, epoch: int, *, own: Held | None, seconds: float = 0.0) -> bool:
        """Compare what is held of an epoch; whether all who should have answered did."""
        async with self._turn:
            session, directory = self._session, self._directory
            me = session.peer_id
            asked = [claim.peer for claim in directory.claims(epoch) if claim.peer != me]
            held = await asyncio.gather(*(self._ask_held(peer, epoch, seconds) for peer in asked))
            states = {peer: state for peer, state in zip(asked, held, strict=True) if state is not None}
            seed = secrets.token_bytes(SEED_BYTES)
            drawn = await asyncio.gather(*(self._ask_sketch(peer, state, seed) for peer, state in states.items()))
            sketches = {peer: found for peer, found in zip(states, drawn, strict=True) if found is not None}
            if own is not None and own.epoch == epoch:
                snapshot = own.snapshot
                sketches[me] = await self._workers.run(lambda: sketch(snapshot, seed))
                states[me] = own.announced()
            self.counts["appraisals"] += 1
            self._refusals = Counter({peer: self._refusals[peer] + 1 for peer in asked if peer not in sketches})
            self._answers[epoch] = Answers(seed, states, sketches)
            for old in sorted(self._answers)[:-2]:
                del self._answers[old]
            refusing = [peer for peer, number in self._refusals.items() if number >= REFUSALS]
            directory.take_appraisal(Appraised(epoch, states, camps(sketches), refusing))
            self._tell(epoch)
            return bool(asked) and all(peer in sketches for peer in asked)

    async def _ask_held(self, peer: str, epoch: int, seconds: float) -> KeptState | None:
        try:
            answer = await self._links.request(
                peer,
                HoldState(epoch=epoch, seconds=seconds),
                reply=HeldAnswer,
                timeout_seconds=seconds + SAME_EPOCH_SECONDS,
            )
        except PotluckError as error:
            logger.debug("%s did not say what it holds of epoch %d: %s", peer, epoch, error)
            return None
        return answer.message.state if answer.message.state.epoch == epoch else None

    async def _ask_sketch(self, peer: str, state: KeptState, seed: bytes) -> Sketch | None:
        try:
            answer = await self._links.request(
                peer, AskSketch(digest=state.digest, seed=seed), reply=SketchAnswer, timeout_seconds=ANSWER_SECONDS
            )
            return read_sketch(answer.message.exact, answer.message.numbers, answer.frames)
        except PotluckError as error:
            logger.debug("%s gave no sketch of epoch %d: %s", peer, state.epoch, error)
            return None

    def _tell(self, epoch: int) -> None:
        """Name those whose state is damaged, and have the organisers told what cannot be decided."""
        verdict = self._directory.verdict(epoch)
        if verdict is None:
            return
        directory, now, answers = self._directory, self._session.clock.monotonic(), self._answers[epoch]
        reference = next((peer for peer in verdict.vouchers if peer in answers.sketches), None)
        for peer in verdict.dissenters:
            if reference is None or peer not in answers.sketches or peer == self._session.peer_id:
                continue
            if now < self._named_at.get(peer, -NAMED_EVERY_SECONDS) + NAMED_EVERY_SECONDS:
                continue
            self._named_at[peer] = now
            self.counts["damaged"] += 1
            logger.warning(
                "the state of epoch %d that %s holds is %.3g times further from that of %s than rounding explains: it "
                "is damaged, and should repair itself. If this comes again, have its person test the machine's memory, "
                "or ban it (potluck members ban)",
                epoch,
                self._name(peer),
                difference(answers.sketches[reference], answers.sketches[peer]).excess,
                self._name(reference),
            )
        if not verdict.is_contested:
            directory.tell_trouble("")
            return
        text = (
            f"the states of epoch {epoch} differ by more than rounding, and as many peers hold the one as the other: "
            f"the run goes on with that of {', '.join(map(self._name, verdict.vouchers[:3]))}, not with that of "
            f"{', '.join(map(self._name, verdict.dissenters[:3]))}. If that is the wrong one, ban its holders (potluck "
            "members ban) and go back (potluck run rollback); an invite with --trusted says whose state counts"
        )
        if directory.tell_trouble(text):
            logger.warning("%s", text)

    def _name(self, peer: str) -> str:
        presence = self._session.roster.get(peer)
        return f"{presence.card.name} ({peer[:12]})" if presence is not None and presence.card.name else peer

    async def verify(self, verdict: Verdict, snapshot: Snapshot) -> bool:
        """Whether a state that was fetched is what those who announced it answered for; who lied is named."""
        answers = self._answers.get(verdict.epoch)
        if answers is None:
            return True
        given = [p for p, state in answers.states.items() if state.digest == snapshot.digest and p in answers.sketches]
        if not given:
            return True
        found = await self._workers.run(lambda: sketch(snapshot, answers.seed))
        liars = [peer for peer in given if difference(answers.sketches[peer], found).excess > 1e-3]
        for peer in liars:
            self.counts["liars"] += 1
            logger.warning(
                "%s answered for another state of epoch %d than it serves: it is not believed any more. Ban it "
                "(potluck members ban) unless its person can explain that",
                self._name(peer),
                verdict.epoch,
            )
            self._directory.distrust(peer)
        return not liars

    # Answering

    async def _hold_asked(self, incoming: Incoming[HoldState]) -> HeldAnswer:
        epoch, clock = incoming.message.epoch, self._session.clock
        until = clock.monotonic() + incoming.message.seconds
        while True:
            came = self._came
            held = self._shelf.get(epoch)
            if held is not None:
                self._shelf.pin(held, clock.monotonic() + HELD_SECONDS)
                return HeldAnswer(state=held.announced())
            left = until - clock.monotonic()
            if epoch <= self._newest or left <= 0:
                raise RetryableError(f"no state of epoch {epoch} is held here; the newest is of {self._newest}")
            try:
                async with asyncio.timeout(left):
                    await came.wait()
            except TimeoutError:
                pass

    async def _sketch_asked(self, incoming: Incoming[AskSketch]) -> tuple[SketchAnswer, list[bytes]]:
        now, asked = self._session.clock.monotonic(), incoming.message
        self._given_at = {
            peer: lately
            for peer, times in self._given_at.items()
            if (lately := [at for at in times if at + MANY_SECONDS > now])
        }
        given_at = self._given_at.setdefault(incoming.sender, [])
        if len(given_at) >= MANY_SKETCHES:
            raise RetryableError(f"{MANY_SKETCHES} sketches within {MANY_SECONDS:g} s are the most: ask again later")
        snapshot = self._shelf.find(asked.digest)
        if snapshot is None:
            raise RetryableError(f"the state {asked.digest[:12]} is not kept here (any more)")
        given_at.append(now)
        snapshot.hold()
        try:
            made = await self._workers.run(lambda: sketch(snapshot, asked.seed))
        finally:
            snapshot.release()
        self.counts["sketches"] += 1
        return SketchAnswer(exact=made.exact, numbers=made.numbers), made.frames()
