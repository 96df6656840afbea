"""A copy of a state at one moment, in content-hashed chunks.

    outline = outline_of(tensors, metadata)      # the training thread: what there is
    staged = outline.copied(tensors, pool)       # a worker (copying.py): one copy into memory that is used again
    snapshot = staged.hashed(previous)           # a worker: hashes, outside the interpreter lock

A snapshot has two digests: that of the inventory, by which it is asked for, and the *common* one, over what all peers
should hold alike, by which it is compared. Where nothing is a peer's own they are the same.

Chunks that are the same as in the previous snapshot are shared with it. A snapshot is held by its users, and its
memory goes back to the pool when the last holder has released it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.errors import ConfigurationError
from potluck.state.chunkpool import Chunk, ChunkPool
from potluck.state.inventory import ITEM_BYTES, MAX_TENSORS, Inventory, Metadata, TensorSpec, cut, encode_metadata

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


class Snapshot:
    """One state, complete. Made with one holder: the maker."""

    def __init__(self, inventory: Inventory, chunks: list[Chunk], pool: ChunkPool) -> None:
        assert len(chunks) == inventory.num_chunks, "a snapshot is complete"
        self.inventory = inventory
        self._chunks = chunks
        self._pool = pool
        self._holders = 1
        self._lock = threading.Lock()
        self.common_digest = inventory.digest if inventory.is_common else self._hash_common()
        """By which the state is compared with those of others."""

    @property
    def digest(self) -> str:
        """By which the state is known."""
        return self.inventory.digest

    def _hash_common(self) -> str:
        inventory, own = self.inventory, frozenset(self.inventory.own)
        hashed = hashlib.sha256(inventory.common_frame())
        for piece in cut(inventory.tensors, inventory.chunk_bytes):
            if piece.tensor not in own:
                hashed.update(self.view(piece.chunk)[piece.chunk_start : piece.chunk_start + piece.num_bytes])
        return hashed.hexdigest()

    @property
    def metadata(self) -> dict[str, Any]:
        """As it was given."""
        return self.inventory.read_metadata()

    def hold(self) -> Snapshot:
        """One more holder."""
        with self._lock:
            assert self._holders > 0, "a snapshot is held that was released"
            self._holders += 1
        return self

    def release(self) -> None:
        """One holder is done with it."""
        with self._lock:
            self._holders -= 1
            assert self._holders >= 0, "a snapshot was released once too often"
            if self._holders:
                return
        chunks, self._chunks = self._chunks, []
        for chunk in chunks:
            self._pool.drop(chunk)

    def view(self, chunk: int) -> memoryview:
        """The bytes of a chunk, for as long as the snapshot is held."""
        return self._chunks[chunk].view()

    def by_hash(self) -> dict[bytes, Chunk]:
        """Its chunks by content; share them through the pool to keep them."""
        return {chunk.hash: chunk for chunk in self._chunks}

    def tensors(self) -> dict[str, Tensor]:
        """Copies of its tensors, on the CPU."""
        return _read(self.inventory.tensors, self._chunks, self._pool.chunk_bytes)

    def write_into(self, tensors: Mapping[str, Tensor], chunks: Collection[int] | None = None) -> None:
        """Put the state into these tensors, in place; with `chunks`, only what lies in those.

        They must be the tensors that the state has. They may be on any device, non-contiguous, and need gradients.
        """
        check_same(self.inventory.tensors, tensors)
        _write(self.inventory.tensors, self._chunks, self.inventory.chunk_bytes, tensors, chunks)


@dataclass(frozen=True, slots=True)
class Outline:
    """What a state consists of, before any of it is copied."""

    specs: tuple[TensorSpec, ...]
    metadata: bytes
    own: tuple[int, ...]

    def copied(self, tensors: Mapping[str, Tensor], pool: ChunkPool) -> Staged:
        """Copy the tensors. When it returns they may change again."""
        total_bytes = sum(spec.num_bytes for spec in self.specs)
        starts = range(0, total_bytes, pool.chunk_bytes)
        chunks = [pool.take(min(pool.chunk_bytes, total_bytes - start)) for start in starts]
        staged = Staged(self.specs, self.metadata, chunks, pool, self.own)
        try:
            source, index = torch.empty(0, dtype=torch.uint8), -1
            for piece in cut(self.specs, pool.chunk_bytes):
                if piece.tensor != index:
                    source, index = _bytes_of(tensors[self.specs[piece.tensor].name].detach()), piece.tensor
                target = chunks[piece.chunk].data[piece.chunk_start : piece.chunk_start + piece.num_bytes]
                _copy(target, source[piece.tensor_start : piece.tensor_start + piece.num_bytes])
        except BaseException:
            staged.discard()
            raise
        return staged


class Staged:
    """Tensors copied, and not hashed yet."""

    def __init__(
        self,
        specs: tuple[TensorSpec, ...],
        metadata: bytes,
        chunks: list[Chunk],
        pool: ChunkPool,
        own: tuple[int, ...] = (),
    ) -> None:
        self._specs = specs
        self._metadata = metadata
        self._own = own
        self._chunks = chunks
        self._pool = pool

    def hashed(self, previous: Snapshot | None = None) -> Snapshot:
        """The snapshot; chunks that `previous` (held by the caller) has too are shared with it."""
        known = previous.by_hash() if previous is not None else {}
        for number, chunk in enumerate(self._chunks):
            chunk.hash = hashlib.sha256(chunk.view()).digest()
            same = known.setdefault(chunk.hash, chunk)
            if same is not chunk:
                self._chunks[number] = self._pool.share(same)
                self._pool.drop(chunk)
        inventory = Inventory(
            tensors=self._specs,
            chunk_bytes=self._pool.chunk_bytes,
            hashes=b"".join(chunk.hash for chunk in self._chunks),
            metadata=self._metadata,
            own=self._own,
        )
        return Snapshot(inventory, self._chunks, self._pool)

    def shared(self) -> Staged:
        """The same copy for one more user, who may hash or discard it without touching this one."""
        chunks = [self._pool.share(chunk) for chunk in self._chunks]
        return Staged(self._specs, self._metadata, chunks, self._pool, self._own)

    def tensors(self) -> dict[str, Tensor]:
        """Copies of its tensors, on the CPU."""
        return _read(self._specs, self._chunks, self._pool.chunk_bytes)

    def discard(self) -> None:
        """It is not wanted any more."""
        chunks, self._chunks = self._chunks, []
        for chunk in chunks:
            self._pool.drop(chunk)


def outline_of(tensors: Mapping[str, Tensor], metadata: Metadata, *, own: Collection[str] = ()) -> Outline:
    """What there is to copy; ConfigurationError for what cannot be kept. `own` names what is this peer's own."""
    data, specs = encode_metadata(metadata), specs_of(tensors)
    return Outline(specs, data, tuple(number for number, spec in enumerate(specs) if spec.name in own))


