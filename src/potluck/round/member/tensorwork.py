"""What a member's workers do in a round: encode its values, reduce a chunk, check an average that came.

A plain round needs nothing else. In a round that will be audited (`SealedWork`), frames are hashed so that nobody can
make two with the same hash, sealed by the sender, and checked against the seal by the receiver. What is
needed to testify is kept: hashes and seals, never frames. A contribution is encoded again when it is asked for; the
tensors do not change before the commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash

from potluck.errors import NotFiniteError
from potluck.round.aggregators import Aggregator
from potluck.round.audit.merkle import NOTHING, merkle_root
from potluck.round.audit.seals import Notary, Sealer, sealed_hash
from potluck.round.codecs.memory import Buffer
from potluck.round.member.heldaverages import check_average
from potluck.round.member.lane import Letter
from potluck.round.member.reduction import Own, Reduced, encode_values, reduce_chunk
from potluck.round.plan.chunks import Chunk
from potluck.round.plan.layout import FlatTensors

NOT_SEALED = "its values of chunk {} do not match its seal"


class TensorWork:
    """The work of a round that is not audited. `encode`, `reduce` and `check` run in workers."""

    def encode(self, chunk: Chunk, tensors: FlatTensors) -> Buffer:
        """Our values of a chunk, to be sent."""
        return encode_values(chunk, tensors)

    def received(self, chunk: int, peer: str, seal: bytes) -> None:
        """A contribution came with this seal."""

    def reduce(
        self,
        chunk: Chunk,
        generation: int,
        aggregator: Aggregator,
        frames: Mapping[str, Buffer],
        weights: Mapping[str, float],
        own: Own | None,
    ) -> Reduced:
        """The average of the others' frames and of our own values, encoded."""
        return reduce_chunk(chunk, aggregator, frames, weights, own)

    def check(self, chunk: Chunk, generation: int, reducer: str, frame: Buffer, seal: bytes) -> bytes:
        """The hash of an average that came; ProtocolError or NotFiniteError where it is of no use."""
        return check_average(chunk, frame)

    def seal_of(self, letter: Letter) -> bytes:
        """What goes with a letter."""
        return b""

    def digest(self, hashes: Sequence[bytes]) -> str:
        """What tells these averages from any others: a hash over their hashes, in order."""
        return xxhash.xxh3_128_hexdigest(b"".join(hashes))

    def commit(self, num_chunks: int) -> str:
        """Bind this member to what it has contributed; to nothing where nobody will ask."""
        return ""


@dataclass(frozen=True, slots=True)
class SealedInput:
    """A contribution as a reducer got it."""

    frame_hash: bytes
    seal: bytes


class SealedWork(TensorWork):
    """The work of a round that is audited before its commit."""

    def __init__(self, sealer: Sealer, notary: Notary) -> None:
        self.committed: list[bytes] = []  # our contributions' hashes by chunk, as we are bound to them
        # By chunk and generation, since work on an older generation may end late:
        self.inputs: dict[tuple[int, int], dict[str, SealedInput]] = {}  # what we reduced, by sender
        self.average_seals: dict[tuple[int, int], bytes] = {}  # ours and those that came
        self._sealer = sealer
        self._notary = notary
        self._contributed: dict[int, bytes] = {}
        self._contribution_seals: dict[int, bytes] = {}
        self._received: dict[tuple[int, str], bytes] = {}

    def encode(self, chunk: Chunk, tensors: FlatTensors) -> Buffer:
        """Our values of a chunk, sealed."""
        frame = encode_values(chunk, tensors)
        self._contribute(chunk.index, frame)
        return frame

    def received(self, chunk: int, peer: str, seal: bytes) -> None:
        """A contribution came with this seal."""
        self._received[chunk, peer] = seal

    def reduce(
        self,
        chunk: Chunk,
        generation: int,
        aggregator: Aggregator,
        frames: Mapping[str, Buffer],
        weights: Mapping[str, float],
        own: Own | None,
    ) -> Reduced:
        """As ever, but only of frames whose seals are good; and the average is sealed."""
        refused: dict[str, str] = {}
        taken: dict[str, Buffer] = {}
        inputs: dict[str, SealedInput] = {}
        for peer, frame in frames.items():
            entry = SealedInput(sealed_hash(frame), self._received.get((chunk.index, peer), b""))
            if self._notary.is_contribution(peer, chunk.index, entry.frame_hash, entry.seal):
                taken[peer], inputs[peer] = frame, entry
            else:
                refused[peer] = NOT_SEALED.format(chunk.index)
        if own is not None:
            try:
                taken[own.peer] = frame = encode_values(chunk, own.tensors)
                inputs[own.peer] = self._contribute(chunk.index, frame)
            except NotFiniteError as error:
                refused[own.peer] = str(error)
        if not taken:
            return Reduced(refused=refused)
        reduced = reduce_chunk(chunk, aggregator, taken, weights, None)
        refused |= reduced.refused
        if reduced.frame is None:
            return replace(reduced, refused=refused)
        frame_hash = sealed_hash(reduced.frame)
        self.inputs[chunk.index, generation] = inputs
        self.average_seals[chunk.index, generation] = self._sealer.seal_average(chunk.index, generation, frame_hash)
        return replace(reduced, frame_hash=frame_hash, refused=refused)

    def check(self, chunk: Chunk, generation: int, reducer: str, frame: Buffer, seal: bytes) -> bytes:
        """The hash of an average whose seal is good."""
        chunk.reply.check(frame, chunk.elements)
        frame_hash = sealed_hash(frame)
        self._notary.require_average(reducer, chunk.index, generation, frame_hash, seal)
        self.average_seals[chunk.index, generation] = seal
        return frame_hash

    def seal_of(self, letter: Letter) -> bytes:
        """The receiver of the letter can prove that we sent it."""
        if letter.is_average:
            return self.average_seals[letter.chunk, letter.generation]
        return self._contribution_seals[letter.chunk]

    def digest(self, hashes: Sequence[bytes]) -> str:
        """A root under which each of these averages can be shown."""
        return merkle_root(hashes).hex()

    def commit(self, num_chunks: int) -> str:
        """A root under which each of our contributions can be shown; one that is sent later is not among them."""
        self.committed = [self._contributed.get(chunk, NOTHING) for chunk in range(num_chunks)]
        return merkle_root(self.committed).hex()

    def _contribute(self, chunk: int, frame: Buffer) -> SealedInput:
        frame_hash = sealed_hash(frame)
        seal = self._sealer.seal_contribution(chunk, frame_hash)
        self._contributed[chunk], self._contribution_seals[chunk] = frame_hash, seal
        return SealedInput(frame_hash, seal)
