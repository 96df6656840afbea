"""Memory for chunks: taken, shared between snapshots, and used again.

A new snapshot of a large model every few seconds would otherwise ask the system for fresh pages each time, and the
training thread would wait while they are cleared. Chunks are counted: a chunk that two snapshots have in common is held
once, and its memory is free again when both are gone.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from potluck.state.inventory import CHUNK_BYTES


class Chunk:
    """A run of bytes, with its hash once that is known. Its content does not change while anybody holds it."""

    __slots__ = ("data", "hash", "holders")

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.hash = b""
        self.holders = 1

    def view(self) -> memoryview:
        """Its bytes; nobody may use the view after the last holder has let go."""
        return self.data.numpy().data


class ChunkPool:
    """The chunks of one process; safe to use from any thread."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes = chunk_bytes
        self._free: list[Tensor] = []
        self._num_used = 0
        self._peak_used = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Chunk:
        """A chunk with one holder and with arbitrary content."""
        assert 0 < num_bytes <= self.chunk_bytes, f"a chunk of {num_bytes} bytes"
        with self._lock:
            self._num_used += 1
            self._peak_used = max(self._peak_used, self._num_used)
            buffer = self._free.pop() if self._free else None
        if buffer is None:
            buffer = torch.empty(self.chunk_bytes, dtype=torch.uint8)
        return Chunk(buffer[:num_bytes])

    def share(self, chunk: Chunk) -> Chunk:
        """The same chunk, with one more holder. The caller knows that it has one already."""
        with self._lock:
            assert chunk.holders > 0, "a chunk is shared that nobody holds"
            chunk.holders += 1
        return chunk

    def drop(self, chunk: Chunk) -> None:
        """One holder lets go."""
        with self._lock:
            chunk.holders -= 1
            assert chunk.holders >= 0, "a chunk was dropped once too often"
            if chunk.holders:
                return
            self._num_used -= 1
            # What was in use at once will be so again; beyond that, memory goes back to the system.
            if self._num_used + len(self._free) < self._peak_used:
                self._free.append(chunk.data._base if chunk.data._base is not None else chunk.data)

    def trim(self) -> None:
        """Give memory that is not in use back to the system, and forget how much was in use before."""
        with self._lock:
            self._free.clear()
            self._peak_used = self._num_used

    def statistics(self) -> dict[str, int]:
        """How much there is."""
        with self._lock:
            return {
                "chunk_bytes_used": self._num_used * self.chunk_bytes,
                "chunk_bytes_free": len(self._free) * self.chunk_bytes,
            }