def stage(tensors: Mapping[str, Tensor], metadata: Metadata, pool: ChunkPool, *, own: Collection[str] = ()) -> Staged:
    """Copy the tensors. When it returns they may change again; hashing is for another thread."""
    return outline_of(tensors, metadata, own=own).copied(tensors, pool)


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """What these tensors are, in the order of the flat space; ConfigurationError for what cannot be kept."""
    if len(tensors) > MAX_TENSORS:
        raise ConfigurationError(f"{len(tensors)} tensors exceed {MAX_TENSORS}: join some of them")
    specs = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or dtype not in DTYPES or tensor.device.type == "meta":
            raise ConfigurationError(
                f"tensor {name!r} ({tensor.dtype}, {tensor.layout}, on {tensor.device}) cannot be kept: "
                "convert it to a dense tensor with data, or leave it out"
            )
        specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape)))
    return tuple(sorted(specs, key=lambda spec: spec.order))


def check_same(specs: tuple[TensorSpec, ...], tensors: Mapping[str, Tensor]) -> None:
    """ConfigurationError unless these are the tensors that the specs describe."""
    wanted, found = set(specs), set(specs_of(tensors))
    if wanted == found:
        return
    names = sorted({spec.name for spec in wanted ^ found})
    shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    raise ConfigurationError(
        f"the state and the given tensors differ in {shown}: build the same model and optimizer as the run has"
    )


def _read(specs: tuple[TensorSpec, ...], chunks: Sequence[Chunk], chunk_bytes: int) -> dict[str, Tensor]:
    made = {spec.name: torch.empty(spec.shape, dtype=DTYPES[spec.dtype]) for spec in specs}
    _write(specs, chunks, chunk_bytes, made)
    return made


def _write(
    specs: tuple[TensorSpec, ...],
    chunks: Sequence[Chunk],
    chunk_bytes: int,
    tensors: Mapping[str, Tensor],
    numbers: Collection[int] | None = None,
) -> None:
    """Put chunks into the tensors that they are of; only those with these numbers, if given."""
    wanted = None if numbers is None else frozenset(numbers)
    targets: dict[int, tuple[Tensor, Tensor]] = {}  # the bytes to write to, and the tensor that they stand for
    for piece in cut(specs, chunk_bytes):
        if wanted is not None and piece.chunk not in wanted:
            continue
        target = tensors[specs[piece.tensor].name].detach()
        if piece.tensor not in targets:
            targets[piece.tensor] = (_bytes_of(target), target)
        source = chunks[piece.chunk].data[piece.chunk_start : piece.chunk_start + piece.num_bytes]
        data = targets[piece.tensor][0]
        _copy(data[piece.tensor_start : piece.tensor_start + piece.num_bytes], source)
    for data, target in targets.values():
        if not _is_plain(target):  # its bytes were a copy
            target.copy_(_from_bytes(data, target))


def _copy(target: Tensor, source: Tensor) -> None:
    # torch would spread a megabyte over all cores, and wait for threads that others keep busy: up to 60 times slower.
    if target.device.type == source.device.type == "cpu":
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes in row-major order, flat: a view where it lies so in memory, else a copy."""
    plain = tensor if _is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.reshape(-1).view(torch.uint8)


def _from_bytes(data: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        real = torch.float32 if like.dtype == torch.complex64 else torch.float64
        return torch.view_as_complex(data.view(real).view(*like.shape, 2))
    return data.view(like.dtype).view(like.shape)
