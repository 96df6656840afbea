"""The coordinator's lease: one holder, growing tokens, and nobody waits for the dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from potluck.hub.connection import Entry
from potluck.hub.leaserecord import KEY, LeaseRecord
from potluck.messages import encode
from potluck.peer.lease import GRACE_SECONDS, KEPT_TERMS, SILENT_SECONDS, TTL_SECONDS, Lease, LeaseView
from potluck.sim.memoryhub import MemoryHub
from potluck.sim.virtualloop import LoopClock, in_virtual_time

SOON_SECONDS = 0.01  # far less than any timer of the lease
LONG_SECONDS = 20.0


class Candidates:
    """Peers that want the lease, and a roster that says who is dead."""

    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.dead: set[tuple[str, str]] = set()
        self.leases: list[Lease] = []

    async def join(self, name: str, session: str = "s", *, stand: bool = True) -> Lease:
        lease = Lease(
            self.hub.connect(name).store("lease"),
            name,
            LoopClock(),
            session=session,
            is_gone=lambda holder, session: (holder, session) in self.dead,
        )
        self.leases.append(lease)
        await lease.start()
        if stand:
            lease.stand()
        return lease

    def holders(self) -> list[Lease]:
        return [lease for lease in self.leases if lease.is_held]


@asynccontextmanager
async def candidates() -> AsyncIterator[Candidates]:
    those = Candidates()
    yield those
    for lease in those.leases:
        await lease.close()
    for connection in list(those.hub.connections):
        await connection.close()


async def until(condition: Callable[[], bool], seconds: float = LONG_SECONDS) -> float:
    """Wait for it and return how long it took."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not condition():
        assert loop.time() - start < seconds, "it did not happen"
        await asyncio.sleep(SOON_SECONDS)
    return loop.time() - start


@in_virtual_time
async def test_one_candidate_holds_it_and_all_see_who() -> None:
    async with candidates() as those:
        leases = [await those.join(name) for name in ("A", "B", "C")]
        watcher = await those.join("W", stand=False)
        await until(lambda: bool(those.holders()))
        for _ in range(200):
            await asyncio.sleep(0.1)
            assert len(those.holders()) == 1
        [holder] = those.holders()
        assert {lease.view.holder for lease in [*leases, watcher]} == {holder.view.holder}
        assert all(lease.view.token == holder.token for lease in leases)
        assert not watcher.is_held
        assert watcher.view.accepts(str(holder.view.holder), holder.token)
        assert not watcher.view.accepts("B" if holder.view.holder != "B" else "A", holder.token)
        assert not watcher.view.accepts(str(holder.view.holder), holder.token - 1)


@in_virtual_time
async def test_a_silent_holder_is_replaced_when_its_time_is_over_and_its_token_is_smaller() -> None:
    async with candidates() as those:
        first = await those.join("A")
        await until(lambda: first.is_held)
        old_token = first.token
        second = await those.join("B")
        those.hub.disconnect("A")
        taken = await until(lambda: second.is_held)
        assert taken <= SILENT_SECONDS + 1.0
        assert not first.is_held, "it must have noticed by its own clock"
        assert second.token > old_token
        assert not second.view.accepts("A", old_token)


@in_virtual_time
async def test_a_dead_holder_is_replaced_at_once() -> None:
    async with candidates() as those:
        first = await those.join("A")
        await until(lambda: first.is_held)
        old_token = first.token
        second = await those.join("B")
        await asyncio.sleep(1.0)
        those.hub.disconnect("A")
        those.dead.add(("A", "s"))
        second.reconsider()
        assert await until(lambda: second.is_held) <= 5 * SOON_SECONDS
        assert second.token > old_token


@in_virtual_time
async def test_a_holder_that_the_roster_wrongly_buries_loses_the_lease_and_knows_it() -> None:
    async with candidates() as those:
        first = await those.join("A")
        await until(lambda: first.is_held)
        second = await those.join("B")
        those.dead.add(("A", "s"))
        second.reconsider()
        await until(lambda: second.is_held)
        await until(lambda: not first.is_held, seconds=5 * SOON_SECONDS)
        await asyncio.sleep(10 * TTL_SECONDS)
        assert those.holders() == [second]


