"""A state that is being put together: from what is here already, and from what keepers send."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from potluck.errors import ProtocolError
from potluck.state.chunklog import ChunkLog
from potluck.state.chunkpool import Chunk, ChunkPool
from potluck.state.inventory import Inventory
from potluck.state.packing import unpack
from potluck.state.snapshot import Snapshot


class Assembly:
    """Chunks by content. Chunks of the same content, such as zeros, are wanted once."""

    def __init__(self, pool: ChunkPool, log: ChunkLog | None = None) -> None:
        self._pool = pool
        self._log = log
        self._inventory: Inventory | None = None
        self._chunks: dict[bytes, Chunk] = {}  # each held by us
        self._wanted: dict[bytes, list[int]] = {}
        self._held_bytes = 0

    @property
    def _goal(self) -> Inventory:
        assert self._inventory is not None, "it is not known yet what to put together"
        return self._inventory

    def begin(self, inventory: Inventory, bases: Iterable[Snapshot]) -> list[int]:
        """Aim at this state, with all that is here; returns the chunks that are missing. Not for the event loop.

        What was put together for another state before is used as far as it fits, and let go otherwise.
        """
        self._inventory = inventory
        self._wanted = {}
        for number in range(inventory.num_chunks):
            self._wanted.setdefault(inventory.hash_of(number), []).append(number)
        for chunk_hash in [chunk_hash for chunk_hash in self._chunks if chunk_hash not in self._wanted]:
            self._pool.drop(self._chunks.pop(chunk_hash))
        for chunk in (chunk for base in bases for chunk in base.by_hash().values()):
            if chunk.hash in self._wanted and chunk.hash not in self._chunks:
                self._chunks[chunk.hash] = self._pool.share(chunk)
        if self._log is not None:
            self._read_log(self._log)
        self._held_bytes = sum(map(self._bytes_of, self._chunks))
        return [numbers[0] for chunk_hash, numbers in self._wanted.items() if chunk_hash not in self._chunks]

    def _read_log(self, log: ChunkLog) -> None:
        lacking = self._wanted.keys() - self._chunks.keys()
        for chunk_hash, data in log.read(lacking):
            if chunk_hash not in self._chunks:
                self._chunks[chunk_hash] = self._made(chunk_hash, memoryview(data))
        if log.num_bytes > 2 * self._goal.num_bytes:  # mostly of states that nobody wants any more
            log.start_anew()

    def check_packed(self, number: int, packed: memoryview) -> Chunk | None:
        """As `check`, of data that was packed for the way."""
        try:
            data = unpack(packed, self._goal.bytes_of(number))
        except ProtocolError:
            return None
        return self.check(number, data)

    def check(self, number: int, data: memoryview) -> Chunk | None:
        """The chunk, copied, if the data is what the inventory says. For a worker; hand the chunk to `add`."""
        chunk_hash = self._goal.hash_of(number)
        if hashlib.sha256(data).digest() != chunk_hash:
            return None
        chunk = self._made(chunk_hash, data)
        if self._log is not None:
            self._log.append(chunk_hash, data)
        return chunk

    def add(self, chunk: Chunk) -> None:
        """A chunk that was checked."""
        if chunk.hash in self._wanted and chunk.hash not in self._chunks:
            self._chunks[chunk.hash] = chunk
            self._held_bytes += self._bytes_of(chunk.hash)
        else:
            self._pool.drop(chunk)

    def discard(self, chunk: Chunk) -> None:
        """A chunk that was checked too late."""
        self._pool.drop(chunk)

    @property
    def held_bytes(self) -> int:
        """How much of the state is here."""
        return self._held_bytes

    def _bytes_of(self, chunk_hash: bytes) -> int:
        return sum(self._goal.bytes_of(number) for number in self._wanted[chunk_hash])

    def finish(self) -> Snapshot:
        """The state, complete."""
        assert self._chunks.keys() == self._wanted.keys(), "a state is finished that is not complete"
        inventory = self._goal
        chunks = list(self._shared(inventory))
        self.close()
        if self._log is not None:
            self._log.start_anew()
        return Snapshot(inventory, chunks, self._pool)

    def _shared(self, inventory: Inventory) -> Iterator[Chunk]:
        for number in range(inventory.num_chunks):
            yield self._pool.share(self._chunks[inventory.hash_of(number)])

    def close(self) -> None:
        """Let go of all chunks; what is on disk stays. Idempotent."""
        chunks, self._chunks = self._chunks, {}
        for chunk in chunks.values():
            self._pool.drop(chunk)
        if self._log is not None:
            self._log.close()

    def _made(self, chunk_hash: bytes, data: memoryview) -> Chunk:
        chunk = self._pool.take(len(data))
        np.copyto(chunk.data.numpy(), np.frombuffer(data, dtype=np.uint8))
        chunk.hash = chunk_hash
        return chunk
