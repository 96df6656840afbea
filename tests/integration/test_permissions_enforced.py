"""What a member must not do is tried with a real member's credentials on a real hub: nothing may arrive."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from guardhouse import PATIENCE_SECONDS, SUBJECTS, GuardHouse, Person, open_house
from rawmember import RawMember

from potluck.errors import PermissionDeniedError, RevisionConflictError
from potluck.hub.connection import Delivery
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.stores import STORES, readable_stores
from potluck.testing.polling import poll_until

OTHER = "U" + "B" * 55
FORGED = b"forged"
OTHER_RUN = "p.brewery.beacon." + OTHER


def foreign_subjects(me: str, *, coordinates: bool) -> list[str]:
    """Every kind of subject that a member must not publish on."""
    subjects = [
        SUBJECTS.lobby(me),
        SUBJECTS.lobby(OTHER),
        SUBJECTS.card(OTHER),
        SUBJECTS.beacon(OTHER),
        SUBJECTS.leave(OTHER),
        SUBJECTS.ask(OTHER, "time"),
        SUBJECTS.organise(me, "invite"),
        SUBJECTS.organise(OTHER, "invite"),
        SUBJECTS.relay(me, OTHER),
        SUBJECTS.relay(OTHER, OTHER),
        SUBJECTS.plan(OTHER),
        SUBJECTS.news(OTHER, "loss"),
        f"_INBOX.{OTHER}.x",
        f"_INBOX.{me}.lobby",
        "$SYS.REQ.USER.AUTH",
        "$SYS.REQ.SERVER.PING",
        "$SYS.ACCOUNT.RUN.DISCONNECT",
        "$JS.API.INFO",
        "$JS.API.STREAM.CREATE.mine",
        "$JS.API.STREAM.NAMES",
        f"$JS.API.STREAM.DELETE.{SUBJECTS.stream('roster')}",
        f"$JS.API.STREAM.PURGE.{SUBJECTS.stream('lineage')}",
        f"$JS.API.STREAM.MSG.DELETE.{SUBJECTS.stream('lineage')}",
        f"$JS.API.STREAM.MSG.GET.{SUBJECTS.stream('invites')}",
        f"$JS.API.CONSUMER.CREATE.{SUBJECTS.stream('roster')}",
        f"$JS.API.CONSUMER.CREATE.{SUBJECTS.stream('invites')}.mine.x",
        "anything",
        SUBJECTS.root,
        OTHER_RUN,
    ]
    for store in STORES:
        subjects.append(SUBJECTS.store_write(store.name, me))
        subjects.append(SUBJECTS.write(OTHER, store.name, me))
        if store.writers == "guard" or not coordinates:
            subjects.append(SUBJECTS.write(me, store.name, me))
        subjects.append(SUBJECTS.store_change(store.name, me))
        stream = SUBJECTS.stream(store.name)
        subjects += [f"$JS.API.DIRECT.GET.{stream}", f"$JS.API.DIRECT.GET.{stream}.{SUBJECTS.root}.kv.{me}"]
        if store.readers == "guard":
            subjects.append(SUBJECTS.read(me, store.name))
        subjects.append(SUBJECTS.read(OTHER, store.name))
    if not coordinates:
        subjects += [SUBJECTS.plan(me)]
    return subjects


def foreign_interests(me: str) -> list[str]:
    """Every kind of subject that a member must not hear."""
    interests = [
        ">",
        "*",
        "p.>",
        f"{SUBJECTS.root}.>",
        f"{SUBJECTS.root}.*.{me}",
        "_INBOX.>",
        f"_INBOX.{OTHER}.>",
        "_INBOX.*.lobby",
        "$SYS.>",
        "$SYS.REQ.USER.AUTH",
        "$JS.>",
        "$JS.API.>",
        "$KV.>",
        SUBJECTS.lobby("*"),
        SUBJECTS.card("*"),
        SUBJECTS.leave("*"),
        SUBJECTS.ask("*", "time"),
        SUBJECTS.organise("*", "*"),
        SUBJECTS.organise(me, "invite"),
        SUBJECTS.relay(OTHER, "*"),
        SUBJECTS.relay("*", "*"),
        SUBJECTS.relay("*", me),
        f"{SUBJECTS.root}.kv.>",
        f"{SUBJECTS.root}.changed.>",
        OTHER_RUN,
    ]
    for store in STORES:
        interests.append(SUBJECTS.store_write(store.name, ">"))
        if store.readers == "guard":
            interests.append(SUBJECTS.store_change(store.name, ">"))
    return interests


@dataclass
class Eavesdropper:
    """Hears all that goes through the run's account, in the guard's name."""

    heard: list[str] = field(default_factory=list)
    forged: list[str] = field(default_factory=list)  # the guard itself uses many of the subjects that members must not

    def take(self, delivery: Delivery) -> None:
        self.heard.append(delivery.subject)
        if delivery.payload == FORGED:
            self.forged.append(delivery.subject)


async def eavesdrop(house: GuardHouse) -> tuple[Eavesdropper, NatsConnection]:
    ear = Eavesdropper()
    connection = await house.connect(house.keys.guard_seed, "guard")
    for subject in ("p.>", "_INBOX.>", "anything", "$JS.>"):
        await connection.subscribe(subject, ear.take)
    return ear, connection


async def open_raw(house: GuardHouse, person: Person, name: str = "main") -> RawMember:
    raw = await RawMember.open(house.hub.address().servers[0], person.seed, name)
    house.close_later(raw.close)
    return raw


async def last_word(house: GuardHouse, connection: NatsConnection, ear: Eavesdropper) -> None:
    """Wait until something that was published after all the rest was heard: the ear is not deaf, and all is told."""
    await connection.publish(SUBJECTS.news(house.host.peer, "end"), b"")
    await poll_until(lambda: SUBJECTS.news(house.host.peer, "end") in ear.heard, PATIENCE_SECONDS, "the last word")


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[GuardHouse]:
    async with open_house(tmp_path) as opened:
        yield opened


@pytest.mark.parametrize("coordinates", [False, True])
async def test_nothing_forbidden_that_is_published_arrives(house: GuardHouse, coordinates: bool):
    ann = await house.newcomer(coordinates=coordinates, trusted=True)
    raw = await open_raw(house, ann)
    ear, trusted = await eavesdrop(house)
    subjects = foreign_subjects(ann.peer, coordinates=coordinates)
    for subject in subjects:
        raw.publish(subject, FORGED)
        raw.publish(subject, FORGED, reply=f"_INBOX.{ann.peer}.x")
        assert len((await raw.settle()).errors) == 2, subject
    raw.publish(SUBJECTS.news(ann.peer, "allowed"), FORGED)
    assert (await raw.settle()).errors == []
    await last_word(house, trusted, ear)
    assert ear.forged == [SUBJECTS.news(ann.peer, "allowed")]
    assert house.guard.statistics().get("task_errors", 0) == 0


@pytest.mark.parametrize("coordinates", [False, True])
async def test_nothing_forbidden_is_heard(house: GuardHouse, coordinates: bool):
    ann = await house.newcomer(coordinates=coordinates, trusted=True)
    raw = await open_raw(house, ann)
    for interest in foreign_interests(ann.peer):
        raw.subscribe(interest)
        raw.subscribe(interest, queue="guard")
        assert len((await raw.settle()).errors) == 2, interest
    raw.subscribe(SUBJECTS.news("*", ">"))
    assert (await raw.settle()).errors == []
    invite, _ = await (await house.organiser()).create_invite()
    ear, trusted = await eavesdrop(house)
    secrets = [
        subject
        for subject in foreign_subjects(ann.peer, coordinates=coordinates)
        if not subject.startswith("$") and subject != SUBJECTS.news(OTHER, "loss")
    ]
    for subject in [*secrets, SUBJECTS.relay(OTHER, house.host.peer)]:
        # Others' beacons and plans, and changes of open stores, may be heard; it has not subscribed to those here.
        await trusted.publish(subject, invite.secret_hash.encode())
    await last_word(house, trusted, ear)
    heard: list[str] = []

    async def heard_the_last_word() -> bool:
        heard.extend((await raw.settle()).messages)
        return SUBJECTS.news(house.host.peer, "end") in heard

    await poll_until(heard_the_last_word, PATIENCE_SECONDS, "the last word")
    assert heard == [SUBJECTS.news(house.host.peer, "end")]


async def test_a_stranger_hears_and_says_nothing(house: GuardHouse):
    stranger = Person(house)
    raw = await open_raw(house, stranger, "lobby")
    ear, trusted = await eavesdrop(house)
    hidden = [
        *foreign_interests(stranger.peer),
        SUBJECTS.beacon("*"),
        SUBJECTS.plan("*"),
        SUBJECTS.news("*", ">"),
        SUBJECTS.relay(stranger.peer, "*"),
        *(SUBJECTS.store_change(store.name, ">") for store in readable_stores()),
    ]
    for interest in hidden:
        raw.subscribe(interest)
        assert len((await raw.settle()).errors) == 1, interest
    forbidden = [
        SUBJECTS.card(stranger.peer),
        SUBJECTS.beacon(stranger.peer),
        SUBJECTS.leave(stranger.peer),
        SUBJECTS.ask(stranger.peer, "time"),
        SUBJECTS.news(stranger.peer, "x"),
        SUBJECTS.relay(OTHER, stranger.peer),
        *(SUBJECTS.read(stranger.peer, store.name) for store in readable_stores()),
        *(s for s in foreign_subjects(stranger.peer, coordinates=False) if s != SUBJECTS.lobby(stranger.peer)),
    ]
    for subject in forbidden:
        raw.publish(subject, FORGED)
        assert len((await raw.settle()).errors) == 1, subject
    await last_word(house, trusted, ear)
    assert ear.forged == []
    assert (await raw.settle()).messages == []


async def test_the_bulk_lane_carries_packets_alone(house: GuardHouse):
    ann = await house.newcomer(coordinates=True, organiser=True)
    raw = await open_raw(house, ann, "bulk")
    ear, trusted = await eavesdrop(house)
    for interest in [*foreign_interests(ann.peer), SUBJECTS.beacon("*"), f"_INBOX.{ann.peer}.>"]:
        raw.subscribe(interest)
        assert len((await raw.settle()).errors) == 1, interest
    subjects = [
        *foreign_subjects(ann.peer, coordinates=False),
        SUBJECTS.beacon(ann.peer),
        SUBJECTS.card(ann.peer),
        SUBJECTS.write(ann.peer, "lease", "coordinator"),
    ]
    for subject in subjects:
        raw.publish(subject, FORGED)
        assert len((await raw.settle()).errors) == 1, subject
    raw.subscribe(SUBJECTS.relay(ann.peer, "*"))
    raw.publish(SUBJECTS.relay(OTHER, ann.peer), b"packet")
    assert (await raw.settle()).errors == []
    await last_word(house, trusted, ear)
    assert SUBJECTS.relay(OTHER, ann.peer) in ear.heard
    assert ear.forged == []
    await trusted.publish(SUBJECTS.relay(ann.peer, OTHER), b"packet")
    heard: list[str] = []

    async def heard_the_packet() -> bool:
        heard.extend((await raw.settle()).messages)
        return bool(heard)

    await poll_until(heard_the_packet, PATIENCE_SECONDS, "the packet")
    assert heard == [SUBJECTS.relay(ann.peer, OTHER)]


async def test_no_answer_can_be_sent_where_the_asker_may_not_publish(house: GuardHouse):
    """A hub answers wherever a request says. Nobody who would may be asked by a member with a foreign reply subject."""
    ann = await house.newcomer()
    await ann.join()
    raw = await open_raw(house, ann)
    ear, trusted = await eavesdrop(house)
    targets = [
        SUBJECTS.plan(house.host.peer),
        SUBJECTS.beacon(house.host.peer),
        SUBJECTS.relay(house.host.peer, OTHER),
        SUBJECTS.store_write("lineage", "1"),
        SUBJECTS.store_write("members", ann.peer),
    ]
    wanted = msgspec.json.encode({"last_by_subj": SUBJECTS.store_write("roster", ann.peer)})
    questions = [
        (f"$JS.API.DIRECT.GET.{SUBJECTS.stream('roster')}", wanted),
        (f"$JS.API.DIRECT.GET.{SUBJECTS.stream('roster')}.{SUBJECTS.store_write('roster', ann.peer)}", b""),
        (SUBJECTS.read(ann.peer, "roster"), wanted),
        (SUBJECTS.ask(ann.peer, "time"), b""),
        (SUBJECTS.card(ann.peer), b""),
        (SUBJECTS.leave(ann.peer), b""),
    ]
    for target in targets:
        for subject, payload in questions:
            raw.publish(subject, payload, reply=target)
    assert len((await raw.settle()).errors) == 2 * len(targets)
    await poll_until(
        lambda: house.guard.statistics().get("misdirected_replies", 0) == 4 * len(targets),
        PATIENCE_SECONDS,
        "the guard to hold its answers back",
    )
    await last_word(house, trusted, ear)
    assert not set(targets) & set(ear.heard)
    assert await trusted.store("lineage").entries() == []


async def test_no_acknowledgement_can_be_sent_where_a_coordinator_may_not_publish(house: GuardHouse):
    ann = await house.newcomer(coordinates=True)
    raw = await open_raw(house, ann)
    ear, trusted = await eavesdrop(house)
    targets = [
        SUBJECTS.plan(house.host.peer),
        SUBJECTS.store_write("manifest", "run"),
        SUBJECTS.store_write("members", ann.peer),
        f"$JS.API.STREAM.PURGE.{SUBJECTS.stream('lineage')}",
        f"_INBOX.{house.host.peer}.x",
        "",
    ]
    for target in targets:
        raw.publish(SUBJECTS.write(ann.peer, "lineage", "1"), b"epoch", reply=target)
        raw.publish(SUBJECTS.store_write("lineage", "1"), b"epoch", reply=target)  # not past the guard either
    assert len((await raw.settle()).errors) == len(targets)
    await poll_until(
        lambda: house.guard.statistics().get("misdirected_replies", 0) == len(targets) - 1,
        PATIENCE_SECONDS,
        "the guard to hold its answers back",
    )
    await last_word(house, trusted, ear)
    assert not set(targets) & set(ear.heard)
    assert await trusted.store("lineage").entries() == []
    assert await trusted.store("manifest").entries() == []


async def test_a_write_has_no_more_power_than_a_store_needs(house: GuardHouse):
    ann = await house.newcomer(coordinates=True)
    main = await ann.join()
    store = main.store("lease")
    for key in ("one", "two"):
        await store.put(key, b"x")
    headers = {"Nats-Rollup": "all", "Nats-Msg-Id": "1"}
    await main.request_messages(
        SUBJECTS.write(ann.peer, "lease", "two"), b"y", headers=headers, timeout_seconds=PATIENCE_SECONDS
    )
    assert [(entry.key, entry.value) for entry in await store.entries()] == [("one", b"x"), ("two", b"y")]
    with pytest.raises(RevisionConflictError):
        await store.put("one", b"z", expected=77)
    await store.delete("one")
    assert [entry.key for entry in await store.entries()] == ["two"]


async def test_what_a_member_may_do_works(house: GuardHouse):
    ann = await house.newcomer(coordinates=True)
    main = await ann.join()
    heard: list[str] = []
    for interest in (SUBJECTS.beacon("*"), SUBJECTS.plan("*")):
        await main.subscribe(interest, lambda delivery: heard.append(delivery.subject))
    spoken = [SUBJECTS.beacon(ann.peer), SUBJECTS.plan(ann.peer)]
    for subject in spoken:
        await main.publish(subject, b"")
    await poll_until(lambda: len(heard) == 2, PATIENCE_SECONDS, lambda: f"two messages, heard {heard}")
    with pytest.raises(PermissionDeniedError):  # packets have a connection of their own
        await main.subscribe(SUBJECTS.relay(ann.peer, "*"), lambda delivery: None)
    revision = await main.store("lease").put("coordinator", b"me", expected=0)
    entry = await main.store("lease").get("coordinator")
    assert entry is not None
    assert (entry.value, entry.revision) == (b"me", revision)
    assert [each.key for each in await main.store("roster").entries()] == [ann.peer]
    for store in STORES:
        if store.readers == "guard":
            with pytest.raises(PermissionDeniedError):
                await main.store(store.name).entries()
        if store.writers == "guard":
            with pytest.raises(PermissionDeniedError):
                await main.store(store.name).put(ann.peer, b"x")
    trainer = await (await house.newcomer()).join()
    with pytest.raises(PermissionDeniedError):
        await trainer.store("lease").put("coordinator", b"me")
