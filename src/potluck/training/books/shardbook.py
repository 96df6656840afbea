"""Who trains on which shard (pure): a book that gives each shard to one peer at a time, pass after pass.

The whole book stands in the hub, written by the coordinator alone and by compare-and-set. So the next coordinator goes
on with it as it is, and a peer that is gone gives its shard back when somebody asks for one. How far it was in it
stands there too: the order within a shard depends on the pass alone, so who takes it over begins where the other ended.

How often a peer asks shows how fast it is, whatever it says of its samples: `allowances` makes of it how much of its
claims may count over time (round/plan/weights.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated

import msgspec
import xxhash

from potluck.errors import ConfigurationError
from potluck.messages import Message
from potluck.recipes.recipe import MAX_SHARDS
from potluck.round.plan.weights import Medians

FORGET_SHARDS = 64  # what was before the last so many counts half
LONG_PAUSE = 10.0  # usual times between two shards: a longer one was a pause, and says nothing of speed
LEEWAY = 2.0  # shards are of different sizes, and peers become faster
MOST_REACHED = 1024  # shards whose progress is kept
LEEWAY_SHARDS = 8.0  # nobody is judged by fewer


class Taken(Message, frozen=True, kw_only=True, array_like=True):
    """How fast a peer has taken shards."""

    shards: float = 0.0  # after the first
    seconds: float = 0.0  # in which it did
    at: float = 0.0  # hub time of the newest

    def another(self, now: float) -> Taken:
        """One more, now."""
        longest = LONG_PAUSE * self.seconds / self.shards if self.shards >= 2 else math.inf
        seconds = self.seconds + min(max(now - self.at, 0.0), longest)
        share = 0.5 if self.shards + 1 > FORGET_SHARDS else 1.0
        return Taken(shards=share * (self.shards + 1), seconds=share * seconds, at=now)

    def shards_per_second(self, now: float, leeway: float = 0.0) -> float:
        """So far, or at most so many shards more."""
        return (self.shards + leeway) / max(self.seconds + now - self.at, 1e-3)


class ShardBook(Message, frozen=True, kw_only=True):
    """What is done of this pass over the data, and what is under way."""

    num_shards: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARDS)]
    pass_number: int = 0
    done: bytes = b""  # a bit for each shard, the lowest first
    leases: dict[str, int] = {}  # the shard that a reader of a peer has, by `reader_key`
    taken: dict[str, Taken] = {}  # by peers that are here
    reached: dict[int, int] = {}  # samples of a shard that are trained on, where it is not done

    def is_done(self, shard: int) -> bool:
        """Whether somebody has finished this shard in this pass."""
        return shard // 8 < len(self.done) and bool(self.done[shard // 8] >> shard % 8 & 1)

    def skip(self, shard: int) -> int:
        """Samples at its beginning that somebody has trained on in this pass."""
        return self.reached.get(shard, 0)

    def is_shared(self, shard: int, key: str) -> bool:
        """Whether another reader has it too."""
        return any(held == shard for other, held in self.leases.items() if other != key)


def reader_key(peer: str, reader: int) -> str:
    """Whose lease it is: a peer that reads by several threads has one for each."""
    return peer if not reader else f"{peer}/{reader}"


def take(
    book: ShardBook, peer: str, *, finished: int | None, present: Collection[str], reader: int = 0, now: float = 0.0
) -> tuple[ShardBook, int]:
    """The book after this peer was given a shard for one of its readers, and the shard; `now` is hub time.

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
    reached = {shard: samples for shard, samples in book.reached.items() if not done[shard // 8] >> shard % 8 & 1}
    pass_number = book.pass_number
    under_way = set(leases.values())
    free = [s for s in range(book.num_shards) if not done[s // 8] >> s % 8 & 1 and s not in under_way]
    if not free:
        pass_number, done, reached = pass_number + 1, bytearray(len(done)), {}
        free = [s for s in range(book.num_shards) if s not in under_way] or list(range(book.num_shards))
    # In another order each pass, the same for every keeper of the book.
    shard = free[xxhash.xxh3_64_intdigest(b"%d %d" % (pass_number, len(free))) % len(free)]
    leases[key] = shard
    taken = {other: found for other, found in book.taken.items() if other in present}
    taken[peer] = taken[peer].another(now) if peer in taken else Taken(at=now)
    changed = {"pass_number": pass_number, "done": bytes(done), "leases": leases, "taken": taken, "reached": reached}
    return msgspec.structs.replace(book, **changed), shard


def reach(book: ShardBook, key: str, shard: int, samples: int) -> ShardBook:
    """The book after a reader has told how far it is in its shard: who takes that over later begins there.

    What a reader says of another's shard does not count, nor does going back.
    """
    if book.leases.get(key) != shard or book.is_shared(shard, key) or samples <= book.skip(shard):
        return book
    reached = {**book.reached, shard: samples}
    while len(reached) > MOST_REACHED:
        reached.pop(next(iter(reached)))  # the one that is written the longest
    return msgspec.structs.replace(book, reached=reached)


def allowances(book: ShardBook, trainers: Collection[str], now: float) -> dict[str, float]:
    """How many times the median each trainer may give over time, by the shards that it has taken.

    Twice what it takes against the median of the others, and that for everybody, also for one that takes none: it may
    train on data of its own, or not have reached the coordinator. Nobody is judged where most take none.
    """
    rates = Medians({peer: found.shards_per_second(now) for peer, found in book.taken.items() if peer in trainers})
    if 2 * len(rates) <= len(trainers):
        return {}
    allowed = {}
    for peer in trainers:
        others = rates.without(peer)
        if others:
            own = book.taken[peer].shards_per_second(now, LEEWAY_SHARDS) if peer in book.taken else 0.0
            allowed[peer] = LEEWAY * max(own / others, 1.0)
    return allowed


def check_same_data(book: ShardBook, num_shards: int) -> None:
    """ConfigurationError when a peer's data are cut otherwise than the run's."""
    if book.num_shards != num_shards:
        raise ConfigurationError(
            f"this recipe has {num_shards} shards here and {book.num_shards} in the run: its data or version differ"
        )
