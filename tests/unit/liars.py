"""Members that lie in audited rounds, each in its own way. Product code has no switch for that: it is replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import numpy as np
from roundlab import Member

from potluck.round.aggregators import Aggregator
from potluck.round.audit.merkle import merkle_root
from potluck.round.audit.seals import Notary, Sealer, sealed_hash
from potluck.round.codecs.memory import Buffer
from potluck.round.member.lane import Letter
from potluck.round.member.reduction import Own, Reduced
from potluck.round.member.tensorwork import SealedWork
from potluck.round.plan.chunks import Chunk
from potluck.round.plan.layout import FlatTensors
from potluck.round.plan.messages import Average, Plan


class LyingWork(SealedWork):
    """Work that its liar has a hand in. Frames are float32."""

    named_for: ClassVar[str]

    def __init__(self, sealer: Sealer, notary: Notary, lies: list[int], most_chunks: int) -> None:
        super().__init__(sealer, notary)
        self.lies = lies
        self.most_chunks = most_chunks
        self._lied_about: set[int] = set()

    def lie(self, chunk: int) -> bool:
        """Whether to lie about this chunk; it is noted."""
        if chunk not in self._lied_about and len(self._lied_about) >= self.most_chunks:
            return False
        self._lied_about.add(chunk)
        self.lies.append(chunk)
        return True


class Liar:
    """A member that lies from now on, and a record of its lies."""

    def __init__(self, member: Member, work: type[LyingWork], most_chunks: int = 1 << 20) -> None:
        self.member = member
        self.lies: list[int] = []  # chunks
        participation: Any = member.averager._participation
        run = member.peer.session.subjects.run

        def lying_work(plan: Plan) -> SealedWork:
            return work(Sealer(member.peer.identity, run, plan.key), Notary(run, plan.key), self.lies, most_chunks)

        self._honest = participation._work
        participation._work = lying_work
        self._participation = participation

    def repent(self) -> None:
        """Lie no more."""
        self._participation._work = self._honest


class Altering(LyingWork):
    """A reducer that gives out something else than the average."""

    named_for = "is not that of its inputs"

    def reduce(
        self,
        chunk: Chunk,
        generation: int,
        aggregator: Aggregator,
        frames: Mapping[str, Buffer],
        weights: Mapping[str, float],
        own: Own | None,
    ) -> Reduced:
        reduced = super().reduce(chunk, generation, aggregator, frames, weights, own)
        if reduced.frame is None or not self.lie(chunk.index):
            return reduced
        frame = altered(reduced.frame)
        frame_hash = sealed_hash(frame)
        self.average_seals[chunk.index, generation] = self._sealer.seal_average(chunk.index, generation, frame_hash)
        return replace(reduced, frame=frame, frame_hash=frame_hash)


class Censoring(LyingWork):
    """A reducer that leaves a member out."""

    named_for = "which it had to wait for"

    def reduce(
        self,
        chunk: Chunk,
        generation: int,
        aggregator: Aggregator,
        frames: Mapping[str, Buffer],
        weights: Mapping[str, float],
        own: Own | None,
    ) -> Reduced:
        victim = min(frames)
        if self.lie(chunk.index):
            frames = {peer: frame for peer, frame in frames.items() if peer != victim}
        return super().reduce(chunk, generation, aggregator, frames, weights, own)


class Forging(LyingWork):
    """A reducer that says others sent what it made up."""

    named_for = "has no good seal"

    def reduce(
        self,
        chunk: Chunk,
        generation: int,
        aggregator: Aggregator,
        frames: Mapping[str, Buffer],
        weights: Mapping[str, float],
        own: Own | None,
    ) -> Reduced:
        victim = min(frames)
        if not self.lie(chunk.index):
            return super().reduce(chunk, generation, aggregator, frames, weights, own)
        honest = self._notary.is_contribution
        self._notary.is_contribution = lambda *_: True  # type: ignore[method-assign]
        try:
            frames = {**frames, victim: altered(frames[victim])}
            return super().reduce(chunk, generation, aggregator, frames, weights, own)
        finally:
            self._notary.is_contribution = honest  # type: ignore[method-assign]


class Mismatched(LyingWork):
    """A member that sends, seals and commits to one thing, and has another when it is asked."""

    named_for = "does not match the hash that it committed to"

    def encode(self, chunk: Chunk, tensors: FlatTensors) -> Buffer:
        frame = super().encode(chunk, tensors)
        if self.lie(chunk.index):
            frame = altered(frame)
            self._contribute(chunk.index, frame)
        return frame


class TwoFaced(LyingWork):
    """A member that sends and seals one thing, and commits to another, which it can show."""

    named_for = "other values"

    def encode(self, chunk: Chunk, tensors: FlatTensors) -> Buffer:
        frame = super().encode(chunk, tensors)
        if self.lie(chunk.index):
            self._true = {**getattr(self, "_true", {}), chunk.index: sealed_hash(frame)}
            frame = altered(frame)
            self._contribute(chunk.index, frame)
        return frame

    def commit(self, num_chunks: int) -> str:
        super().commit(num_chunks)
        for chunk, frame_hash in getattr(self, "_true", {}).items():
            self.committed[chunk] = frame_hash
        return merkle_root(self.committed).hex()


class Unshown(LyingWork):
    """A member that commits to something that it cannot show."""

    named_for = "not what it committed to"

    def commit(self, num_chunks: int) -> str:
        super().commit(num_chunks)
        self.lie(0)
        return merkle_root([sealed_hash(frame_hash) for frame_hash in self.committed]).hex()


class BadlySealed(LyingWork):
    """A member that does not seal what it sends."""

    named_for = "do not match its seal"

    def seal_of(self, letter: Letter) -> bytes:
        self.lie(letter.chunk)
        return bytes(64)


class Deluded(LyingWork):
    """A member that says that it got something else than it did."""

    named_for = "never sealed"

    def check(self, chunk: Chunk, generation: int, reducer: str, frame: Buffer, seal: bytes) -> bytes:
        frame_hash = super().check(chunk, generation, reducer, frame, seal)
        self.lie(chunk.index)
        return sealed_hash(frame_hash)


def partial_to(reducer: Member, victim: Member, lies: list[int], *, seals: bool = True) -> None:
    """A reducer that sends other averages to one member than to the rest, sealed or not."""
    identity, run = reducer.peer.identity, reducer.peer.session.subjects.run
    links: Any = reducer.peer.links
    queue_to = links.queue_to

    class LyingQueue:
        def __init__(self, queue: Any) -> None:
            self._queue = queue

        def __getattr__(self, name: str) -> Any:
            return getattr(self._queue, name)

        async def send(self, message: Any, frames: Sequence[Buffer] = (), **options: Any) -> Any:
            if isinstance(message, Average):
                frames = [altered(frames[0])]
                sealer = Sealer(identity, run, message.key)
                seal = sealer.seal_average(message.chunk, message.generation, sealed_hash(frames[0]))
                message = msgspec.structs.replace(message, seal=seal if seals else bytes(64))
                lies.append(message.chunk)
            return await self._queue.send(message, frames, **options)

    links.queue_to = lambda peer: LyingQueue(queue_to(peer)) if peer == victim.id else queue_to(peer)


def altered(frame: Buffer) -> bytes:
    """Other float32 values: the sign flipped, and a hundred times as large."""
    values = np.frombuffer(frame, dtype=np.float32)
    return (values * np.float32(-100.0)).astype(np.float32).tobytes()


LIES = (Altering, Censoring, Forging, Mismatched, TwoFaced, Unshown)
