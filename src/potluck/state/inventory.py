"""What a state consists of: its tensors, the hashes of its chunks, and one digest over all (pure).

The bytes of all tensors lie one after the other in one flat space, which is cut into chunks of a fixed size. Tensors
are ordered by the size of their elements, the largest first, and then by name: peers that hold the same tensors derive
the same space, and every tensor is aligned to its own elements wherever the space as a whole is.

An inventory names the tensors and the SHA-256 of each chunk, and carries the metadata; its own SHA-256 is the digest of
the state. So a peer that trusts a digest can check an inventory, and then each chunk by itself, from any sender.
SHA-256 was taken because most processors have instructions for it (1.27 GB/s here; BLAKE2b 0.63 GB/s); a hash that only
detects accidents, such as xxhash, would not stop a liar.

Some tensors may be each peer's *own*, such as running means or the moments of local steps. They belong to a state, and
its inventory says which they are. All peers should hold the rest alike, and that is what is compared (snapshot.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Annotated, Any

import msgspec

from potluck.errors import ConfigurationError, ProtocolError
from potluck.messages import Message, decode

KIB = 1024
MIB = 1024 * KIB

CHUNK_BYTES = 1 * MIB
MAX_CHUNK_BYTES = 2 * MIB  # fits one item of a stream
MAX_INVENTORY_BYTES = 16 * MIB  # names of many tensors, or the hashes of 500 GB
MAX_METADATA_BYTES = 64 * KIB
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 32
HASH_BYTES = 32
OWN = "own"  # what stands under this key of the metadata is each peer's own too

# What may come from another peer or from disk, by the name that torch has for it, and how long a value is. Written
# down, so that a program that only looks at what there is need not import torch.
ITEM_BYTES = {
    "complex128": 16,
    **dict.fromkeys(("float64", "complex64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("int8", "bool", "uint8"), 1),
}

Metadata = Mapping[str, Any]
"""What JSON can say, with text as keys: epoch, scheduler, counters. The same on all peers, or their digests differ."""

_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
_metadata_encoder = msgspec.msgpack.Encoder(order="deterministic")


class TensorSpec(Message, frozen=True, kw_only=True, array_like=True):
    """One tensor of a state."""

    name: Annotated[str, msgspec.Meta(max_length=1024)]
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]

    @property
    def num_bytes(self) -> int:
        """How much of the flat space it takes."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def order(self) -> tuple[int, str]:
        """Its place among the others."""
        return (-ITEM_BYTES[self.dtype], self.name)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one tensor that lie in one chunk."""

    tensor: int
    chunk: int
    tensor_start: int
    chunk_start: int
    num_bytes: int


class Inventory(msgspec.Struct, frozen=True, kw_only=True, array_like=True, dict=True):
    """The description of one state."""

    tensors: tuple[TensorSpec, ...]
    chunk_bytes: int
    hashes: bytes  # of each chunk, one after the other
    metadata: bytes = b"\x80"
    own: tuple[int, ...] = ()  # places of the tensors that are each peer's own

    def __post_init__(self) -> None:
        if not 1 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunks of {self.chunk_bytes} bytes: 1 to {MAX_CHUNK_BYTES} are possible")
        if len(self.tensors) > MAX_TENSORS:
            raise ValueError(f"{len(self.tensors)} tensors exceed {MAX_TENSORS}")
        if len(self.metadata) > MAX_METADATA_BYTES:
            raise ValueError(f"metadata of {len(self.metadata)} bytes exceeds {MAX_METADATA_BYTES}")
        for spec in self.tensors:
            if spec.dtype not in ITEM_BYTES:
                raise ValueError(f"tensor {spec.name!r} is of the unknown type {spec.dtype!r}")
        for before, after in zip(self.tensors, self.tensors[1:], strict=False):
            if before.order >= after.order:
                raise ValueError(f"tensor {after.name!r} is out of order, or there twice")
        if any(not 0 <= number < len(self.tensors) for number in self.own) or list(self.own) != sorted(set(self.own)):
            raise ValueError("the places of tensors that are each peer's own are out of order, or there are none such")
        if len(self.hashes) != HASH_BYTES * self.num_chunks:
            raise ValueError(f"{len(self.hashes)} bytes of hashes do not belong to {self.num_chunks} chunks")

    @cached_property
    def num_bytes(self) -> int:
        """The size of the flat space."""
        return sum(spec.num_bytes for spec in self.tensors)

    @property
    def num_chunks(self) -> int:
        """How many chunks it is cut into."""
        return -(-self.num_bytes // self.chunk_bytes)

    @cached_property
    def encoded(self) -> bytes:
        """As it travels and as it is hashed."""
        fields = msgspec.structs.astuple(self)
        # Backups from before there were own tensors keep their digests, and so does any state without them.
        return msgspec.msgpack.encode(fields if self.own else fields[:-1])

    @cached_property
    def digest(self) -> str:
        """The digest of the whole state."""
        return hashlib.sha256(self.encoded).hexdigest()

    @cached_property
    def is_common(self) -> bool:
        """Whether all peers should hold all of it alike."""
        return not self.own and OWN not in self.read_metadata()

    @property
    def has_common_tensors(self) -> bool:
        """Whether there is anything to be compared."""
        return len(self.own) < len(self.tensors)

    @property
    def own_names(self) -> frozenset[str]:
        """The tensors that are each peer's own."""
        return frozenset(self.tensors[number].name for number in self.own)

    def common_frame(self) -> bytes:
        """What peers should hold alike, but for the values of the tensors."""
        own = frozenset(self.own)
        tensors = tuple(spec for number, spec in enumerate(self.tensors) if number not in own)
        metadata = {key: value for key, value in self.read_metadata().items() if key != OWN}
        return _metadata_encoder.encode((tensors, metadata))

    def hash_of(self, chunk: int) -> bytes:
        """What a chunk must hash to."""
        return self.hashes[HASH_BYTES * chunk : HASH_BYTES * (chunk + 1)]

    def bytes_of(self, chunk: int) -> int:
        """How long a chunk is; the last one may be short."""
        return min(self.chunk_bytes, self.num_bytes - chunk * self.chunk_bytes)

    def item_bytes_of(self, chunk: int) -> int:
        """What an element has that stands in the middle of a chunk: most of the chunk's elements have as much."""
        middle = chunk * self.chunk_bytes + self.bytes_of(chunk) // 2
        ends = accumulate(spec.num_bytes for spec in self.tensors)
        spec = next(spec for spec, end in zip(self.tensors, ends, strict=True) if middle < end)
        return ITEM_BYTES[spec.dtype]

    def changed_since(self, base: Inventory) -> frozenset[int] | None:
        """The chunks that are not the same there; None where the tensors are of another kind."""
        if base.tensors != self.tensors:
            return None
        return frozenset(n for n in range(self.num_chunks) if self.hash_of(n) != base.hash_of(n))

    def read_metadata(self) -> dict[str, Any]:
        """The metadata as it was given."""
        return decode_metadata(self.metadata)

    def describe(self) -> str:
        """The state in a few words."""
        return f"{len(self.tensors)} tensors, {self.num_bytes / 1e6:.1f} MB, digest {self.digest[:12]}"


