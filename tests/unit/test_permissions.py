"""What a connection may do: matched as the hub matches subjects."""

from __future__ import annotations

import pytest

from potluck.hub.access.member import Scopes
from potluck.hub.guard.permissions import Permissions, permissions_for
from potluck.hub.stores import STORES, readable_stores
from potluck.hub.subjects import Subjects

SUBJECTS = Subjects("bakery")
ME, OTHER = "U" + "A" * 55, "U" + "B" * 55
TRAINER = Scopes()
COORDINATOR = Scopes(coordinates=True)
ORGANISER = Scopes(organiser=True)


def matches(pattern: str, subject: str) -> bool:
    wanted, given = pattern.split("."), subject.split(".")
    for position, token in enumerate(wanted):
        if token == ">":
            return len(given) > position
        if position >= len(given) or (token not in ("*", given[position])):
            return False
    return len(wanted) == len(given)


def may(patterns: tuple[str, ...], subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in patterns)


def main(scopes: Scopes = TRAINER) -> Permissions:
    return permissions_for("main", SUBJECTS, ME, scopes)


def own_subjects(peer: str) -> list[str]:
    return [
        SUBJECTS.card(peer),
        SUBJECTS.beacon(peer),
        SUBJECTS.leave(peer),
        SUBJECTS.ask(peer, "time"),
        SUBJECTS.news(peer, "loss"),
    ]


def test_a_member_speaks_in_its_own_name_only():
    for subject in own_subjects(ME):
        assert may(main().publish, subject), subject
    for subject in own_subjects(OTHER):
        assert not may(main(COORDINATOR).publish, subject), subject
    assert not may(main().publish, SUBJECTS.lobby(ME))


def test_plans_and_the_stores_of_commits_are_for_coordinators():
    subjects = [
        SUBJECTS.plan(ME),
        SUBJECTS.write(ME, "lease", "coordinator"),
        SUBJECTS.write(ME, "lineage", "7"),
    ]
    for subject in subjects:
        assert not may(main().publish, subject), subject
        assert may(main(COORDINATOR).publish, subject), subject
    for subject in (SUBJECTS.plan(OTHER), SUBJECTS.write(OTHER, "lease", "coordinator")):
        assert not may(main(COORDINATOR).publish, subject)
    for store in ("lease", "lineage"):  # they answer wherever a request says
        assert not may(main(COORDINATOR).publish, SUBJECTS.store_write(store, "coordinator"))


def test_organising_is_for_organisers():
    assert may(main(ORGANISER).publish, SUBJECTS.organise(ME, "ban"))
    assert not may(main(ORGANISER).publish, SUBJECTS.organise(OTHER, "ban"))
    assert not may(main(COORDINATOR).publish, SUBJECTS.organise(ME, "ban"))


def test_nobody_writes_the_guards_stores_or_hears_of_its_secrets():
    everything = main(Scopes(coordinates=True, organiser=True, trusted=True))
    for store in STORES:
        if store.writers == "guard":
            assert not may(everything.publish, SUBJECTS.store_write(store.name, ME)), store.name
        if store.readers == "guard":
            assert not may(everything.subscribe, SUBJECTS.store_change(store.name, ME)), store.name
        assert not may(everything.subscribe, SUBJECTS.store_write(store.name, ME)), store.name
    for store in readable_stores():
        assert may(everything.subscribe, SUBJECTS.store_change(store.name, ME)), store.name


@pytest.mark.parametrize(
    "subject",
    [
        "$SYS.REQ.USER.AUTH",
        "$SYS.REQ.SERVER.PING",
        "$JS.API.INFO",
        "$JS.API.STREAM.CREATE.x",
        "$JS.API.STREAM.DELETE.potluck_bakery_roster",
        "$JS.API.STREAM.PURGE.potluck_bakery_lineage",
        "$JS.API.CONSUMER.CREATE.potluck_bakery_roster",
        "$JS.API.DIRECT.GET.potluck_bakery_members",
        "$JS.API.DIRECT.GET.potluck_bakery_roster",
        "$JS.API.DIRECT.GET.potluck_bakery_roster.p.bakery.kv.roster.x",
        SUBJECTS.read(ME, "members"),
        SUBJECTS.read(OTHER, "roster"),
        "$JS.API.DIRECT.GET.potluck_bakery_invites.p.bakery.kv.invites.x",
        "$JS.ACK.x",
        "_INBOX.anybody",
        "anything",
        "p.other.beacon." + ME,
    ],
)
def test_nothing_else_may_be_published(subject: str):
    everything = Scopes(coordinates=True, organiser=True, trusted=True)
    for lane in ("lobby", "main", "bulk"):
        assert not may(permissions_for(lane, SUBJECTS, ME, everything).publish, subject)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "subject",
    [
        ">",
        "p.>",
        "p.bakery.>",
        "_INBOX.>",
        f"_INBOX.{OTHER}.x",
        "$SYS.>",
        "$JS.>",
        SUBJECTS.lobby(OTHER),
        SUBJECTS.card(OTHER),
        SUBJECTS.organise(OTHER, "invite"),
        SUBJECTS.relay(OTHER, ME),
        SUBJECTS.ask(OTHER, "time"),
    ],
)
def test_nothing_else_may_be_heard(subject: str):
    everything = Scopes(coordinates=True, organiser=True, trusted=True)
    for lane in ("lobby", "main", "bulk"):
        assert not may(permissions_for(lane, SUBJECTS, ME, everything).subscribe, subject)  # type: ignore[arg-type]


def test_what_a_member_hears():
    heard = main().subscribe
    for subject in (
        SUBJECTS.beacon(OTHER),
        SUBJECTS.plan(OTHER),
        SUBJECTS.news(OTHER, "loss.train"),
        f"_INBOX.{ME}.abc.1",
    ):
        assert may(heard, subject), subject


def test_a_stranger_may_apply_and_hear_the_answer():
    lobby = permissions_for("lobby", SUBJECTS, ME, Scopes(coordinates=True))
    assert lobby.publish == (SUBJECTS.lobby(ME),)
    assert lobby.subscribe == (f"_INBOX.{ME}.>",)


def test_the_bulk_lane_carries_packets_alone():
    everything = main(Scopes(coordinates=True, organiser=True))
    assert not may(everything.publish, SUBJECTS.relay(OTHER, ME))
    assert not may(everything.subscribe, SUBJECTS.relay(ME, OTHER))
    bulk = permissions_for("bulk", SUBJECTS, ME, Scopes(coordinates=True, organiser=True))
    assert bulk.publish == (SUBJECTS.relay("*", ME),)
    assert bulk.subscribe == (SUBJECTS.relay(ME, "*"),)
