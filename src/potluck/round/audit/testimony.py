"""The messages of an audit, and what a witness's answer amounts to (pure).

The coordinator asks about one chunk at a time (`Challenge`), and every member that has to do with it answers
(`Testimony`): which average it holds, shown under the digest that it reported; its own contribution, as a frame, shown
under the commitment that it reported; and the chunk's reducer also who contributed what, with the senders' seals.
`examine` turns that into facts (`WitnessAccount`), or into the fault that convicts the witness itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from potluck.messages import Message
from potluck.round.audit.merkle import HASH_BYTES, MAX_PATH, NOTHING, is_under
from potluck.round.audit.seals import Notary, sealed_hash
from potluck.round.codecs.memory import Buffer
from potluck.round.plan.messages import MAX_MEMBERS, ChunkNumber, Count, Index, Plan, Report, RoundKey, Seal

Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Path = Annotated[tuple[Hash, ...], msgspec.Meta(max_length=MAX_PATH)]


class Challenge(Message, frozen=True, kw_only=True, tag="round.challenge"):
    """The coordinator asks a member what it knows of a chunk."""

    key: RoundKey
    chunk: ChunkNumber
    generation: Count


class Input(Message, frozen=True, kw_only=True, array_like=True):
    """One contribution that a reducer used."""

    member: Index
    frame_hash: Hash
    seal: Seal


class Testimony(Message, frozen=True, kw_only=True, tag="round.testimony"):
    """A member's answer; with its contribution as a frame, if it made one."""

    average: Hash
    average_path: Path
    contribution: Hash  # zeros: none
    contribution_path: Path
    inputs: Annotated[tuple[Input, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()  # from the chunk's reducer


class HoldingsRequest(Message, frozen=True, kw_only=True, tag="round.inventory"):
    """The coordinator asks a member for all that it holds, since members hold different averages."""

    key: RoundKey


class Holdings(Message, frozen=True, kw_only=True, tag="round.holdings"):
    """The answer; with two frames: the averages' hashes in order, and the reducers' seals for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessAccount:
    """What a witness has shown."""

    average: bytes
    """The hash of the average that it holds."""

    contribution: bytes = b""
    """The hash of its contribution, which came along; empty if it made none."""

    inputs: Mapping[int, bytes] | None = None
    """Hashes of the contributions that it used, by member, all with good seals; None if it is not the reducer."""


@dataclass(frozen=True, slots=True)
class FalseTestimony:
    """A witness's answer that speaks against itself."""

    reason: str


def examine(
    plan: Plan,
    notary: Notary,
    challenge: Challenge,
    witness: int,
    report: Report,
    testimony: Testimony,
    frames: Sequence[Buffer],
) -> WitnessAccount | FalseTestimony:
    """What the answer of a member amounts to, given what it had reported before it knew the question."""
    chunk = challenge.chunk
    if not _is_shown(report.digest, plan, chunk, testimony.average, testimony.average_path):
        return FalseTestimony(f"the average of chunk {chunk} that it shows is not in the digest that it reported")
    if not _is_shown(report.commitment, plan, chunk, testimony.contribution, testimony.contribution_path):
        return FalseTestimony(f"the contribution to chunk {chunk} that it shows is not what it committed to")
    contribution = b""
    if testimony.contribution != NOTHING:
        contribution = testimony.contribution
        if len(frames) != 1 or sealed_hash(frames[0]) != contribution:
            return FalseTestimony(f"its contribution to chunk {chunk} does not match the hash that it committed to")
    if reducer_of(plan, chunk) != witness:
        return WitnessAccount(average=testimony.average, contribution=contribution)
    inputs: dict[int, bytes] = {}
    for given in testimony.inputs:
        if given.member >= len(plan.members) or not plan.members[given.member].weight > 0 or given.member in inputs:
            return FalseTestimony(f"it says that chunk {chunk} has a contribution of somebody who made none")
        sender = plan.members[given.member].peer
        if not notary.is_contribution(sender, chunk, given.frame_hash, given.seal):
            return FalseTestimony(f"it says that {sender} contributed to chunk {chunk}, and has no good seal for that")
        inputs[given.member] = given.frame_hash
    return WitnessAccount(average=testimony.average, contribution=contribution, inputs=inputs)


def reducer_of(plan: Plan, chunk: int) -> int:
    """Who averages a chunk."""
    return next(part.reducer for part in plan.parts if part.start <= chunk < part.stop)


def _is_shown(root: str, plan: Plan, chunk: int, leaf: bytes, path: Sequence[bytes]) -> bool:
    try:
        expected = bytes.fromhex(root)
    except ValueError:
        return False
    return is_under(expected, plan.num_chunks, chunk, leaf, path)
