"""One backup on disk: a `safetensors` file with the tensors, and a JSON file that makes it count.

    epoch-00000120-3f6c0b1d2e9a.safetensors     the tensors, as any tool reads them
    epoch-00000120.json                         epoch, digest, inventory and metadata, with a checksum of its own

The tensors are written first, under a name that nothing refers to; the JSON file comes into being by a rename, when all
else is on disk. So a crash at any moment leaves the backup before it, and at most a file that is cleared away later.
Reading checks everything: the JSON by its checksum, each chunk of the tensors by the inventory.

The file format is ten lines, and a snapshot lies in chunks that are shared between epochs: written from there, no
second copy of the state is needed, and the interpreter lock is free meanwhile. It is read without mapping it into
memory, since a disk that fails under a mapped file kills the process.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from potluck.errors import BackupError, PotluckError, ProtocolError
from potluck.state.inventory import MAX_INVENTORY_BYTES, Inventory, TensorSpec, read_inventory

if TYPE_CHECKING:  # they import torch, which a list of backups does not need
    from potluck.state.assembly import Assembly
    from potluck.state.chunkpool import ChunkPool
    from potluck.state.snapshot import Snapshot

FORMAT = "potluck-backup-1"
MOST_CUTS = 64  # that a backup is said to be part of; as many as the hub remembers
MAX_RECORD_BYTES = 2 * MAX_INVENTORY_BYTES
MAX_HEADER_BYTES = 100 * 1024 * 1024  # as the safetensors library has it
_LENGTH = struct.Struct("<Q")

# What safetensors calls our types. A complex128 is written as two float64, as there is no name for it.
_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "bool": "BOOL",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "complex128": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON file. `metadata` is there to be looked at; what counts is in the inventory."""

    format: str
    run: str
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    made_at: Annotated[int, msgspec.Meta(ge=0)]
    digest: str
    tensors_file: str
    saved_at: float
    inventory: str
    metadata: Any = None
    checksum: str = ""
    cuts: list[int] | msgspec.UnsetType = msgspec.UNSET  # left out where it is no part of one


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupInfo:
    """A backup, as its JSON file describes it."""

    epoch: int
    made_at: int
    """The epoch that the state was made at; another than `epoch` when the run had gone on from a backup."""

    digest: str
    run: str
    saved_at: float
    record_path: Path
    tensors_path: Path
    inventory: Inventory
    cuts: tuple[int, ...] = ()
    """Of which cuts it is the group's part."""

    @property
    def cut(self) -> int:
        """The newest of them; 0: none."""
        return max(self.cuts, default=0)


def record_path(folder: Path, epoch: int) -> Path:
    """Where the JSON file of an epoch is."""
    return folder / f"epoch-{epoch:08d}.json"


def write_backup(
    folder: Path, snapshot: Snapshot, *, epoch: int, made_at: int, run: str, saved_at: float, cut: int = 0
) -> BackupInfo:
    """Write a backup; OSError when the disk will not have it, and nothing is left of it then."""
    inventory = snapshot.inventory
    tensors_path = folder / f"epoch-{epoch:08d}-{inventory.digest[:12]}.safetensors"
    header = _header(inventory, {"epoch": str(epoch), "digest": inventory.digest})
    chunks = (snapshot.view(number) for number in range(inventory.num_chunks))
    _write_whole(tensors_path, _concatenated([_LENGTH.pack(len(header)), header], chunks))
    record = Record(
        format=FORMAT,
        run=run,
        epoch=epoch,
        made_at=made_at,
        digest=inventory.digest,
        tensors_file=tensors_path.name,
        saved_at=saved_at,
        inventory=base64.b64encode(inventory.encoded).decode(),
        metadata=snapshot.metadata,
        cuts=[cut] if cut else msgspec.UNSET,
    )
    record = msgspec.structs.replace(record, checksum=_checksum(record))
    path = record_path(folder, epoch)
    try:
        _write_whole(path, [msgspec.json.format(msgspec.json.encode(record), indent=1)])
    except BaseException:
        with contextlib.suppress(OSError):
            if not path.exists():
                tensors_path.unlink()
        raise
    return _info(record, path, inventory)


def write_cut(info: BackupInfo, cut: int) -> BackupInfo:
    """Say that a backup is the part of a cut too; its tensors stay. OSError or BackupError when that cannot be."""
    cuts = sorted({*info.cuts, cut})[-MOST_CUTS:]
    record = msgspec.structs.replace(_read_record(info.record_path)[0], cuts=cuts)
    record = msgspec.structs.replace(record, checksum=_checksum(record))
    _write_whole(info.record_path, [msgspec.json.format(msgspec.json.encode(record), indent=1)])
    return _info(record, info.record_path, info.inventory)


