"""When members hold different averages (pure): who gave somebody something else than the others?

Every average comes sealed by its reducer. So of two members that hold different ones, each can show that the reducer
gave it what it holds; if both can, the reducer lied to one of them. A member without
this proof holds values that nobody gave it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from potluck.round.audit.merkle import HASH_BYTES, merkle_root
from potluck.round.audit.seals import SEAL_BYTES, Notary
from potluck.round.codecs.memory import Buffer
from potluck.round.plan.messages import Plan

UNPROVEN = "the averages that it shows are not those of the digest that it reported"


@dataclass(frozen=True, slots=True)
class Holding:
    """What one member holds: hashes and seals by chunk, shown to be what it reported."""

    member: int
    hashes: tuple[bytes, ...]
    seals: tuple[bytes, ...]


def read_holding(plan: Plan, member: int, digest: str, frames: Sequence[Buffer]) -> Holding | None:
    """What a member's answer shows; None if that is not what it had reported."""
    count = plan.num_chunks
    if [len(frame) for frame in frames] != [count * HASH_BYTES, count * SEAL_BYTES]:
        return None
    hashes = tuple(_cut(frames[0], HASH_BYTES))
    return Holding(member, hashes, tuple(_cut(frames[1], SEAL_BYTES))) if merkle_root(hashes).hex() == digest else None


def settle(plan: Plan, notary: Notary, one: Holding, other: Holding) -> dict[int, str]:
    """Who lied, given two members that hold different averages."""
    liars: dict[int, str] = {}
    parts = [part for part in plan.parts for _ in range(part.start, part.stop)]  # by chunk
    for chunk, (first, second) in enumerate(zip(one.hashes, other.hashes, strict=True)):
        reducer, generation = parts[chunk].reducer, parts[chunk].generation
        if first == second or reducer in liars:
            continue
        name = plan.members[reducer].peer
        unproven = [
            holding.member
            for holding in (one, other)
            if holding.member != reducer  # it holds what it made: no seal is needed
            and not notary.is_average(name, chunk, generation, holding.hashes[chunk], holding.seals[chunk])
        ]
        for member in unproven:
            liars.setdefault(member, f"it holds an average of chunk {chunk} that the reducer never sealed")
        if not unproven:
            liars[reducer] = f"it gave out two different averages of chunk {chunk}"
    return liars


def _cut(frame: Buffer, size: int) -> Iterator[bytes]:
    data = bytes(frame)
    for start in range(0, len(data), size):
        yield data[start : start + size]
