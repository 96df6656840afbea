"""Texts of one shard, and which of them are held out.

A shard of local files is a range: of bytes for text and JSONL, of rows for parquet. So a shard is read by itself,
without a pass over the others. A data set that is streamed is cut by its own files; where it has fewer than the run has
shards, several shards share a file and take its rows in turn.

Whether a text is held out depends on its content alone: on every machine, in every order, the same ones are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash

from potluck.errors import ConfigurationError

T = TypeVar("T")

PIECE_BYTES = 4096  # of a text file: what starts within so many bytes is one text
SUFFIXES = (".txt", ".md", ".text", ".jsonl", ".ndjson", ".parquet")


def is_held_out(text: str, share: float) -> bool:
    """Whether a text is for evaluation."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) < share * 2**64


def local_rows(files: Iterable[Path], column: str, shard: int, num_shards: int) -> Iterator[str]:
    """The texts of a shard of local files."""
    for path in files:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path, column, shard, num_shards)
        elif path.suffix in (".jsonl", ".ndjson"):
            size = path.stat().st_size
            for start, line in _lines(path, size * shard // num_shards, size * (shard + 1) // num_shards):
                yield _text_of(line, column, path, start)
        else:
            pieces = -(-path.stat().st_size // PIECE_BYTES)
            for piece in range(pieces * shard // num_shards, pieces * (shard + 1) // num_shards):
                found = (line for _, line in _lines(path, piece * PIECE_BYTES, (piece + 1) * PIECE_BYTES))
                yield b"".join(found).decode("utf-8", "replace")


def check_files(files: Iterable[Path], column: str) -> int:
    """Read all of it once, as organisers do before others have it: how many texts there are.

    ConfigurationError names the line that is wrong, or says that there is nothing to read.
    """
    there = list(files)
    count = sum(1 for text in local_rows(there, column, 0, 1) if text.strip())
    if not count:
        names = ", ".join(path.name for path in there)
        raise ConfigurationError(f"[data] {names}: there is no text in it. Put some there, or name other files")
    return count


def _lines(path: Path, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in this range of a file, each with its place."""
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()  # belongs to who has the byte before, be it only its end
        place = file.tell()
        while place < end and (line := file.readline()):
            yield place, line
            place += len(line)


def _text_of(line: bytes, column: str, path: Path, start: int) -> str:
    if not line.strip():
        return ""
    try:
        return _as_text(json.loads(line)[column])
    except (ValueError, KeyError, TypeError) as error:
        number = _line_number(path, start)
        raise ConfigurationError(
            f"column={column!r}: line {number} of {path.name} is no JSON object with a text of that name ({error!r}): "
            f"{line[:60]!r}"
        ) from error


def _text_in(row: dict[str, Any], column: str, source: str) -> str:
    try:
        return _as_text(row[column])
    except TypeError as error:
        raise ConfigurationError(f"column={column!r}: in {source} {error}. Name a column with texts") from error


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (dict, list)):
        raise TypeError(f"it is a {type(value).__name__}, not a text")
    return str(value)


def _line_number(path: Path, start: int) -> int:
    """Counted from 1, as the author of the file counts."""
    number = 1
    with path.open("rb") as file:
        while start > 0 and (read := file.read(min(start, 1 << 20))):
            number += read.count(b"\n")
            start -= len(read)
    return number


def _parquet_rows(path: Path, column: str, shard: int, num_shards: int) -> Iterator[str]:
    for row in parquet_range(path, [column], shard, num_shards):
        yield _text_in(row, column, path.name)


def parquet_range(path: Path, columns: Sequence[str], shard: int, num_shards: int) -> Iterator[dict[str, Any]]:
    """The rows of a shard of one file, with these columns."""
    from pyarrow import ArrowInvalid, parquet

    try:
        opened = parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise ConfigurationError(f"[data] {path.name} is no parquet file, or was cut off: {error}") from error
    with opened as file:
        if missing := set(columns) - set(file.schema_arrow.names):
            names = ", ".join(file.schema_arrow.names)
            raise ConfigurationError(f"column={', '.join(sorted(missing))!r}: {path.name} has the columns {names}")
        total = file.metadata.num_rows
        start, end, first = total * shard // num_shards, total * (shard + 1) // num_shards, 0
        for group in range(file.num_row_groups):
            last = first + file.metadata.row_group(group).num_rows
            if first < end and last > start:
                table = file.read_row_group(group, columns=list(columns))
                yield from table.slice(max(start - first, 0), end - max(start, first)).to_pylist()
            first = last


def dataset_rows(
    name: str, column: str, shard: int, num_shards: int, *, subset: str, split: str, revision: str, streaming: bool
) -> Iterator[str]:
    """The texts of a shard of a data set that the `datasets` library loads."""
    from datasets import load_dataset

    found: Any = load_dataset(name, subset or None, split=split, revision=revision or None, streaming=streaming)
    if not streaming:
        total = len(found)
        part: Any = found.select(range(total * shard // num_shards, total * (shard + 1) // num_shards))
    elif found.num_shards >= num_shards:
        part = found.shard(num_shards=num_shards, index=shard)
    else:
        files, turn = found.num_shards, shard // found.num_shards
        sharing = -(-(num_shards - shard % files) // files)  # shards that have this file
        part = islice(found.shard(num_shards=files, index=shard % files), turn, None, sharing)
    for row in part:
        if column not in row:
            raise ConfigurationError(f"column={column!r}: {name} has the columns {', '.join(row)}")
        yield _text_in(row, column, name)


def shuffled(rows: Iterable[T], buffer: int, generator: torch.Generator) -> Iterator[T]:
    """Rows in another order, as far as a buffer of so many goes."""
    kept: list[T] = []
    for row in rows:
        if len(kept) < buffer:
            kept.append(row)
            continue
        place = int(torch.randint(buffer, (1,), generator=generator))
        kept[place], row = row, kept[place]
        yield row
    for place in torch.randperm(len(kept), generator=generator).tolist():
        yield kept[place]
