"""One member's work in one round: carries out what the Exchange (exchange.py, pure) decides.

    arrivals ──▶ Exchange ──actions──▶ lanes (one per other member): encode in a worker, send
                     ▲                 workers: reduce a chunk, check and hash an average
                     └── outcomes ─────┘

Everything here runs on the event loop; only reduction.py and heldaverages.py's checks run in workers. The driver
of the member (participation.py) brings plans and messages, and asks for the report.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from potluck.clock import Clock
from potluck.errors import NotFiniteError, PeerError, ProtocolError
from potluck.link.carrier import Buffer
from potluck.link.grouplinks import GroupLinks
from potluck.round.aggregators import aggregator_for
from potluck.round.codecs import Codec
from potluck.round.member.exchange import Action, Complete, Discard, Exchange, Reduce, SendAverage, SendContribution
from potluck.round.member.heldaverages import HeldAverages
from potluck.round.member.lane import Lane, Letter, close_lanes
from potluck.round.member.milestones import Milestones
from potluck.round.member.reduction import Own, Reduced
from potluck.round.member.tensorwork import TensorWork
from potluck.round.member.workers import Workers
from potluck.round.plan.chunks import Chunk, ChunkGrid
from potluck.round.plan.layout import FlatTensors
from potluck.round.plan.messages import Offence, Plan, Report, bitmap, shortened

logger = logging.getLogger(__name__)

CONTRIBUTIONS_BYTES_PER_ELEMENT = 2  # held at a reducer before they are averaged: half of the float32 size
LEAST_AHEAD_CHUNKS = 2


@dataclass(slots=True)
class Counts:
    """What happened in a round, as one member saw it."""

    sent_bytes: int = 0
    received_bytes: int = 0
    unwanted: int = 0  # came twice, too late, or not to us
    bad_averages: int = 0
    refused: int = 0  # members whose values could not be used; the reports name them


@dataclass(frozen=True, slots=True)
class _Arrival:
    sender: int
    chunk: Chunk
    generation: int
    frame: Buffer
    seal: bytes


class RoundWork:
    """One member's part in one round."""

    def __init__(
        self,
        links: GroupLinks,
        workers: Workers,
        plan: Plan,
        me: int,
        tensors: FlatTensors | None,
        clock: Clock,
        on_news: Callable[[], None],
        on_broken: Callable[[Exception], None],
        on_room: Callable[[], None] = lambda: None,
        work: TensorWork | None = None,
    ) -> None:
        """`on_news` says that the coordinator should hear a report; `on_broken`, that this member cannot go on;
        `on_room`, that there is room for more contributions.

        `work` is what is done with tensors and frames; an audited round needs more of it.
        """
        self.exchange = Exchange(plan, me)
        self.key = plan.key
        self.me = me
        self.index_by_peer = {member.peer: index for index, member in enumerate(plan.members)}
        self.counts = Counts()
        self.digest = ""
        self.commitment = ""
        self.started_at = clock.monotonic()
        self.completed_at: float | None = None
        self.grid = ChunkGrid(runs=plan.runs, chunk_bytes=plan.chunk_bytes)
        if len(self.grid) != plan.num_chunks:
            raise ProtocolError(f"the plan shares out {plan.num_chunks} chunks, but there are {len(self.grid)}")
        self.averages = HeldAverages(self.grid)
        self.work = work or TensorWork()
        self._links = links
        self._workers = workers
        self.tensors = tensors
        self._clock = clock
        self._on_news = on_news
        self._on_broken = on_broken
        self._on_room = on_room
        self._aggregator = aggregator_for(plan.aggregator)
        self._lanes: dict[int, Lane] = {}
        self._contributions: dict[int, dict[int, Buffer]] = {}  # frames by chunk and sender
        self._ahead: dict[int, set[int]] = {}  # by sender, the chunks that wait for others' contributions
        self._unchecked: list[_Arrival] = []
        self._in_check: set[tuple[int, int]] = set()  # chunk and generation
        self._is_checking = False
        self._offences: dict[int, str] = {}
        self._heard_at = self.started_at
        self._num_reports = 0
        self._stopped = False
        self._contributed_at: dict[int, float] = {}  # when our values of a chunk were first with somebody else
        self._milestones = Milestones(plan, me)

    @property
    def plan(self) -> Plan:
        """The newest revision."""
        return self.exchange.plan

    @property
    def peer(self) -> str:
        """This member's id."""
        return self.plan.members[self.me].peer

    def start(self) -> None:
        """Begin."""
        self._milestones.planned()
        self._carry_out(self.exchange.start())

    async def stop(self) -> None:
        """Send and take nothing more; averages that are here stay. Idempotent."""
        self._stopped = True
        self._contributions.clear()
        self._unchecked.clear()
        lanes, self._lanes = self._lanes, {}
        await close_lanes(lanes.values())

    async def revise(self, plan: Plan) -> None:
        """Take in a newer plan of the same round."""
        if plan.revision <= self.plan.revision or self._stopped:
            return
        self._heard_at = self._clock.monotonic()  # what is waited for from now on has had no time yet
        self._carry_out(self.exchange.revise(plan))
        if not self.exchange.is_complete:
            self.digest, self.completed_at = "", None
        gone = [index for index in self._lanes if not plan.members[index].receives]
        await close_lanes([self._lanes.pop(index) for index in gone])
        self._on_news()

    def is_early(self, chunk: int, generation: int) -> bool:
        """Whether a message belongs to a revision that has not come yet."""
        return chunk < len(self.grid) and generation > self.exchange.generation(chunk)

    def has_room(self, sender: int, number: int, generation: int) -> bool:
        """Whether a contribution can be taken in now. Senders keep to the limit themselves: it stops those who do not.

        What is done again is not limited, as in a lane; what is not wanted takes no room.
        """
        return (
            generation > 0
            or len(self._ahead.get(sender, ())) < self.ahead_chunks()
            or not self.exchange.wants_contribution(sender, number, generation)
        )

    def take_contribution(
        self, sender: int, number: int, generation: int, frames: Sequence[Buffer], seal: bytes = b""
    ) -> None:
        """A member's values of one of our chunks."""
        if self._stopped or not self.exchange.wants_contribution(sender, number, generation):
            self.counts.unwanted += 1
            return
        self._heard(frames)
        chunk = self.grid.chunks[number]
        if not _fits(chunk.codec, chunk, frames):
            self._refuse(sender, f"its values of chunk {number} do not have {chunk.encoded_bytes} bytes")
            self._carry_out(self.exchange.contributions_refused([sender], number, generation))
            return
        self._contributions.setdefault(number, {})[sender] = frames[0]
        if not generation:
            self._ahead.setdefault(sender, set()).add(number)
        self.work.received(number, self.plan.members[sender].peer, seal)
        self._carry_out(self.exchange.contribution_arrived(sender, number, generation))

    def take_average(
        self, sender: int, number: int, generation: int, frames: Sequence[Buffer], seal: bytes = b""
    ) -> None:
        """The average of a chunk, from its reducer."""
        if (
            self._stopped
            or not self.exchange.wants_average(sender, number, generation)
            or (number, generation) in self._in_check
        ):
            self.counts.unwanted += 1
            return
        self._heard(frames)
        chunk = self.grid.chunks[number]
        if not _fits(chunk.reply, chunk, frames):
            expected = chunk.reply.encoded_bytes(chunk.elements)
            self._reject_average(sender, number, f"it does not have {expected} bytes")
            return
        self._in_check.add((number, generation))
        self._unchecked.append(_Arrival(sender, chunk, generation, frames[0], seal))
        self._check_next()

    def report(self) -> Report:
        """What the coordinator should know."""
        exchange = self.exchange
        self._num_reports += 1
        return Report(
            key=self.key,
            number=self._num_reports,
            revision=self.plan.revision,
            held=bitmap(exchange.held),
            waiting_for=exchange.waiting_for,
            missing_from=exchange.missing_from,
            idle_seconds=self._clock.monotonic() - self._arrived_at(),
            digest=self.digest,
            commitment=self.commitment,
            offences=tuple(Offence(member=index, reason=reason) for index, reason in self._offences.items()),
            sent_bytes=self.counts.sent_bytes,
            received_bytes=self.counts.received_bytes,
        )

    def _arrived_at(self) -> float:
        """When something came last of what is waited for: a part of a message counts, on a slow line it takes long."""
        waited_for = {*self.exchange.waiting_for, *self.exchange.missing_from}
        members = self.plan.members
        arrivals = (self._links.arrived_at(members[index].peer, bulk=True) for index in waited_for)
        return max([self._heard_at, *arrivals])

    @property
    def moved_at(self) -> float:
        """When something came last from another member, or arrived there. An attempt as such moves nothing."""
        others = [member.peer for member in self.plan.members if member.peer != self.peer]
        moved = [self._links.arrived_at(peer, bulk=True) for peer in others]
        moved += [self._links.delivered_at(peer, bulk=True) for peer in others]
        return max(moved, default=-math.inf)

    def contributed_by(self, moment: float) -> float:
        """The share of our values that were with others by then: by themselves, or in averages that we made."""
        return sum(at <= moment for at in self._contributed_at.values()) / max(1, len(self.grid))

    def describe_trouble(self) -> str:
        """What is missing, and from which peers."""
        names = [member.peer for member in self.plan.members]
        lacking = ", ".join(names[index] for index in self.exchange.missing_from) or "nobody"
        waiting = ", ".join(names[index] for index in self.exchange.waiting_for) or "nobody"
        return f"averages are missing from {lacking}, contributions from {waiting}"

    def reported(self) -> None:
        """A report has left."""
        if self.digest:
            self._milestones.reported()

    def applying(self) -> None:
        """The averages are about to be written."""
        self._milestones.applying()

    # What the exchange wants done

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendContribution(number, generation, to):
                    self._lane(to).contribute(number, generation)
                case Reduce():
                    self._reduce(action)
                case SendAverage(number, generation, to):
                    for index in to:
                        self._lane(index).send_average(number, generation, self.averages.frame(number))
                case Discard(number):
                    self.averages.discard(number)
                    self._take_out(number)
                case Complete():
                    self._complete()

    def _take_out(self, number: int) -> dict[int, Buffer]:
        """The contributions to a chunk, which are kept no longer."""
        frames = self._contributions.pop(number, {})
        for chunks in self._ahead.values():
            chunks.discard(number)
        if frames:
            self._on_room()
        return frames

    def _complete(self) -> None:
        self.digest = self.work.digest(self.averages.hashes)
        self.commitment = self.work.commit(len(self.grid))
        self.completed_at = self._clock.monotonic()
        self._milestones.complete()
        self._on_news()

    def _lane(self, index: int) -> Lane:
        lane = self._lanes.get(index)
        if lane is None:
            lane = self._lanes[index] = Lane(
                self._links,
                self.plan.members[index].peer,
                self.key,
                encode=self._encode,
                is_current=lambda chunk, generation: self.exchange.generation(chunk) == generation,
                on_sent=self._sent,
                seal_of=self.work.seal_of,
                ahead_chunks=self.ahead_chunks(),
            )
        return lane

    def ahead_chunks(self) -> int:
        """How many contributions to a reducer may wait there for others."""
        num_others = max(1, sum(member.sends for member in self.plan.members) - 1)
        room_bytes = CONTRIBUTIONS_BYTES_PER_ELEMENT * self.grid.elements // num_others
        return max(LEAST_AHEAD_CHUNKS, room_bytes // self.plan.chunk_bytes)

    def _sent(self, letter: Letter) -> None:
        self.counts.sent_bytes += len(letter.frame)
        self._contributed_at.setdefault(letter.chunk, self._clock.monotonic())
        self._milestones.sent(letter)

    # Tensor work

    def _encode(self, number: int, done: Callable[[Buffer | None], None]) -> None:
        chunk, tensors = self.grid.chunks[number], self.tensors
        assert tensors is not None, "only members with tensors contribute"

        def failed(error: Exception) -> None:
            if isinstance(error, NotFiniteError):
                self._refuse(self.me, str(error))
            else:
                self._break(error)
            done(None)

        self._workers.submit(lambda: self.work.encode(chunk, tensors), done, failed)

    def _reduce(self, action: Reduce) -> None:
        chunk = self.grid.chunks[action.chunk]
        members = self.plan.members
        arrived = self._take_out(action.chunk)
        frames = {members[index].peer: arrived[index] for index in action.contributors if index != self.me}
        weights = {members[index].peer: members[index].weight for index in action.contributors}
        own = None
        if self.me in action.contributors:
            assert self.tensors is not None, "only members with tensors contribute"
            own = Own(peer=self.peer, tensors=self.tensors)
        self._workers.submit(
            lambda: self.work.reduce(chunk, action.generation, self._aggregator, frames, weights, own),
            lambda reduced: self._reduced(action, reduced),
            self._break,
        )

    def _reduced(self, action: Reduce, reduced: Reduced) -> None:
        if self._stopped or self.exchange.generation(action.chunk) != action.generation:
            return
        for peer, reason in reduced.refused.items():
            self._refuse(self.index_by_peer[peer], reason)
        if reduced.frame is None:
            self._carry_out(self.exchange.contributions_refused(action.contributors, action.chunk, action.generation))
            return
        self.averages.put(action.chunk, reduced.frame, reduced.frame_hash)
        self._milestones.reduced()
        self._carry_out(self.exchange.reduced(action.chunk, action.generation))

    def _check_next(self) -> None:
        """Check what has arrived, all that there is at once: under load that saves most of the hand-overs."""
        if self._is_checking or not self._unchecked:
            return
        arrivals, self._unchecked = self._unchecked, []
        self._is_checking = True
        self._workers.submit(lambda: self._check(arrivals), self._checked, self._break)

    def _check(self, arrivals: list[_Arrival]) -> list[tuple[_Arrival, bytes | PeerError]]:
        outcomes: list[tuple[_Arrival, bytes | PeerError]] = []
        for arrival in arrivals:
            reducer = self.plan.members[arrival.sender].peer
            try:
                frame_hash = self.work.check(arrival.chunk, arrival.generation, reducer, arrival.frame, arrival.seal)
            except PeerError as error:
                outcomes.append((arrival, error))
            else:
                outcomes.append((arrival, frame_hash))
        return outcomes

    def _checked(self, outcomes: list[tuple[_Arrival, bytes | PeerError]]) -> None:
        self._is_checking = False
        self._check_next()
        for arrival, outcome in outcomes:
            number, generation = arrival.chunk.index, arrival.generation
            self._in_check.discard((number, generation))
            if self._stopped or not self.exchange.wants_average(arrival.sender, number, generation):
                continue
            if isinstance(outcome, PeerError):
                self._reject_average(arrival.sender, number, str(outcome))
                continue
            self.averages.put(number, arrival.frame, outcome)
            self._carry_out(self.exchange.average_arrived(arrival.sender, number, generation))
            if (lane := self._lanes.get(arrival.sender)) is not None:
                lane.answered(number)

    # Troubles

    def _heard(self, frames: Sequence[Buffer]) -> None:
        self._heard_at = self._clock.monotonic()
        self.counts.received_bytes += sum(map(len, frames))

    def _refuse(self, index: int, reason: str) -> None:
        peer = self.plan.members[index].peer
        if index not in self._offences:
            logger.warning("values of %s are left out of %s: %s", peer, self.key, reason)
            self._offences[index] = shortened(reason)
            self.counts.refused += 1
            self._on_news()

    def _reject_average(self, sender: int, number: int, reason: str) -> None:
        # The chunk stays missing here; if most members miss it, the coordinator has it done again by somebody else.
        self.counts.bad_averages += 1
        peer = self.plan.members[sender].peer
        logger.warning("the average of chunk %d from %s is of no use in %s: %s", number, peer, self.key, reason)

    def _break(self, error: Exception) -> None:
        if not self._stopped:
            self._stopped = True
            logger.error("this peer cannot go on with %s", self.key, exc_info=error)
            self._on_broken(error)


def _fits(codec: Codec, chunk: Chunk, frames: Sequence[Buffer]) -> bool:
    return len(frames) == 1 and codec.fits(len(frames[0]), chunk.elements)
