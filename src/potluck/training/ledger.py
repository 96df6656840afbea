"""Who trains on which shard (pure): a book that gives each shard to one peer at a time, pass after pass.

The whole book stands in the hub, written by the coordinator alone and by compare-and-set. So the next coordinator goes
on with it as it is, and a peer that is gone gives its shard back when somebody asks for one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import msgspec
import xxhash

from potluck.errors import ConfigurationError
from potluck.messages import Message
from potluck.recipes.recipe import MAX_SHARDS


class ShardBook(Message, frozen=True, kw_only=True):
    """What is done of this pass over the data, and what is under way."""

    num_shards: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARDS)]
    pass_number: int = 0
    done: bytes = b""  # a bit for each shard, the lowest first
    leases: dict[str, int] = {}  # the shard that a reader of a peer has, by `reader_key`

    def is_done(self, shard: int) -> bool:
        """Whether somebody has finished this shard in this pass."""
        return shard // 8 < len(self.done) and bool(self.done[shard // 8] >> shard % 8 & 1)

    @property
    def num_done(self) -> int:
        """How many shards of this pass are finished."""
        return int.from_bytes(self.done, "little").bit_count()


def reader_key(peer: str, reader: int) -> str:
    """Whose lease it is: a peer that reads by several threads has one for each."""
    return peer if not reader else f"{peer}/{reader}"


def take(
    book: ShardBook, peer: str, *, finished: int | None, present: Collection[str], reader: int = 0
) -> tuple[ShardBook, int]:
    """The book after this peer was given a shard for one of its readers, and the shard.

    `finished` is the one that it had and has trained on. When every shard of a pass is done or under way, the next pass
    begins. When there are more peers than shards, some share one: better than to wait.
    """
    key = reader_key(peer, reader)
    leases = {
        other: shard for other, shard in book.leases.items() if other.partition("/")[0] in present and other != key
    }
    done = bytearray(book.done.ljust((book.num_shards + 7) // 8, b"\0"))
    if finished is not None and book.leases.get(key) == finished:
        done[finished // 8] |= 1 << finished % 8
    pass_number = book.pass_number
    under_way = set(leases.values())
    free = [s for s in range(book.num_shards) if not done[s // 8] >> s % 8 & 1 and s not in under_way]
    if not free:
        pass_number, done = pass_number + 1, bytearray(len(done))
        free = [s for s in range(book.num_shards) if s not in under_way] or list(range(book.num_shards))
    # In another order each pass, the same for whoever keeps the book.
    shard = free[xxhash.xxh3_64_intdigest(b"%d %d" % (pass_number, len(free))) % len(free)]
    leases[key] = shard
    return msgspec.structs.replace(book, pass_number=pass_number, done=bytes(done), leases=leases), shard


def check_same_data(book: ShardBook, num_shards: int) -> None:
    """ConfigurationError when a peer's data are cut otherwise than the run's."""
    if book.num_shards != num_shards:
        raise ConfigurationError(
            f"this recipe has {num_shards} shards here and {book.num_shards} in the run: its data or version differ"
        )
