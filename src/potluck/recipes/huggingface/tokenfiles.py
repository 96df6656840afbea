"""Texts that were made into tokens once: `potluck tokenize` writes them, and training only reads.

A file for each source. A row is a text: its sentences, each a list of tokens, and whether it is held out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from potluck.recipes.huggingface import rows

FOLDER = "tokens"
ROWS_PER_GROUP = 1000
TEXTS_AT_ONCE = 500

Document = list[list[int]]
"""A text's sentences, as tokens."""

Progress = Callable[[int, int, int], None]
"""Shards that are done, all of them, and tokens so far."""


def name_of(source: int) -> str:
    """Of a source's file, in the run's folder."""
    return f"{FOLDER}/source-{source}.parquet"


def write(
    path: Path,
    texts: Callable[[int], Iterator[str]],
    encode: Callable[[Sequence[str]], list[Document]],
    *,
    num_shards: int,
    held_out: float,
    progress: Progress,
) -> int:
    """Write all texts of a source, shard after shard; how many tokens they have."""
    import pyarrow
    from pyarrow import parquet

    kinds = [("sentences", pyarrow.list_(pyarrow.list_(pyarrow.int32()))), ("held_out", pyarrow.bool_())]
    schema = pyarrow.schema(kinds)
    path.parent.mkdir(parents=True, exist_ok=True)
    part, num_tokens = path.with_name(f"{path.name}.part"), 0
    with parquet.ParquetWriter(part, schema, compression="zstd") as file:
        for shard in range(num_shards):
            stream = texts(shard)
            while some := list(islice(stream, TEXTS_AT_ONCE)):
                documents = encode(some)
                num_tokens += sum(len(sentence) for document in documents for sentence in document)
                held = [rows.is_held_out(text, held_out) for text in some]
                table = pyarrow.table({"sentences": documents, "held_out": held}, schema=schema)
                file.write_table(table, row_group_size=ROWS_PER_GROUP)
            progress(shard + 1, num_shards, num_tokens)
    part.replace(path)
    return num_tokens


def read(path: Path, shard: int, num_shards: int, *, held_out: bool) -> Iterator[Document]:
    """The documents of a shard."""
    for row in rows.parquet_range(path, ["sentences", "held_out"], shard, num_shards):
        if row["held_out"] == held_out:
            yield row["sentences"]
