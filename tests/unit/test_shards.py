"""Shards on lease: the book's rules, and trainers that ask a coordinator for the next one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainlab import train_lab

from potluck.errors import ConfigurationError
from potluck.messages import MAX_MESSAGE_BYTES, decode, encode
from potluck.recipes.recipe import MAX_SHARDS
from potluck.round.averager import Averager
from potluck.run.joined import Joined
from potluck.testing.polling import poll_until_sync
from potluck.training.books import shards as books
from potluck.training.books.shardbook import ShardBook, allowances, reach, take
from potluck.training.books.shards import BOOK, LeasedShards, ShardDesk
from potluck.training.trainer.reading import Reached

PEERS = tuple("abcdefg")


@settings(max_examples=200)
@given(
    num_shards=st.integers(1, 12),
    steps=st.lists(st.tuples(st.sampled_from(PEERS), st.sampled_from(["next", "gone"])), max_size=60),
)
def test_each_shard_is_with_one_peer_and_done_once_a_pass(num_shards: int, steps: list[tuple[str, str]]) -> None:
    book = ShardBook(num_shards=num_shards)
    present: set[str] = set()
    held: dict[str, int] = {}
    done: Counter[tuple[int, int]] = Counter()
    is_crowded = False
    for peer, what in steps:
        if what == "gone":
            present.discard(peer)
            held.pop(peer, None)
            continue
        present.add(peer)
        before = book
        book, shard = take(book, peer, finished=held.get(peer), present=present)
        if peer in held and before.leases.get(peer) == held[peer]:
            done[before.pass_number, held[peer]] += 1
        held[peer] = shard
        assert 0 <= shard < num_shards
        assert book.leases[peer] == shard
        assert set(book.leases) <= present
        is_crowded = is_crowded or len(present) > num_shards
        if len(present) <= num_shards:
            assert shard not in [other for name, other in book.leases.items() if name != peer]
        assert book.pass_number - before.pass_number in (0, 1)
    assert is_crowded or all(count == 1 for count in done.values())


def book_of(seconds_per_shard: dict[str, float], *, until: float) -> ShardBook:
    """What the ledger shows of peers that take a shard every so often."""
    book = ShardBook(num_shards=1000)
    steps = sorted(
        (number * seconds, peer)
        for peer, seconds in seconds_per_shard.items()
        for number in range(int(until / seconds))
    )
    for now, peer in steps:
        held = book.leases.get(peer)
        book, _ = take(book, peer, finished=held, present=set(seconds_per_shard), now=1000.0 + now)
    return book


def test_the_ledger_allows_twice_what_a_peer_takes_of_it() -> None:
    peers = {"a": 10.0, "b": 10.0, "c": 10.0, "fast": 1.0, "liar": 10.0}
    allowed = allowances(book_of(peers, until=2000.0), set(peers), 3000.0)
    assert 2.0 <= allowed["liar"] < 3.0, "as fast as the others, whatever it claims"
    assert 20.0 <= allowed["fast"] < 24.0
    assert allowances(book_of(peers, until=2000.0), {*peers, "own data"}, 3000.0)["own data"] == 2.0


def test_the_ledger_judges_nobody_by_a_few_shards() -> None:
    peers = {
        "a": 100.0,
        "b": 100.0,
        "fast": 100.0,
    }  # it may be ten times as fast, in shards that all are in the middle of
    allowed = allowances(book_of(peers, until=100.0), set(peers), 1050.0)
    assert allowed == {} or min(allowed.values()) >= 16.0
    allowed = allowances(book_of(peers, until=300.0), set(peers), 1250.0)
    assert min(allowed.values()) >= 8.0


def test_the_ledger_judges_nobody_where_most_do_without_it() -> None:
    book = book_of({"a": 1.0, "b": 1.0}, until=100.0)
    assert allowances(book, {"a", "b", "c", "d"}, 1100.0) == {}


def test_a_pause_does_not_make_a_peer_slow() -> None:
    book = book_of({"a": 1.0, "b": 1.0}, until=50.0)
    for now in range(5000, 5020):
        for peer in "abn":
            book, _ = take(book, peer, finished=book.leases.get(peer), present={"a", "b", "n"}, now=float(now))
    allowed = allowances(book, {"a", "b", "n"}, 5020.0)
    assert 2.0 <= allowed["a"] < 5.0
    assert 2.0 <= allowed["n"] < 6.0


def test_a_pass_takes_every_shard_once() -> None:
    book, order, finished = ShardBook(num_shards=9), [], None
    for _ in range(18):
        book, finished = take(book, "a", finished=finished, present={"a"})
        order.append(finished)
    assert sorted(order[:9]) == sorted(order[9:]) == list(range(9))
    assert order[:9] != order[9:]
    assert book.pass_number == 1


def test_who_is_gone_gives_its_shard_back_unfinished() -> None:
    book, shard = take(ShardBook(num_shards=2), "a", finished=None, present={"a"})
    book, other = take(book, "b", finished=None, present={"a", "b"})
    assert other != shard
    book, again = take(book, "b", finished=other, present={"b"})
    assert again == shard
    assert book.pass_number == 0


def test_nobody_finishes_what_it_does_not_hold() -> None:
    book, shard = take(ShardBook(num_shards=4), "a", finished=None, present={"a", "b"})
    book, _ = take(book, "b", finished=shard, present={"a", "b"})
    book, _ = take(book, "b", finished=10**9, present={"a", "b"})
    assert not any(book.is_done(each) for each in range(4))


def test_the_largest_book_fits_into_a_message() -> None:
    leases = {f"U{number:055}": number for number in range(1000)}
    book = ShardBook(num_shards=MAX_SHARDS, done=b"\xff" * (MAX_SHARDS // 8), leases=leases)
    assert len(encode(book)) <= MAX_MESSAGE_BYTES


class Member:
    """A peer of a run in memory that may coordinate."""

    def __init__(self, run: Joined) -> None:
        self.run = run

        async def start() -> Averager:
            averager = Averager(run.peer)
            await averager.start()
            run.attach(averager.close)
            self.desk = ShardDesk(run.peer, averager.lease)
            return averager

        self.averager = run.call(start())

    def shards(self, num_shards: int) -> LeasedShards:
        return LeasedShards(self.run, self.averager.lease.view, num_shards, seed=1)


def test_trainers_never_meet_in_a_shard_and_outlive_their_coordinator() -> None:
    with train_lab() as lab:
        members = [Member(lab.join(name, coordinates=name != "carol")) for name in ("alice", "bob", "carol")]
        everyone = [member.shards(5) for member in members]
        poll_until_sync(lambda: members[2].averager.lease.view.holder is not None, 60, "a coordinator")
        first = [shards.take().shard for shards in everyone]
        assert len(set(first)) == 3
        assert [shards.counts["on_lease"] for shards in everyone] == [1, 1, 1]

        coordinator = next(m for m in members if m.averager.lease.token)
        left = [shards for shards, m in zip(everyone, members, strict=True) if m is not coordinator]
        given = first[members.index(coordinator)]
        kept = [first[index] for index, m in enumerate(members) if m is not coordinator]
        lab.kill(coordinator.run)
        poll_until_sync(lambda: any(m.averager.lease.token for m in members if m is not coordinator), 60, "another")
        holder = next(m for m in members if m is not coordinator and m.averager.lease.token)
        poll_until_sync(
            lambda: all(m.averager.lease.view.holder == holder.run.peer_id for m in members if m is not coordinator),
            60,
            "the news of it",
        )
        taken = [left[0].take().shard for _ in range(4)]  # all that is free in this pass: its own is done
        assert kept[1] not in taken
        assert given in taken[:3]
        entry = lab.loop.call(holder.run.peer.session.hub.store("shards").get(BOOK))
        assert entry is not None
        assert decode(ShardBook, entry.value or b"").pass_number == 1


def test_without_a_coordinator_any_shard_will_do() -> None:
    with train_lab() as lab:
        alone = Member(lab.join("alice", coordinates=False))
        shards = alone.shards(5)
        assert all(0 <= shards.take().shard < 5 for _ in range(10))
        assert shards.counts == {"by_chance": 10}


def test_who_takes_over_a_shard_begins_where_the_other_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "TELL_SECONDS", 0.0)
    with train_lab() as lab:
        alice, bob = Member(lab.join("alice")), Member(lab.join("bob", coordinates=False))
        poll_until_sync(lambda: bob.averager.lease.view.holder is not None, 60, "a coordinator")
        theirs = bob.shards(2)
        place = theirs.take()
        theirs.reach(Reached(place.shard, 7))
        poll_until_sync(lambda: alice.desk.counts["reached"], 60, "the book to have it")
        theirs.reach(Reached(place.shard, 5))  # nobody goes back
        lab.kill(bob.run)
        poll_until_sync(lambda: len(list(alice.run.peer.session.roster.alive())) == 1, 60, "bob to be missed")
        ours = alice.shards(2)
        taken = [ours.take() for _ in range(2)]
        assert place._replace(skip=7) in taken, "the same order, from there on"
        assert [each.skip for each in (ours.take(), ours.take())] == [0, 0], "another pass begins at the beginning"


def test_the_book_believes_nobody_about_anothers_shard() -> None:
    book, shard = take(ShardBook(num_shards=2), "a", finished=None, present={"a", "b"})
    assert reach(book, "b", shard, 5) is book
    assert reach(book, "a", 1 - shard, 5) is book
    further = reach(book, "a", shard, 5)
    assert further.skip(shard) == 5
    assert reach(further, "a", shard, 4) is further
    done, _ = take(further, "a", finished=shard, present={"a"})
    assert done.reached == {}


def test_who_has_other_data_is_told() -> None:
    with train_lab() as lab:
        alice = Member(lab.join("alice"))
        poll_until_sync(lambda: alice.averager.lease.token, 60, "a coordinator")
        alice.shards(5).take()
        with pytest.raises(ConfigurationError, match="6 shards here and 5 in the run"):
            alice.shards(6).take()


def test_a_peer_with_several_readers_has_a_shard_for_each() -> None:
    book = ShardBook(num_shards=8)
    shards = []
    for reader in range(3):
        book, shard = take(book, "a", finished=None, present={"a"}, reader=reader)
        shards.append(shard)
    assert len(set(shards)) == 3
    book, other = take(book, "a", finished=shards[1], present={"a"}, reader=1)
    assert book.is_done(shards[1])
    assert other not in shards
    book, _ = take(book, "b", finished=None, present={"b"})
    assert set(book.leases) == {"b"}, "who is gone gives all of them back"
