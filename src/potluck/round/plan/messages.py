"""The messages of a round: who is ready, the plan, what each member reports, and the commit.

A plan is revised, never patched: when somebody has to be left out, the coordinator publishes the whole plan again
with a higher revision, and a member that missed one in between loses nothing. Chunks whose reducer changed have a
higher *generation*, and bytes of an older generation are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from potluck.messages import Message
from potluck.round.plan.specs import DEFAULT_CHUNK_BYTES, MAX_CHUNKS, AggregatorSpec, CodecSpan, StartSpec

MAX_MEMBERS = 256
MEAN = AggregatorSpec(name="mean")

MAX_REASON_CHARACTERS = 300

Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
ChunkNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_CHUNKS)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Weight = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
Phases = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
Name = Annotated[str, msgspec.Meta(max_length=128)]  # a peer, a session, a digest
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARACTERS)]
Seal = Annotated[bytes, msgspec.Meta(max_length=64)]


class RoundKey(Message, frozen=True, kw_only=True, order=True, array_like=True):
    """One attempt at one epoch, under one lease. A later attempt is larger."""

    epoch: Count  # the one that this round would make
    token: Count  # of the coordinator's lease
    attempt: Count  # of this coordinator at this epoch

    def __str__(self) -> str:
        return f"epoch {self.epoch} (attempt {self.token}.{self.attempt})"


class Participant(Message, frozen=True, kw_only=True):
    """One peer in a plan, and what is still expected of it."""

    peer: Name
    session: Name
    weight: Weight = 0.0  # of its contribution: samples
    claimed: Weight = 0.0  # what it said, where less than that counts; 0: all of it does
    phases: Phases = 0.0  # of paths, that its contribution stands for (paths/)
    sends: bool = True  # contributes tensors
    reduces: bool = True  # may be given parts
    receives: bool = True  # gets the averages; False once it is out of the round
    trouble: Reason = ""  # why less is expected of it than at first


class Part(Message, frozen=True, kw_only=True):
    """A run of chunks that one member averages."""

    reducer: Index
    start: ChunkNumber
    stop: ChunkNumber
    generation: Count = 0


class Plan(Message, frozen=True, kw_only=True, tag="plan"):
    """Who takes part in a round and who reduces what."""

    key: RoundKey
    revision: Count = 0
    members: tuple[Participant, ...]
    parts: tuple[Part, ...]  # in order, without gaps: together they are all chunks
    layout: Name  # digest of the tensors' names, shapes and codecs; who holds others cannot take part
    runs: tuple[CodecSpan, ...] = ()  # with `chunk_bytes`, how the flattened tensors are cut and encoded
    chunk_bytes: Count = DEFAULT_CHUNK_BYTES
    aggregator: AggregatorSpec = MEAN
    deadline: float  # hub time
    audit: bool = False  # members seal what they send and commit to it, and a part is recomputed before the commit
    left_out: dict[Name, Reason] = {}  # peers that were ready and could not be taken, and why

    def __post_init__(self) -> None:
        if not 1 <= len(self.members) <= MAX_MEMBERS:
            raise ValueError(f"a plan has 1 to {MAX_MEMBERS} members, not {len(self.members)}")
        if len({member.peer for member in self.members}) != len(self.members):
            raise ValueError("a peer stands in the plan twice")
        if any(member.sends and not member.weight > 0 for member in self.members):
            raise ValueError("a member contributes with no weight")
        position = 0
        for part in self.parts:
            if part.start != position or part.stop <= part.start or part.reducer >= len(self.members):
                raise ValueError(f"part {part.start} to {part.stop} does not continue at chunk {position}")
            position = part.stop
        if position > MAX_CHUNKS:
            raise ValueError(f"a plan has at most {MAX_CHUNKS} chunks, not {position}")

    @property
    def num_chunks(self) -> int:
        """How many chunks there are in all."""
        return self.parts[-1].stop if self.parts else 0

    def index_of(self, peer: str) -> int | None:
        """The place of a peer among the members."""
        return next((index for index, member in enumerate(self.members) if member.peer == peer), None)


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """The coordinator gives a round up."""

    key: RoundKey
    reason: str


class Completed(Message, frozen=True, kw_only=True):
    """A round that a member has all averages of, though no commit was seen yet."""

    coordinator: Name
    plan: bytes  # as that coordinator signed it
    digest: Name


class Ready(Message, frozen=True, kw_only=True):
    """A peer holds tensors for the next epoch; published until it is in a plan that gets committed."""

    session: Name
    epoch: Count  # the one it would help to make
    weight: Weight = 0.0
    sends: bool = True
    reduces: bool = True  # may be given parts, if there is somebody to give them to otherwise
    layout: Name = ""
    runs: tuple[CodecSpan, ...] = ()
    start: StartSpec | None = None  # as it would have rounds start; None: it leaves that to the coordinator
    token: Count = 0  # of the newest lease it knows: an earlier word means nothing to that coordinator
    awaits: Weight = 0.0  # it stands by: ready as soon as all who are have so much weight together
    until: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0  # hub time after which no plan may have it; 0: it waits on
    phases: Phases = 0.0  # of paths, that its contribution stands for (paths/)
    withdrawn: bool = False  # it no longer waits for this epoch
    completed: Completed | None = None  # so that a new coordinator can commit what the old one could not


class Contribution(Message, frozen=True, kw_only=True, array_like=True, tag="round.contribution"):
    """To a reducer, with one frame: the sender's values of a chunk."""

    key: RoundKey
    chunk: ChunkNumber
    generation: Count
    seal: Seal = b""  # the sender's signature of the frame, where the round is audited


