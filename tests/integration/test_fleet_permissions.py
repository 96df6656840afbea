"""What a member of a fleet must not do, tried with a valid member's key and a client that checks nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fleethouse import ALL, add, organiser, worker
from guardhouse import RUN, GuardHouse, Person, open_house
from rawmember import RawMember

from potluck.errors import ConfigurationError
from potluck.hub.access.organise import Done
from potluck.hub.access.queueing import CreateQueue, DeleteQueue, ForgetParts, Purged, PurgeQueue
from potluck.hub.queues import QueueDefinition, QueueSubjects

SUBJECTS = QueueSubjects(RUN)
OTHER = "U" + "B" * 55
MINE, SECRET = "mine", "secret"


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[GuardHouse]:
    async with open_house(tmp_path) as opened:
        await add(opened, MINE)
        await add(opened, SECRET)
        await add(opened, "board", kind="topic")
        yield opened


def forbidden(me: str) -> list[str]:
    """Every kind of subject that a member with all rights on one queue must not publish on."""
    stream = SUBJECTS.stream(SECRET)
    return [
        SUBJECTS.put(SECRET, me),
        SUBJECTS.put(MINE, OTHER),
        SUBJECTS.put("board", me),
        SUBJECTS.part(SECRET, me, "x", 0),
        SUBJECTS.part(MINE, OTHER, "x", 0),
        SUBJECTS.done(SECRET, "x"),
        SUBJECTS.dead(SECRET, me),
        SUBJECTS.dead(MINE, OTHER),
        SUBJECTS.ask(OTHER, "list"),
        SUBJECTS.next(SECRET),
        *(SUBJECTS.read(SECRET, what) for what in ("", "done", "part", "dead")),
        SUBJECTS.read("board"),
        f"$JS.ACK.{stream}.take.1.1.1.1.1",
        f"$JS.API.STREAM.PURGE.{SUBJECTS.stream(MINE)}",
        f"$JS.API.STREAM.DELETE.{SUBJECTS.stream(MINE)}",
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.CONSUMER.CREATE.{SUBJECTS.stream(MINE)}",
        f"$JS.API.CONSUMER.DURABLE.CREATE.{SUBJECTS.stream(MINE)}.other",
        "$JS.API.INFO",
        "$SYS.REQ.SERVER.PING",
        f"_INBOX.{OTHER}.x",
        f"p.{RUN}.beacon.{me}",
        "q.brewery.put.mine." + me,
    ]


async def raw_worker(house: GuardHouse) -> tuple[RawMember, Person]:
    person = await house.newcomer(roles=("worker",), queues={MINE: ALL})
    raw = await RawMember.open(house.hub.address().servers[0], person.seed, "queue")
    house.close_later(raw.close)
    return raw, person


async def test_no_forbidden_subject_can_be_published_on(house: GuardHouse) -> None:
    raw, person = await raw_worker(house)
    for subject in forbidden(person.peer):
        raw.publish(subject, b"forged", f"_INBOX.{person.peer}.answer")
        heard = await raw.settle()
        assert any("permissions violation" in error.lower() for error in heard.errors), subject


async def test_nobody_elses_items_can_be_listened_to(house: GuardHouse) -> None:
    raw, person = await raw_worker(house)
    for subject in (
        ">",
        "q.>",
        SUBJECTS.put(MINE, "*"),
        SUBJECTS.news("board", "*"),
        f"_INBOX.{OTHER}.>",
        "_R_.>",
        "$JS.>",
    ):
        raw.subscribe(subject)
        heard = await raw.settle()
        assert any("permissions violation" in error.lower() for error in heard.errors), subject
    assert person.peer


async def test_a_reply_subject_reaches_no_queue(house: GuardHouse) -> None:
    """The hub never checks where a request wants its answer: an item, or an acknowledgement, must land nowhere."""
    raw, person = await raw_worker(house)
    host = await organiser(house)
    before = {depth.definition.name: depth.items for depth in await host.list_queues()}
    me = person.peer
    for reply in (SUBJECTS.put(SECRET, OTHER), SUBJECTS.put("board", OTHER), SUBJECTS.done(SECRET, "x")):
        raw.publish(SUBJECTS.put(MINE, me), b"forged", reply)
        raw.publish(SUBJECTS.next(MINE), b'{"batch": 10, "no_wait": true}', reply)
        raw.publish(SUBJECTS.read(MINE), b'{"seq": 1, "next_by_subj": ">", "batch": 10}', reply)
        raw.publish(SUBJECTS.ask(me, "list"), b"\x80", reply)
    await raw.settle()
    after = {depth.definition.name: depth.items for depth in await host.list_queues()}
    assert after[MINE] == before[MINE] + 3, "the legal part was done"
    assert (after[SECRET], after["board"]) == (before[SECRET], before["board"])
    assert next(d for d in await host.list_queues() if d.definition.name == SECRET).done == 0


async def test_a_worker_is_on_no_other_lane_and_a_stranger_on_none(house: GuardHouse) -> None:
    raw, person = await raw_worker(house)
    main = await RawMember.open(house.hub.address().servers[0], person.seed, "main")
    house.close_later(main.close)
    main.publish(SUBJECTS.put(MINE, person.peer), b"x")
    assert (await main.settle()).errors, "queues are not on the main lane"
    stranger = Person(house)
    with pytest.raises((AssertionError, ConnectionError)):
        await RawMember.open(house.hub.address().servers[0], stranger.seed, "queue")
    raw.publish(SUBJECTS.put(MINE, person.peer), b"garbage")
    assert (await raw.settle()).errors == []


async def test_what_is_no_item_is_thrown_away(house: GuardHouse) -> None:
    raw, person = await raw_worker(house)
    raw.publish(SUBJECTS.put(MINE, person.peer), b"\x93NUMPY, or whatever a pickle looks like")
    await raw.settle()
    taker = await worker(house, {MINE: ALL})
    queue = taker.queue(MINE)
    await queue.put("good")
    taken = []
    for _ in range(20):
        taken += await queue.take(10, wait_seconds=1)
        if taken:
            break
    assert [item.value for item in taken] == ["good"]
    assert queue.counts["unreadable"] >= 1
    await taken[0].done()


async def test_only_organisers_change_queues(house: GuardHouse) -> None:
    fleet = await worker(house, {MINE: ALL})
    requests = [
        ("create", CreateQueue(definition=QueueDefinition(name="more")), Done),
        ("delete", DeleteQueue(name=MINE), Done),
        ("purge", PurgeQueue(name=MINE), Purged),
    ]
    for verb, request, kind in requests:
        with pytest.raises(ConfigurationError, match="only an organiser"):
            await fleet.member.ask(verb, request, kind)
    with pytest.raises(ConfigurationError, match="not the parts"):
        await fleet.member.ask("forget", ForgetParts(name=MINE, putter=">", item="*"), Purged)
    with pytest.raises(Exception, match="no right on secret"):
        await fleet.member.ask("forget", ForgetParts(name=SECRET, putter=OTHER, item="x"), Purged)
    with pytest.raises(ConfigurationError, match="there is no request"):
        await fleet.member.ask("nonsense", DeleteQueue(name=MINE), Done)