def read_inventory(data: bytes | memoryview, digest: str) -> Inventory:
    """The inventory in `data`; ProtocolError unless it is a good one and has that digest."""
    if len(data) > MAX_INVENTORY_BYTES:
        raise ProtocolError(f"an inventory of {len(data)} bytes exceeds {MAX_INVENTORY_BYTES}: refused")
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise ProtocolError(f"an inventory with digest {found[:12]} came for the state {digest[:12]}: refused")
    inventory = decode(Inventory, data, limit_bytes=MAX_INVENTORY_BYTES)
    decode_metadata(inventory.metadata)
    if inventory.encoded != bytes(data):
        raise ProtocolError(f"the inventory of {digest[:12]} is not written as we write inventories: refused")
    return inventory


def cut(tensors: tuple[TensorSpec, ...], chunk_bytes: int) -> Iterator[Piece]:
    """Where tensors and chunks overlap, in order."""
    position = 0
    for index, spec in enumerate(tensors):
        start, stop = position, position + spec.num_bytes
        while position < stop:
            chunk, offset = divmod(position, chunk_bytes)
            length = min(chunk_bytes - offset, stop - position)
            yield Piece(index, chunk, position - start, offset, length)
            position += length


def encode_metadata(metadata: Metadata) -> bytes:
    """As bytes, the same for the same content; ConfigurationError for what is not plain data or too much of it."""
    _check_plain(metadata, "metadata")
    try:
        data = _metadata_encoder.encode(metadata)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigurationError(f"the metadata cannot be written down: {error}") from error
    if len(data) > MAX_METADATA_BYTES:
        raise ConfigurationError(
            f"metadata of {len(data)} bytes exceeds {MAX_METADATA_BYTES}: put what is large into tensors"
        )
    return data


def decode_metadata(data: bytes) -> dict[str, Any]:
    """The metadata, or ProtocolError."""
    return decode(dict[str, Any], data, limit_bytes=MAX_METADATA_BYTES)


def _check_plain(value: object, where: str, depth: int = 0) -> None:
    if depth > 16:
        raise ConfigurationError(f"{where} is nested too deeply: 16 levels are the most")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigurationError(f"{where} has the key {key!r}: keys are text")
            _check_plain(item, f"{where}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _check_plain(item, f"{where}[{number}]", depth + 1)
    elif not (value is None or type(value) in (bool, int, float, str)):
        raise ConfigurationError(
            f"{where} is a {type(value).__name__}: use text, numbers, lists and dictionaries, and tensors as tensors"
        )