@in_virtual_time
async def test_of_many_who_replace_a_dead_holder_one_wins() -> None:
    async with candidates() as those:
        first = await those.join("A")
        await until(lambda: first.is_held)
        others = [await those.join(name) for name in "BCDEF"]
        those.hub.disconnect("A")
        those.dead.add(("A", "s"))
        for lease in others:
            lease.reconsider()
        await until(lambda: any(lease.is_held for lease in others))
        await asyncio.sleep(1.0)
        assert sum(lease.is_held for lease in others) == 1


@in_virtual_time
async def test_a_holder_that_restarted_need_not_wait_for_its_earlier_life() -> None:
    async with candidates() as those:
        first = await those.join("A", "life 1")
        await until(lambda: first.is_held)
        old_token = first.token
        those.hub.disconnect("A")
        second = await those.join("A", "life 2")
        assert await until(lambda: second.is_held) <= 5 * SOON_SECONDS
        assert second.token > old_token


@in_virtual_time
async def test_another_candidate_replaces_the_earlier_life_of_a_restarted_holder() -> None:
    async with candidates() as those:
        first = await those.join("A", "life 1")
        await until(lambda: first.is_held)
        those.hub.disconnect("A")
        other = await those.join("B")
        those.dead.add(("A", "life 1"))
        other.reconsider()
        assert await until(lambda: other.is_held) <= 5 * SOON_SECONDS


@in_virtual_time
async def test_a_lease_that_is_handed_back_is_free_at_once() -> None:
    async with candidates() as those:
        first = await those.join("A")
        await until(lambda: first.is_held)
        second = await those.join("B")
        await first.close()
        assert not first.is_held
        assert await until(lambda: second.is_held) <= 5 * SOON_SECONDS


@in_virtual_time
async def test_the_holder_survives_a_hub_that_is_away_for_less_than_its_time() -> None:
    async with candidates() as those:
        first = await those.join("A")
        await until(lambda: first.is_held)
        token = first.token
        those.hub.disconnect()
        await asyncio.sleep(1.0)
        those.hub.reconnect()
        await asyncio.sleep(10.0)
        assert first.token == token


@pytest.mark.parametrize("seconds", [0.5, 3.0, 6.0, 9.0, 14.0])
@in_virtual_time
async def test_the_holder_keeps_the_lease_while_its_store_has_no_leader(seconds: float) -> None:
    async with candidates() as those:
        first = await those.join("A")
        await until(lambda: first.is_held)
        token, others = first.token, [await those.join(name) for name in "BCD"]
        those.hub.depose("lease")
        for _ in range(int(seconds / 0.05)):
            await asyncio.sleep(0.05)
            assert first.token == token
        those.hub.elect("lease")
        for _ in range(200):
            await asyncio.sleep(0.05)
            assert first.token == token
        assert {lease.view.token for lease in others} == {token}


@in_virtual_time
async def test_a_holder_that_dies_with_its_stores_leader_is_replaced_soon_after_the_election() -> None:
    async with candidates() as those:
        first = await those.join("A")
        await until(lambda: first.is_held)
        old_token, second = first.token, await those.join("B")
        those.hub.depose("lease")
        those.hub.disconnect("A")
        await asyncio.sleep(6.0)
        assert not second.is_held
        assert not first.is_held  # its hub is away, which says nothing about the store
        those.hub.elect("lease")
        assert GRACE_SECONDS - 0.2 <= await until(lambda: second.is_held) <= GRACE_SECONDS + 0.5
        assert second.token > old_token


@in_virtual_time
async def test_a_lease_that_nobody_wants_any_more_ends_by_itself() -> None:
    async with candidates() as those:
        first = await those.join("A")
        await until(lambda: first.is_held)
        watcher = await those.join("W", stand=False)
        those.hub.disconnect("A")
        assert SILENT_SECONDS < await until(lambda: watcher.view.holder is None, 30) <= TTL_SECONDS + 1


@in_virtual_time
async def test_a_renewal_that_stands_without_our_knowing_is_found() -> None:
    """The leader died after it took the write and before it told anybody."""
    async with candidates() as those:
        first = await those.join("A")
        await until(lambda: first.is_held)
        token = first.token
        rule = those.hub.drop(those.hub.subjects.store_change("lease", ">"))
        record = LeaseRecord(holder="A", session="s", token=token)
        await those.hub.connect("LOST").store("lease").put(KEY, encode(record), ttl_seconds=TTL_SECONDS)
        await asyncio.sleep(2 * SILENT_SECONDS)
        assert rule.num_caught > 1
        assert first.token == token


