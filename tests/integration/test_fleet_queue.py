"""Queues and topics on a real hub: nothing acknowledged is lost, nothing done comes back, nothing grows for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleethouse import ALL, add, connect, kill_and_restart_server, organiser, worker
from guardhouse import PATIENCE_SECONDS, GuardHouse, open_house

from potluck.errors import ConfigurationError, HubUnavailableError, PermissionDeniedError, QueueFullError
from potluck.fleet import queue as queues
from potluck.fleet.queue import Item
from potluck.fleet.sync import AsyncFleet
from potluck.hub.nats.connection import NatsConnection
from potluck.testing.polling import poll_until


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[GuardHouse]:
    async with open_house(tmp_path) as opened:
        yield opened


async def take_all(fleet: AsyncFleet, name: str, number: int) -> list[Item[object]]:
    """So many items, or as many as come in time."""
    taken: list[Item[object]] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(taken) < number:
            taken += await fleet.queue(name).take(number - len(taken), wait_seconds=5)
    return taken


async def test_each_item_goes_to_one_taker_and_is_done_once(house: GuardHouse) -> None:
    await add(house, "jobs")
    putter = await worker(house, {"jobs": ("put",)})
    one, two = await worker(house, {"jobs": ("take",)}), await worker(house, {"jobs": ("take",)})
    for number in range(20):
        assert await putter.queue("jobs").put({"number": number, "x": np.full(3, number)}, id=f"job-{number}")
    assert not await putter.queue("jobs").put({"number": 7}, id="job-7"), "an id is put once"
    first, second = await take_all(one, "jobs", 10), await take_all(two, "jobs", 10)
    values = [item.value for item in (*first, *second)]
    assert sorted(value["number"] for value in values) == list(range(20))  # type: ignore[index]
    assert all(item.putter == putter.member.peer and item.tries == 1 for item in first)
    for item in (*first, *second):
        await item.done()
        await item.done()  # idempotent
    assert not await putter.queue("jobs").put({"number": 3}, id="job-3"), "also an id that is done"
    assert await one.queue("jobs").take(5) == []
    [depth] = await one.list_queues()
    assert (depth.items, depth.out, depth.done, depth.rights) == (0, 0, 20, ("take",))


async def test_again_and_dead_letters(house: GuardHouse) -> None:
    await add(house, "jobs", tries=2)
    fleet = await worker(house, {"jobs": ALL})
    queue = fleet.queue("jobs")
    await queue.put("poison", id="p")
    for tries in (1, 2):
        [item] = await take_all(fleet, "jobs", 1)
        assert item.tries == tries
        await item.again(after_seconds=0.2)
    assert await queue.take(1, wait_seconds=3) == []
    [letter] = await queue.peek(dead=True)
    assert (letter.value, letter.id, letter.putter) == ("poison", "p", fleet.member.peer)
    [depth] = await fleet.list_queues()
    assert (depth.items, depth.dead) == (0, 1)


async def test_dead_letters_are_put_back_by_whoever_may_take(
    house: GuardHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "LETTERS_AT_ONCE", 2)
    await add(house, "jobs", tries=1)
    fleet = await worker(house, {"jobs": ALL})
    queue = fleet.queue("jobs")
    values = [*range(4), np.zeros(150_000)]
    for number, value in enumerate(values):
        await queue.put(value, id=f"j-{number}")
    for item in await take_all(fleet, "jobs", 5):
        await item.again()

    async def buried() -> bool:
        assert await queue.take(5, wait_seconds=0.5) == []
        return (await fleet.list_queues())[0].dead == 5

    await poll_until(buried, PATIENCE_SECONDS, "five dead letters")
    assert await queue.retry_dead() == 5
    assert await queue.retry_dead() == 0
    [depth] = await fleet.list_queues()
    assert (depth.items, depth.dead) == (5, 0)
    items = await take_all(fleet, "jobs", 5)
    assert sorted(np.size(item.value) for item in items) == [1, 1, 1, 1, 150_000]
    for item in items:
        await item.done()
    assert (await fleet.list_queues())[0].parts_bytes == 0
    assert fleet.queue("jobs", int) is not queue, "items are checked by the type that was asked for"


async def test_a_taker_that_dies_gives_its_items_back(house: GuardHouse) -> None:
    await add(house, "jobs", lease_seconds=2)  # a busy machine may hold its taker up for one
    mortal, heir = await worker(house, {"jobs": ALL}), await worker(house, {"jobs": ALL})
    await mortal.queue("jobs").put("work")
    [held] = await take_all(mortal, "jobs", 1)
    await asyncio.sleep(3.0)  # longer than the lease: it is alive, and says so
    assert await heir.queue("jobs").take() == []
    await mortal.member.hub.close()  # it says nothing any more
    [taken] = await take_all(heir, "jobs", 1)
    assert taken.value == held.value
    assert taken.tries == 2


async def test_what_was_acknowledged_survives_a_killed_hub_and_what_is_done_stays_done(house: GuardHouse) -> None:
    await add(house, "jobs", lease_seconds=1)
    fleet = await worker(house, {"jobs": ALL})
    queue = fleet.queue("jobs")
    await asyncio.gather(*(queue.put(number, id=str(number)) for number in range(40)))
    held = await take_all(fleet, "jobs", 20)
    done = {item.value for item in held[:10]}
    await asyncio.gather(*(item.done() for item in held[:10]))
    await kill_and_restart_server(house)
    for number in done:
        await queue.put(number, id=str(number))  # ids that are done are remembered through the death
    seen: set[object] = {item.value for item in held[10:]}
    async with asyncio.timeout(2 * PATIENCE_SECONDS):
        while seen | done != set(range(40)) or (await fleet.list_queues())[0].items > 0:
            for item in await queue.take(40, wait_seconds=2):
                assert item.value not in done, "it came back after done() had returned"
                seen.add(item.value)
                await item.done()
            for item in [each for each in held[10:] if not each._is_over]:
                await item.done()
    assert seen == set(range(40)) - done


async def test_a_put_waits_through_an_outage(house: GuardHouse) -> None:
    await add(house, "jobs")
    fleet = await worker(house, {"jobs": ALL}, buffer_bytes=1000)
    queue = fleet.queue("jobs")
    await queue.put(0)
    killing = asyncio.create_task(kill_and_restart_server(house))
    await poll_until(lambda: not fleet.member.hub.is_connected, PATIENCE_SECONDS, "the hub to be away")
    await queue.send(bytes(600), id="later")
    with pytest.raises(QueueFullError, match="wait for jobs already"):
        await queue.send(bytes(600))
    assert await queue.put(1, id="patient")
    await killing
    await queue.flush(PATIENCE_SECONDS)
    assert {item.id for item in await take_all(fleet, "jobs", 3)} >= {"later", "patient"}


async def test_a_full_queue_does_as_its_owner_wants(house: GuardHouse) -> None:
    for policy in ("block", "refuse", "drop"):
        await add(house, policy, max_items=3, when_full=policy)
    fleet = await worker(house, {"*": ALL})
    for policy in ("block", "refuse", "drop"):
        for number in range(3):
            await fleet.queue(policy).put(number)
    with pytest.raises(QueueFullError):
        await fleet.queue("refuse").put(3)
    await fleet.queue("drop").put(3)
    assert [item.value for item in await take_all(fleet, "drop", 3)] == [1, 2, 3]
    with pytest.raises(QueueFullError):
        await fleet.queue("block").put(3, timeout_seconds=0.3)
    blocked = asyncio.create_task(fleet.queue("block").put(3))
    [item] = await take_all(fleet, "block", 1)
    await item.done()
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await blocked


async def test_large_items_travel_in_parts_that_go_when_it_is_done(house: GuardHouse) -> None:
    await add(house, "jobs", max_bytes=40_000_000)
    fleet = await worker(house, {"jobs": ALL})
    large = np.random.default_rng(1).random(1_500_000)  # 12 MB
    await fleet.queue("jobs").put(large, id="an id with spaces")
    [item] = await take_all(fleet, "jobs", 1)
    np.testing.assert_array_equal(item.value, large)
    assert (await fleet.list_queues())[0].parts_bytes > large.nbytes
    await item.done()
    assert (await fleet.list_queues())[0].parts_bytes == 0


async def test_a_topic_keeps_the_newest_and_tells_followers(house: GuardHouse) -> None:
    await add(house, "weights", kind="topic")
    trainer, reader = await worker(house, {"weights": ("put",)}), await worker(house, {"weights": ("take",)})
    topic = reader.topic("weights")
    assert await topic.latest() is None
    versions = topic.follow()
    await trainer.topic("weights").publish({"step": 1})
    async with asyncio.timeout(PATIENCE_SECONDS):
        first = await anext(versions)
        assert first.value == {"step": 1}
        assert first.publisher == trainer.member.peer
        large = np.arange(400_000.0)
        for step in range(3):
            await trainer.topic("weights").publish(large + step)
        while (newest := await anext(versions)).value[0] != 2:
            pass
        await kill_and_restart_server(house)
        kept = await topic.latest()
        assert kept is not None
        assert kept.number == newest.number
        np.testing.assert_array_equal(kept.value, large + 2)
        await trainer.topic("weights").publish("after")
        assert (await anext(versions)).value == "after"
    await versions.aclose()
    [depth] = await reader.list_queues()
    assert depth.parts_bytes == 0, "parts of versions that nobody can want are dropped"


async def test_errors_say_what_is_missing(house: GuardHouse) -> None:
    await add(house, "jobs")
    await add(house, "weights", kind="topic")
    fleet = await worker(house, {"jobs": ("put",), "weights": ("take",)})
    with pytest.raises(PermissionDeniedError, match="may not take on jobs"):
        await fleet.queue("jobs").take()
    with pytest.raises(ConfigurationError, match="there is no queue nothing"):
        await fleet.queue("nothing").put(1)
    with pytest.raises(ConfigurationError, match="is a topic, not a queue"):
        await fleet.queue("weights").take()
    with pytest.raises(ConfigurationError, match="cannot be put into a queue"):
        await fleet.queue("jobs").put(object())
    with pytest.raises(PermissionDeniedError, match="may not put on weights"):
        await fleet.topic("weights").publish(1)
    await add(house, "weights", kind="topic", max_items=7)
    with pytest.raises(ConfigurationError, match="is a topic already"):
        await add(house, "weights")


async def test_a_queue_made_later_can_be_used_at_once(house: GuardHouse) -> None:
    person = await house.newcomer(roles=("worker",), queues={"*": ALL})
    fleet = await connect(house, person, is_member=True)
    with pytest.raises(ConfigurationError, match="may use: none"):
        await fleet.queue("late").put(1)
    await add(house, "late")
    await fleet.queue("late").put(1)
    assert [item.value for item in await take_all(fleet, "late", 1)] == [1]


async def test_a_banned_worker_is_cut_off(house: GuardHouse) -> None:
    await add(house, "jobs")
    fleet = await worker(house, {"jobs": ALL}, patience_seconds=1.0)
    await fleet.queue("jobs").put(1)
    assert await (await house.organiser()).ban(fleet.member.peer) >= 1
    await poll_until(lambda: fleet.member.hub.closed_error is not None, PATIENCE_SECONDS, "the worker to be cut off")
    with pytest.raises((PermissionDeniedError, HubUnavailableError, Exception), match="banned"):
        await fleet.queue("jobs").put(2)
    host = await organiser(house)
    assert (await host.list_queues())[0].items == 1


async def test_a_queue_that_was_made_after_the_connection_can_be_used_at_once(
    house: GuardHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await organiser(house)
    await add(house, "later")
    connect_now = NatsConnection.connect
    connected: list[NatsConnection] = []

    async def connect(*arguments: Any, **named: Any) -> NatsConnection:
        connected.append(await connect_now(*arguments, **named))
        return connected[-1]

    monkeypatch.setattr(NatsConnection, "connect", connect)
    assert [depth.definition.name for depth in await fleet.list_queues()] == [
        "later"
    ]  # that it was seen is no right yet
    await asyncio.gather(*(fleet.queue("later").put("item") for _ in range(20)))
    assert len(connected) == 1, "one connection for all who asked for it at the same time"
    assert [item.value for item in await take_all(fleet, "later", 20)] == ["item"] * 20
