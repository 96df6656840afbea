"""Who has given how much: the book's sums, and the coordinator that writes it."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from potluck.clock import SystemClock
from potluck.messages import MAX_MESSAGE_BYTES, encode
from potluck.peer.identity import Identity
from potluck.round.averager import Averager
from potluck.round.plan.messages import Commit, CommittedMember, RoundKey
from potluck.sim.memoryrun import MemoryPeer, MemoryRun
from potluck.testing.polling import poll_until
from potluck.training.books.contributions import (
    KEY,
    LONGEST_NAME,
    MAX_PEOPLE,
    ContributionBook,
    ContributionDesk,
    Given,
    added,
    read_book,
)


def commit(epoch: int, **weights: float) -> Commit:
    members = tuple(CommittedMember(peer=peer, weight=weight, holds=True) for peer, weight in weights.items())
    return Commit(
        epoch=epoch,
        key=RoundKey(epoch=epoch, token=1, attempt=1),
        term=1,
        coordinator="alice",
        members=members,
        digest="d",
        parent="p",
        layout="l",
    )


def test_samples_add_up_and_whoever_only_helps_is_not_in_the_book() -> None:
    book = added(ContributionBook(), commit(1, alice=3.0, aux=0.0), {"alice": "Alice"})
    book = added(book, commit(2, alice=2.0, bob=4.0), {"bob": "Bob"})
    assert book.ranked() == [
        ("alice", Given(name="Alice", epochs=2, samples=5.0, last_epoch=2)),
        ("bob", Given(name="Bob", epochs=1, samples=4.0, last_epoch=2)),
    ]
    assert (book.epoch, book.missed) == (2, 0)


@given(st.lists(st.integers(1, 30), max_size=40))
def test_no_epoch_counts_twice_and_gaps_are_told(epochs: list[int]) -> None:
    book = ContributionBook()
    for epoch in epochs:
        book = added(book, commit(epoch, alice=1.0), {})
    counted = book.peers["alice"].epochs if book.peers else 0
    assert counted + book.missed == book.epoch == max(epochs, default=0)


def test_the_book_always_fits_into_a_message() -> None:
    peers = {
        f"U{number:055}": Given(name="🥣" * LONGEST_NAME, epochs=10**6, samples=1e12) for number in range(MAX_PEOPLE)
    }
    book = added(ContributionBook(peers=peers, epoch=6), commit(7, newcomer=2e12), {"newcomer": "x" * 500})
    assert len(book.peers) == MAX_PEOPLE
    assert book.ranked()[0][0] == "newcomer"
    assert len(encode(book)) <= MAX_MESSAGE_BYTES


class House:
    """Peers of a run in memory that average nothing in particular."""

    def __init__(self, run: MemoryRun) -> None:
        self.run = run

    async def member(self, name: str) -> tuple[MemoryPeer, Averager, ContributionDesk]:
        peer = await self.run.join(name, identity=Identity.temporary(), coordinates=True)
        averager = Averager(peer)
        await averager.start()
        return peer, averager, ContributionDesk(peer.session, averager)


async def test_the_coordinator_writes_what_is_committed_and_the_next_goes_on() -> None:
    run = MemoryRun(clock=SystemClock())
    await run.open()
    house = House(run)
    alice, first, first_desk = await house.member("alice")
    bob, second, second_desk = await house.member("bob")
    await poll_until(lambda: bool(first.lease.token), 60, "a coordinator")
    for averager in (first, second):
        averager._committed(commit(1, **{alice.peer_id: 2.0, bob.peer_id: 3.0}))
    await poll_until(lambda: first_desk.counts["written"] == 1, 60, "the book")
    assert second_desk.counts["written"] == 0
    await first_desk.close()
    await first.close()
    await run.kill(alice)
    await poll_until(lambda: bool(second.lease.token), 60, "another coordinator")
    second._committed(commit(4, **{bob.peer_id: 3.0}))
    await poll_until(lambda: second_desk.counts["written"] == 1, 60, "the book again")
    book, _ = await read_book(bob.session)
    assert book.missed == 2
    assert [(given.name, given.samples) for _, given in book.ranked()] == [("bob", 6.0), ("alice", 2.0)]
    await second_desk.close()
    await second.close()
    await run.close()


async def test_a_book_that_cannot_be_read_is_begun_anew() -> None:
    run = MemoryRun(clock=SystemClock())
    await run.open()
    alice, averager, desk = await House(run).member("alice")
    await poll_until(lambda: bool(averager.lease.token), 60, "a coordinator")
    await alice.session.hub.store("contributions").put(KEY, b"scribble")
    averager._committed(commit(1, **{alice.peer_id: 2.0}))
    await poll_until(lambda: desk.counts["written"] == 1, 60, "the book")
    book, _ = await read_book(alice.session)
    assert book.epoch == 1
    await asyncio.gather(desk.close(), averager.close())
    await run.close()
