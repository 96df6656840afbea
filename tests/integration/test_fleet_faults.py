"""Queues in trouble: the hub killed again and again, an item that kills its takers, a full disk, an item of 1 GiB."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from fleethouse import ALL, add, kill_and_restart_server, worker
from guardhouse import PATIENCE_SECONDS, RUN, GuardHouse, open_house
from runhouse import open_run

from potluck.errors import PotluckError
from potluck.fleet.member import FleetConfig, FleetMember
from potluck.fleet.sync import AsyncFleet
from potluck.hub.access.organise import Done
from potluck.hub.access.queueing import CreateQueue
from potluck.hub.keys import HubKeys
from potluck.hub.queues import QueueDefinition
from potluck.peer.identity import Identity
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children
from potluck.testing.queuework import QueueWork
from potluck.testing.smalldisk import fill

TAKER_PROGRAM = Path(__file__).with_name("poisonedtaker.py")
DISK_BYTES = 64 << 20


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[GuardHouse]:
    async with open_house(tmp_path) as opened:
        yield opened


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
async def test_kills_of_the_hub_lose_nothing_and_bring_nothing_back_that_is_done(house: GuardHouse, kills: int) -> None:
    await add(house, "jobs", lease_seconds=2, tries=1000)
    putter, taker = await worker(house, {"jobs": ALL}), await worker(house, {"jobs": ALL})
    work = QueueWork(putter.queue("jobs"), taker.queue("jobs"))
    for _ in range(kills):
        await work.until_more(60)
        await kill_and_restart_server(house)
    await work.until_more(60)
    await work.finish()
    assert taker.member.hub.statistics()["reconnects"] >= kills, "each kill was felt"
    assert work.lost == set()
    assert work.again_after_done == []
    assert work.num_handed_again > 0, "what is let go comes back"
    counts = taker.queue("jobs").counts
    assert 0 < counts["looked_up"] < counts["taken"] + counts["already_done"], "some were looked up, and not all"


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_an_outage_of_twenty_seconds_is_bridged(house: GuardHouse) -> None:
    await add(house, "jobs", lease_seconds=2, tries=1000)
    putter, taker = await worker(house, {"jobs": ALL}), await worker(house, {"jobs": ALL})
    await putter.queue("jobs").put("before", id="before")
    outage = asyncio.create_task(kill_and_restart_server(house, away_seconds=20.0))
    await poll_until(lambda: not putter.member.hub.is_connected, PATIENCE_SECONDS, "the outage")
    for number in range(100):
        await putter.queue("jobs").send(f"meanwhile {number}", id=f"m-{number}")
    await asyncio.gather(outage, putter.queue("jobs").put("put", id="put"), putter.queue("jobs").flush(60))
    seen: set[str] = set()
    async with asyncio.timeout(2 * PATIENCE_SECONDS):
        while len(seen) < 102:
            for item in await taker.queue("jobs").take(20, wait_seconds=1):
                seen.add(item.value)
                await item.done()


async def test_an_item_that_kills_its_takers_becomes_a_dead_letter(
    house: GuardHouse, children: Children, tmp_path: Path
) -> None:
    await add(house, "jobs", lease_seconds=1, tries=2)
    fleet = await worker(house, {"jobs": ALL})
    await fleet.queue("jobs").put("poison", id="p")
    person = await house.newcomer(roles=("worker",), queues={"jobs": ("take",)})
    seed_file = tmp_path / "taker.seed"
    seed_file.write_bytes(person.seed)
    for tries in (1, 2):
        taker = children.spawn(
            [sys.executable, TAKER_PROGRAM, house.hub.address().servers[0], RUN, seed_file, "jobs"], name="taker"
        )
        assert await taker.until_exit(2 * PATIENCE_SECONDS) == -signal.SIGKILL, taker.tail()
        assert f"took poison at try {tries}" in taker.output()
    await fleet.queue("jobs").put("food", id="f")

    async def eaten() -> bool:
        for item in await fleet.queue("jobs").take(5, wait_seconds=1):
            assert item.value == "food"
            await item.done()
        [depth] = await fleet.list_queues()
        return (depth.items, depth.dead) == (0, 1)

    await poll_until(eaten, PATIENCE_SECONDS, "the poison to be buried")
    [letter] = await fleet.queue("jobs").peek(dead=True)
    assert (letter.id, letter.value) == ("p", "poison")


@pytest.mark.timeout(300)
async def test_a_full_disk_of_the_hub_loses_nothing_that_was_acknowledged(mount_disk: Callable[[int], Path]) -> None:
    disk = mount_disk(DISK_BYTES)
    async with open_run(disk, peer=None) as house:
        keys = HubKeys.load_or_create(house.folder / "identity")
        config = FleetConfig(patience_seconds=3.0)
        member = FleetMember(house.host.address, RUN, Identity(keys.organiser_seed), config)
        await member.open(is_member=True)
        async with AsyncFleet(member) as fleet:
            definition = QueueDefinition(name="jobs", max_bytes=16 << 20, lease_seconds=2)
            await member.ask("create", CreateQueue(definition=definition), Done)
            queue = fleet.queue("jobs")
            kept: set[int] = set()
            for number in range(50):
                await queue.put({"number": number, "filling": bytes(20_000)}, id=f"i-{number}")
                kept.add(number)
            ballast = fill(disk)
            refused = 0
            for number in range(50, 200):
                try:
                    await queue.put({"number": number, "filling": bytes(20_000)}, id=f"i-{number}", timeout_seconds=1)
                    kept.add(number)
                except PotluckError:
                    refused += 1
                    if refused == 3:
                        break
            assert refused, "the disk was full"
            ballast.unlink()

            async def works_again() -> bool:
                try:
                    return await queue.put({"number": 1000, "filling": b""}, id="later")
                except PotluckError:
                    return False

            await poll_until(works_again, 4 * PATIENCE_SECONDS, "the hub to take items again")
            seen: set[int] = set()
            async with asyncio.timeout(2 * PATIENCE_SECONDS):
                while not seen >= kept | {1000}:
                    for item in await queue.take(20, wait_seconds=1):
                        seen.add(item.value["number"])
                        await item.done()


@pytest.mark.parametrize(
    "size",
    [8 << 20, pytest.param((1 << 30) - (1 << 16), marks=[pytest.mark.soak, pytest.mark.timeout(900)])],
)
async def test_a_huge_item_arrives_whole(house: GuardHouse, size: int) -> None:
    await add(house, "jobs", max_bytes=2 << 30)
    putter, taker = await worker(house, {"jobs": ("put",)}), await worker(house, {"jobs": ("take",)})
    block = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    huge = np.resize(block, size)
    digest = hashlib.sha256(huge).hexdigest()
    await putter.queue("jobs").put(huge)
    del huge
    [item] = await taker.queue("jobs").take(1, wait_seconds=PATIENCE_SECONDS)
    assert item.value.nbytes == size
    assert hashlib.sha256(item.value).hexdigest() == digest
    await item.done()
    [depth] = await taker.list_queues()
    assert (depth.items, depth.parts_bytes) == (0, 0)