def test_the_view_remembers_the_last_few_holders_and_no_more() -> None:
    view = LeaseView()
    for revision in range(1, 3 * KEPT_TERMS):
        record = encode(LeaseRecord(holder=f"P{revision}"))
        view.apply(Entry(key=KEY, value=record, revision=revision, written_at=0.0))
    assert len(view.past_holders) == KEPT_TERMS
    assert view.past_holders[3 * KEPT_TERMS - 1] == f"P{3 * KEPT_TERMS - 1}"
    assert 1 not in view.past_holders


def told(view: LeaseView, revision: int, holder: str, token: int = 0) -> None:
    record = encode(LeaseRecord(holder=holder, token=token))
    view.apply(Entry(key=KEY, value=record, revision=revision, written_at=0.0))


@pytest.mark.parametrize("token", [2**62, 11, -1, 5])
def test_a_token_that_is_made_up_or_anothers_counts_as_free(token: int) -> None:
    """One that lies in the future would shut out everybody for ever, also when its bearer is gone."""
    view = LeaseView()
    told(view, 5, "A")
    told(view, 10, "M", token)
    assert (view.holder, view.token, view.revision, view.largest_token) == (None, 0, 10, 5)
    assert view.past_holders == {5: "A"}
    told(view, 11, "B")
    assert view.accepts("B", 11)


@in_virtual_time
async def test_a_lease_with_a_made_up_token_is_taken_from_its_holder_at_once() -> None:
    async with candidates() as those:
        first = await those.join("A")
        await until(lambda: first.is_held)
        old_token, watcher = first.token, await those.join("W", stand=False)
        record = encode(LeaseRecord(holder="M", session="s", token=2**62))
        await those.hub.connect("M").store("lease").put(KEY, record, ttl_seconds=TTL_SECONDS)
        await until(lambda: first.token > old_token, seconds=1.0)
        await asyncio.sleep(0.5)
        assert watcher.view.accepts("A", first.token)


def test_the_view_knows_who_held_the_lease_as_far_as_it_was_told() -> None:
    view = LeaseView()
    assert view.was_held("A", 5) is None
    told(view, 8, "A", 5)  # we came when it had been renewed already
    told(view, 12, "A", 5)
    assert view.was_held("A", 5) is True
    assert view.was_held("M", 5) is False
    assert view.was_held("M", 10) is False, "that was a renewal of A's"
    assert view.was_held("M", 7) is None, "before our time"
    assert view.was_held("M", 13) is None, "not yet told"
    told(view, 20, "B")
    assert (view.was_held("A", 20), view.was_held("B", 20), view.was_held("A", 5)) == (False, True, True)
    assert view.was_held("M", 10) is False
    assert view.was_held("M", 15) is None, "somebody may have held it between A and B"
    assert view.newest_revision == 20
    view.apply(Entry(key=KEY, value=None, revision=25, written_at=0.0))
    assert (view.holder, view.newest_revision) == (None, 25)


@in_virtual_time
async def test_the_lease_is_proven_by_each_write_that_succeeds_and_by_no_other() -> None:
    async with candidates() as those:
        first = await those.join("A")
        await until(lambda: first.is_held)
        assert first.view.newest_revision >= first.token
        taken_at = first.proven_at
        await asyncio.sleep(2.0)
        renewed_at = first.proven_at
        assert renewed_at > taken_at + 1.0
        those.hub.depose("lease")
        await asyncio.sleep(2.0)
        assert first.is_held
        assert first.proven_at <= renewed_at + 0.75


def test_what_is_no_lease_record_counts_as_free() -> None:
    view = LeaseView()
    view.apply(Entry(key=KEY, value=encode(LeaseRecord(holder="A", session="s", token=3)), revision=5, written_at=0.0))
    assert (view.holder, view.session, view.token) == ("A", "s", 3)
    view.apply(Entry(key=KEY, value=b"\xc1", revision=6, written_at=0.0))
    assert (view.holder, view.session, view.token, view.largest_token) == (None, "", 0, 3)