class Average(Message, frozen=True, kw_only=True, array_like=True, tag="round.average"):
    """From a reducer, with one frame: the average of a chunk, the same bytes for everybody."""

    key: RoundKey
    chunk: ChunkNumber
    generation: Count
    seal: Seal = b""


class Offence(Message, frozen=True, kw_only=True):
    """A reducer could not use what a member sent."""

    member: Index
    reason: Reason


class Report(Message, frozen=True, kw_only=True, tag="round.report"):
    """A member's state in a round, told to the coordinator when it changes and while it waits."""

    key: RoundKey
    number: Count = 0  # grows with each report: they may come by link and by hub, and the newest counts
    revision: Count
    held: bytes = b""  # bitmap of the chunks whose averages it holds, chunk 0 in the lowest bit of the first byte
    waiting_for: tuple[Index, ...] = ()  # senders whose contributions it, as a reducer, lacks
    missing_from: tuple[Index, ...] = ()  # reducers whose averages it lacks
    idle_seconds: Seconds = 0.0  # since anything last arrived
    digest: Name = ""  # of all averages, once it holds them
    commitment: Name = ""  # of all that it contributed, where the round is audited
    offences: tuple[Offence, ...] = ()
    sent_bytes: Count = 0
    received_bytes: Count = 0


class CommittedMember(Message, frozen=True, kw_only=True):
    """One peer in a commit."""

    peer: Name
    weight: Weight
    claimed: Weight = 0.0  # what it said, where less than that counted; 0: all of it did
    phases: Phases = 0.0  # of paths, that its contribution stands for (paths/)
    holds: bool  # has the averages; otherwise it must fetch the state
    seconds: Seconds = 0.0  # from the plan until it had them
    sent_bytes: Count = 0
    received_bytes: Count = 0
    trouble: Reason = ""  # why less was expected of it than at first, though it holds them; else see `left_out`


class Exclusion(Message, frozen=True, kw_only=True):
    """An audit found that a peer lied, or would not testify: it takes part in no round for a while."""

    until: float  # hub time
    reason: Reason
    since: float = 0.0  # hub time at which it was found out; an organiser's pardon from then or later lifts it


class Restoration(Message, frozen=True, kw_only=True):
    """An epoch in which nothing was averaged: its state is that of an earlier one, as an organiser ordered."""

    order: Count  # its number
    epoch: Count  # the one that the run goes back to
    digest: Name  # of that state
    cut: Count = 0  # whose part it is, where all groups go back; such orders are counted apart

    def describe(self) -> str:
        """For a person who was at work on something else."""
        if self.cut:
            return f"all groups go back to cut {self.cut}: this one to the state of epoch {self.epoch}"
        return f"an organiser had the run go back to the state of epoch {self.epoch}"


class Commit(Message, frozen=True, kw_only=True):
    """An epoch that is final: the `head` of the lineage store."""

    epoch: Count
    key: RoundKey  # of the round that made the averages
    term: Count  # the token of the lease under which it was committed; larger than the key's if it was taken over
    coordinator: Name
    members: tuple[CommittedMember, ...]
    digest: Name
    parent: Name  # digest of the commit before
    layout: Name
    runs: tuple[CodecSpan, ...] = ()  # how the averages were encoded …
    chunk_bytes: Count = 0  # … and cut
    aggregator: AggregatorSpec = MEAN
    committed_at: float = 0.0  # hub time
    seconds: Seconds = 0.0  # from plan to commit
    revisions: Count = 0  # how often the plan had to be repaired
    left_out: dict[Name, Reason] = {}  # peers without the averages, and why
    audited: Count = 0  # chunks that the coordinator recomputed
    excluded: dict[Name, Exclusion] = {}  # by audits; each commit carries on those of the one before
    restored: Restoration | None = None
    num_restored: Count = 0  # orders to go back that are carried out; each commit carries on that of the one before
    num_returned: Count = 0  # the same, of orders to all groups to go back to a cut

    @property
    def holders(self) -> tuple[str, ...]:
        """The peers that have the averages."""
        return tuple(member.peer for member in self.members if member.holds)


def shortened(text: str) -> str:
    """A text short enough for a message that goes to everybody."""
    return text if len(text) <= MAX_REASON_CHARACTERS else text[: MAX_REASON_CHARACTERS - 1] + "…"


def bitmap(chunks: Iterable[int]) -> bytes:
    """A set of chunk numbers as bytes."""
    numbers = list(chunks)
    data = bytearray((max(numbers, default=-1) + 8) // 8)
    for number in numbers:
        data[number >> 3] |= 1 << (number & 7)
    return bytes(data)


def from_bitmap(data: bytes, num_chunks: int) -> set[int]:
    """The chunk numbers in a bitmap; those that do not exist are left out."""
    return {chunk for chunk in range(min(num_chunks, 8 * len(data))) if data[chunk >> 3] >> (chunk & 7) & 1}