def read_info(path: Path) -> BackupInfo:
    """What a JSON file says; BackupError when it is torn or corrupt."""
    record, inventory = _read_record(path)
    return _info(record, path, inventory)


def _read_record(path: Path) -> tuple[Record, Inventory]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RECORD_BYTES + 1)
        if len(data) > MAX_RECORD_BYTES:
            raise BackupError("it is larger than any that we write")
        record = msgspec.json.decode(data, type=Record)
        if record.format != FORMAT or record.checksum != _checksum(record):
            raise BackupError("its checksum is wrong")
        if Path(record.tensors_file).name != record.tensors_file:
            raise BackupError(f"it names a file elsewhere ({record.tensors_file!r})")
        inventory = read_inventory(base64.b64decode(record.inventory, validate=True), record.digest)
    except (OSError, ValueError, RecursionError, PotluckError) as error:
        raise BackupError(f"{path} cannot be used: {error}") from error
    return record, inventory


def read_snapshot(info: BackupInfo, pool: ChunkPool) -> Snapshot:
    """The state of a backup, every byte of it checked; BackupError when something is wrong."""
    from potluck.state.assembly import Assembly

    assembly = Assembly(pool)
    try:
        with info.tensors_path.open("rb", buffering=0) as file:
            _skip_header(file.fileno(), info.inventory)
            _read_chunks(file.fileno(), info.inventory, assembly)
        return assembly.finish()
    except (OSError, PotluckError, struct.error) as error:
        raise BackupError(f"{info.tensors_path} cannot be used: {error}") from error
    finally:
        assembly.close()


def _skip_header(descriptor: int, inventory: Inventory) -> None:
    (length,) = _LENGTH.unpack(_read_exactly(descriptor, _LENGTH.size))
    expected = _LENGTH.size + length + inventory.num_bytes
    found = os.fstat(descriptor).st_size
    if length > MAX_HEADER_BYTES or found != expected:
        raise ProtocolError(f"it has {found} bytes and should have {expected}")
    os.lseek(descriptor, length, os.SEEK_CUR)


def _read_chunks(descriptor: int, inventory: Inventory, assembly: Assembly) -> None:
    missing = set(assembly.begin(inventory, ()))
    for number in range(inventory.num_chunks):
        data = _read_exactly(descriptor, inventory.bytes_of(number))
        if number not in missing:  # the same content as one before
            if hashlib.sha256(data).digest() != inventory.hash_of(number):
                raise ProtocolError(f"chunk {number} does not match its hash")
            continue
        chunk = assembly.check(number, memoryview(data))
        if chunk is None:
            raise ProtocolError(f"chunk {number} does not match its hash")
        assembly.add(chunk)


def _read_exactly(descriptor: int, num_bytes: int) -> bytes:
    pieces: list[bytes] = []
    while num_bytes:
        piece = os.read(descriptor, num_bytes)
        if not piece:
            raise ProtocolError("it ends too early")
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


def write_tensors(path: Path, snapshot: Snapshot, metadata: dict[str, str]) -> None:
    """Write tensors alone, for other programs; OSError when the disk will not have them."""
    inventory = snapshot.inventory
    header = _header(inventory, metadata)
    chunks = (snapshot.view(number) for number in range(inventory.num_chunks))
    _write_whole(path, _concatenated([_LENGTH.pack(len(header)), header], chunks))


def _header(inventory: Inventory, metadata: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    for spec in inventory.tensors:
        if spec.name in entries:
            raise BackupError(f"a tensor cannot be called {spec.name!r} in a safetensors file: rename it")
        entries[spec.name] = {
            "dtype": _SAFETENSORS[spec.dtype],
            "shape": _shape(spec),
            "data_offsets": [position, position + spec.num_bytes],
        }
        position += spec.num_bytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)  # so that the tensors are aligned


def _shape(spec: TensorSpec) -> list[int]:
    return [*spec.shape, 2] if spec.dtype == "complex128" else list(spec.shape)


def _checksum(record: Record) -> str:
    plain = msgspec.structs.replace(record, checksum="")
    return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()


def _info(record: Record, path: Path, inventory: Inventory) -> BackupInfo:
    return BackupInfo(
        epoch=record.epoch,
        made_at=record.made_at,
        digest=record.digest,
        run=record.run,
        saved_at=record.saved_at,
        record_path=path,
        tensors_path=path.parent / record.tensors_file,
        inventory=inventory,
        cuts=tuple(record.cuts or ()),
    )


def _concatenated(head: list[bytes], chunks: Iterator[memoryview]) -> Iterator[bytes | memoryview]:
    yield from head
    yield from chunks


def _write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Put a file there in one step that survives a power failure, or not at all."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for piece in pieces:
                _write_all(file.fileno(), piece)
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def _write_all(descriptor: int, piece: bytes | memoryview) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
