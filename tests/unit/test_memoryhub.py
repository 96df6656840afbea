"""What the hub in memory offers beyond the contract: faults on purpose, and time in the test's hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from potluck.errors import AccessError, DeadlineExceededError, HubUnavailableError, NotAdmittedError
from potluck.hub.connection import Delivery, Entry
from potluck.hub.guard.permissions import Permissions
from potluck.hub.stores import STORES
from potluck.sim.memoryhub import MemoryHub
from potluck.sim.virtualclock import VirtualClock

TURNS = 10  # of the event loop: more than any message needs


@pytest.fixture
async def hub() -> AsyncIterator[MemoryHub]:
    hub = MemoryHub("test", clock=VirtualClock())
    yield hub
    for connection in list(hub.connections):
        await connection.close()


async def settle() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def test_all_stores_of_a_run_are_there(hub: MemoryHub) -> None:
    alice = hub.connect("ALICE")
    for store in STORES:
        await alice.store(store.name).put("k", b"1", expected=0)


async def test_dropped_messages_never_arrive(hub: MemoryHub) -> None:
    alice, bob = hub.connect("ALICE"), hub.connect("BOB")
    heard: list[bytes] = []
    await bob.subscribe("p.test.>", lambda delivery: heard.append(delivery.payload))
    rule = hub.drop("p.test.plan.*", count=2)
    for number in range(4):
        await alice.publish("p.test.plan.ALICE", b"plan %d" % number)
        await alice.publish("p.test.beacon.ALICE", b"beacon %d" % number)
    await settle()
    assert heard == [b"beacon 0", b"beacon 1", b"plan 2", b"beacon 2", b"plan 3", b"beacon 3"]
    assert rule.num_caught == 2


async def test_held_messages_arrive_when_released_and_in_order(hub: MemoryHub) -> None:
    alice, bob = hub.connect("ALICE"), hub.connect("BOB")
    heard: list[bytes] = []
    await bob.subscribe("p.test.>", lambda delivery: heard.append(delivery.payload))
    rule = hub.hold("p.test.plan.*")
    for number in range(4):
        await alice.publish("p.test.plan.ALICE", b"%d" % number)
    await alice.publish("p.test.beacon.ALICE", b"beacon")
    await settle()
    assert heard == [b"beacon"]
    rule.release(1)
    await settle()
    assert heard == [b"beacon", b"0"]
    rule.release()
    await alice.publish("p.test.plan.ALICE", b"4")
    await settle()
    assert heard == [b"beacon", b"0", b"1", b"2", b"3", b"4"]


async def test_an_answer_can_be_lost(hub: MemoryHub) -> None:
    alice, bob = hub.connect("ALICE"), hub.connect("BOB")
    asked: list[bytes] = []

    async def answer(delivery: Delivery) -> None:
        asked.append(delivery.payload)
        await delivery.respond(b"yes")

    await bob.subscribe("p.test.ask", answer)
    rule = hub.drop("_INBOX.ALICE.>", count=1)
    with pytest.raises(DeadlineExceededError):
        await alice.request("p.test.ask", b"1", timeout_seconds=0.01)
    assert await alice.request("p.test.ask", b"2", timeout_seconds=60.0) == b"yes"
    assert asked == [b"1", b"2"]
    assert rule.num_caught == 1


async def test_a_lost_change_is_found_with_the_next_one_of_its_key(hub: MemoryHub) -> None:
    alice, bob = hub.connect("ALICE"), hub.connect("BOB")
    seen: list[tuple[str, bytes | None]] = []
    await bob.store("roster").watch(lambda entry: seen.append((entry.key, entry.value)))
    hub.drop("p.test.changed.roster.*", count=2)
    await alice.store("roster").put("a", b"1")
    await alice.store("roster").put("b", b"1")
    await settle()
    assert seen == []
    await alice.store("roster").put("a", b"2")
    await settle()
    assert sorted(seen) == [("a", b"2"), ("b", b"1")]


async def test_queues_take_turns(hub: MemoryHub) -> None:
    alice = hub.connect("ALICE")
    heard: dict[str, list[bytes]] = {"BOB": [], "CAROL": []}
    for name, mine in heard.items():
        await hub.connect(name).subscribe(
            "p.test.jobs", lambda delivery, mine=mine: mine.append(delivery.payload), queue="workers"
        )
    for number in range(4):
        await alice.publish("p.test.jobs", b"%d" % number)
    await settle()
    assert heard == {"BOB": [b"0", b"2"], "CAROL": [b"1", b"3"]}


async def test_what_is_on_its_way_to_somebody_who_goes_is_lost(hub: MemoryHub) -> None:
    alice, bob = hub.connect("ALICE"), hub.connect("BOB")
    heard: list[bytes] = []
    await bob.subscribe("p.test.talk", lambda delivery: heard.append(delivery.payload))
    await alice.publish("p.test.talk", b"lost")
    hub.disconnect("BOB")
    hub.reconnect("BOB")
    await alice.publish("p.test.talk", b"heard")
    await settle()
    assert heard == [b"heard"]


async def test_the_whole_hub_can_be_away(hub: MemoryHub) -> None:
    alice, bob = hub.connect("ALICE"), hub.connect("BOB")
    hub.disconnect()
    for connection in (alice, bob):
        with pytest.raises(HubUnavailableError):
            await connection.publish("p.test.talk", b"")
    hub.reconnect()
    await alice.publish("p.test.talk", b"")
    with pytest.raises(ValueError, match="CAROL"):
        hub.disconnect("CAROL")


async def test_a_refused_peer_stays_out(hub: MemoryHub) -> None:
    refused: list[AccessError] = []
    alice = hub.connect("ALICE", on_refused=refused.append)
    hub.refuse("ALICE")
    assert isinstance(alice.closed_error, NotAdmittedError)
    assert refused == [alice.closed_error]
    hub.reconnect("ALICE")
    assert not alice.is_connected
    with pytest.raises(NotAdmittedError):
        await alice.publish("p.test.talk", b"")


async def test_a_renewed_lease_does_not_expire_with_the_old_one(hub: MemoryHub) -> None:
    assert isinstance(hub.clock, VirtualClock)
    store = hub.connect("ALICE").store("lease")
    seen: list[Entry] = []
    await store.watch(seen.append)
    first = await store.put("coordinator", b"1", ttl_seconds=3)
    hub.clock.advance(2)
    second = await store.put("coordinator", b"2", expected=first, ttl_seconds=3)
    hub.clock.advance(2)
    entry = await store.get("coordinator")
    assert entry is not None
    assert entry.revision == second
    hub.clock.advance(1)
    assert await store.get("coordinator") is None
    await settle()
    assert [each.value for each in seen] == [b"1", b"2", None]
    assert seen[2].written_at - seen[0].written_at == 5


async def test_the_mark_of_a_deletion_goes_by_itself(hub: MemoryHub) -> None:
    assert isinstance(hub.clock, VirtualClock)
    store = hub.connect("ALICE").store("members")
    await store.put("k", b"1")
    await store.delete("k")
    assert len(hub.table("members").versions("")) == 1
    hub.clock.advance(3600)
    assert hub.table("members").versions("") == []


async def test_a_member_may_read_through_the_guard_or_directly(hub: MemoryHub) -> None:
    for subject in (hub.subjects.read("BOB", "roster"), f"$JS.API.DIRECT.GET.{hub.subjects.stream('roster')}"):
        bob = hub.connect("BOB", Permissions(publish=(subject,), subscribe=()))
        assert await bob.store("roster").entries() == []
        assert bob.statistics()["permission_violations"] == 0
