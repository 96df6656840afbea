"""The averages of a round as one member holds them: encoded, hashed, and not yet used.

They stay encoded until the commit, since until then they may still have to be thrown away. Each frame was decoded once
for a check when it came in, so that nothing can go wrong when the caller's tensors are finally written.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from potluck import tasks
from potluck.round.codecs import EncodedChunk
from potluck.round.codecs.memory import Buffer
from potluck.round.member.workers import Workers
from potluck.round.plan.chunks import Chunk, ChunkGrid
from potluck.round.plan.layout import FlatTensors


class HeldAverages:
    """Encoded averages by chunk."""

    def __init__(self, grid: ChunkGrid) -> None:
        self.grid = grid
        self._frames: list[Buffer | None] = [None] * len(grid)
        self._hashes: list[bytes] = [b""] * len(grid)

    def put(self, chunk: int, frame: Buffer, frame_hash: bytes) -> None:
        """Keep a frame."""
        self._frames[chunk] = frame
        self._hashes[chunk] = frame_hash

    def discard(self, chunk: int) -> None:
        """Let go of a frame, if it is there."""
        self._frames[chunk] = None
        self._hashes[chunk] = b""

    def frame(self, chunk: int) -> Buffer:
        """A frame that is here."""
        frame = self._frames[chunk]
        assert frame is not None, f"the average of chunk {chunk} is not here"
        return frame

    @property
    def hashes(self) -> list[bytes]:
        """The frames' hashes in order, once all are here."""
        assert all(self._hashes), "averages are missing"
        return self._hashes

    def _pieces(self, num_pieces: int) -> Iterator[range]:
        """The chunks in nearly equal runs, for as many threads."""
        for piece in range(num_pieces):
            yield range(len(self.grid) * piece // num_pieces, len(self.grid) * (piece + 1) // num_pieces)

    async def write(self, tensors: FlatTensors, workers: Workers) -> None:
        """Decode all chunks into the tensors: who is cancelled meanwhile finds all of them written, not some."""
        await tasks.finish(
            workers.run(lambda chunks=chunks: self._decode(chunks, tensors))  # type: ignore[misc]
            for chunks in self._pieces(workers.num_threads)
        )

    def _decode(self, chunks: range, tensors: FlatTensors) -> None:
        for index in chunks:
            chunk = self.grid.chunks[index]
            tensors.write_encoded(chunk.start, chunk.stop, EncodedChunk(chunk.reply, self.frame(index)))


def check_average(chunk: Chunk, frame: Buffer) -> bytes:
    """The hash of an average that arrived; ProtocolError or NotFiniteError where it could not be decoded."""
    chunk.reply.check(frame, chunk.elements)
    return hash_of(frame)


def hash_of(frame: Buffer) -> bytes:
    """What a frame is compared by."""
    return xxhash.xxh3_128_digest(frame)
