"""The guard's records and the roster in stores, with more than one guard at work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from potluck import tasks
from potluck.errors import ConfigurationError, HubUnavailableError
from potluck.hub.access.invite import new_invite
from potluck.hub.access.member import Ban, Member, Policy, Scopes, ban_key
from potluck.hub.guard.backgroundwork import BackgroundWork
from potluck.hub.guard.connections import Connections
from potluck.hub.guard.door import DoorLimits
from potluck.hub.guard.presencecore import ConnectionId, PresenceConfig, PresenceCore, RosterChange, Standing
from potluck.hub.guard.presencekeeper import PresenceKeeper
from potluck.hub.guard.registry import POLICY_KEY, Registry
from potluck.hub.guard.rosterwriter import RosterWriter
from potluck.hub.presence import Beacon, Card, Presence
from potluck.messages import decode, encode
from potluck.sim.memoryhub import MemoryHub
from potluck.sim.virtualclock import VirtualClock
from potluck.sim.virtualloop import LoopClock, in_virtual_time
from potluck.testing.polling import poll_until

NOW = 1_700_000_000.0
ANN, BOB = "U" + "A" * 55, "U" + "B" * 55


def member(peer: str, person: str = "guest:ann") -> Member:
    return Member(peer=peer, person=person, scopes=Scopes())


@asynccontextmanager
async def registries(hub: MemoryHub, count: int = 1) -> AsyncIterator[list[Registry]]:
    background = BackgroundWork(100)
    opened = [Registry(hub.connect(f"GUARD{number}"), background.spawn) for number in range(count)]
    try:
        for registry in opened:
            await registry.start(Policy())
        yield opened
    finally:
        for registry in opened:
            await registry.stop()
        await background.close()


async def test_a_record_is_known_to_every_guard():
    hub = MemoryHub("bakery")
    async with registries(hub, 2) as (first, second):
        changes: list[str] = []
        second.members.listen(lambda key, record: changes.append(f"{key[1]} {record is not None}"))
        await first.members.put(ANN, member(ANN))
        assert await second.member(ANN) == member(ANN)  # asked for, if the change was not told yet
        await first.members.put(BOB, member(BOB))
        await poll_until(lambda: len(second.members) == 2, 5, "the change to be told")
        assert {each.peer for each in second.members_of("guest:ann")} == {ANN, BOB}
        await first.members.remove(ANN)
        await poll_until(lambda: len(second.members) == 1, 5, "the removal to be told")
        assert await second.member(ANN) is None
        assert [each.peer for each in second.members_of("guest:ann")] == [BOB]
        assert changes == ["A True", "B True", "A False"]
        await first.members.put(BOB, member(BOB, "guest:bob"))
        assert first.members_of("guest:ann") == []


async def test_an_invites_last_use_goes_to_one_of_many():
    hub = MemoryHub("bakery")
    invite, secret = new_invite(scopes=Scopes(), now=NOW, uses=3)
    async with registries(hub, 3) as guards:
        await guards[0].invites.put(invite.id, invite)
        tries = [guard.use_invite(invite.id, secret, "trainer", NOW) for guard in guards for _ in range(4)]
        verdicts = await asyncio.gather(*tries)
        assert sorted(verdicts) == ["used_up"] * 9 + ["valid"] * 3
        await guards[1].return_invite_use(invite.id)
        assert await guards[2].use_invite(invite.id, secret, "trainer", NOW) == "valid"
        assert await guards[2].use_invite("nosuch", secret, "trainer", NOW) == "unknown_invite"


async def test_the_first_policy_does_not_replace_a_later_one():
    hub = MemoryHub("bakery")
    async with registries(hub) as (guard,):
        await guard.policies.put(POLICY_KEY, Policy(minimum_version="3.0"))
    async with registries(hub) as (guard,):
        assert guard.policy.minimum_version == "3.0"


async def test_bans_by_peer_and_person():
    async with registries(MemoryHub("bakery")) as (guard,):
        for target in (ANN, "guest:bob"):
            await guard.bans.put(ban_key(target), Ban(target=target))
        assert guard.is_banned(member(ANN))
        assert guard.is_banned(member(BOB, "guest:bob"))
        assert not guard.is_banned(member(BOB, "guest:carol"))
        assert [ban.target for ban in guard.bans_of("", "guest:bob", "guest:bob")] == ["guest:bob"]


async def test_what_no_guard_wrote_is_put_right():
    hub = MemoryHub("bakery")
    async with registries(hub) as (guard,):
        await guard.members.put(ANN, member(ANN))
        store = hub.connect("SOMEBODY").store("members")
        await store.put(ANN, b'{"stream":"x","seq":2}')
        await store.put(BOB, b"garbage")

        async def is_right() -> bool:
            entries = {entry.key: entry.value for entry in await store.entries()}
            return entries == {ANN: encode(member(ANN))}

        await poll_until(is_right, 5, "the records to be put right")
        assert guard.members.get(ANN) == member(ANN)
        assert guard.num_invalid() == 2


def presence(session: str, state: str = "alive") -> Presence:
    card = Card(session=session, role="trainer")
    return Presence(peer=ANN, card=card, state=state, host="h", person="p")  # type: ignore[arg-type]


async def test_two_guards_write_one_roster():
    hub, clock = MemoryHub("bakery"), VirtualClock()
    cores = [PresenceCore(PresenceConfig(), clock) for _ in range(2)]
    writers = [RosterWriter(hub.connect(f"GUARD{n}").store("roster"), core) for n, core in enumerate(cores)]
    store = hub.connect("READER").store("roster")
    connection = ConnectionId("one", 1)
    try:
        for writer in writers:
            await writer.start()
        for core, writer in zip(cores, writers, strict=True):  # both hear everything
            core.connected(ANN, connection)
            changes = core.card(ANN, Card(session="s1", role="trainer"), host="h", standing=Standing(person="p"))
            writer.want(changes or [])
        for writer in writers:
            await writer.written(ANN)
        for core, writer in zip(cores, writers, strict=True):
            writer.want(core.disconnected(ANN, connection))
        for writer in writers:
            await writer.written(ANN)
        entry = await store.get(ANN)
        assert entry is not None
        assert decode(Presence, entry.value or b"").state == "dead"
        assert sum(writer.num_writes for writer in writers) >= 2
        clock.advance(PresenceConfig().forget_after_seconds + 1)
        for core, writer in zip(cores, writers, strict=True):
            writer.want(core.tick())
        await poll_until(lambda: not any(writer.num_pending for writer in writers), 5, "the roster to be written")
        assert await store.get(ANN) is None
    finally:
        for writer in writers:
            await writer.stop()


async def test_a_stale_verdict_does_not_overwrite_a_newer_process():
    """Another guard knows more: found out by a conflict, or by what it wrote while ours could not be written."""
    for away in (False, True):
        hub = MemoryHub("bakery")
        core = PresenceCore(PresenceConfig(), VirtualClock())
        store = hub.connect("OTHER").store("roster")
        writer = RosterWriter(hub.connect("GUARD").store("roster"), core)
        await writer.start()
        try:
            core.observe(presence("s1"))
            if away:
                hub.disconnect("GUARD")
            else:
                hub.hold("p.bakery.changed.roster.>")
            writer.want([RosterChange(peer=ANN, presence=presence("s1", "dead"))])
            await store.put(ANN, encode(presence("s2")))
            if away:
                hub.reconnect("GUARD")
            await writer.written(ANN)
            entry = await store.get(ANN)
            assert entry is not None
            assert decode(Presence, entry.value or b"").card.session == "s2"
            assert core.get(ANN) == presence("s2")
            assert writer.num_pending == 0
        finally:
            await writer.stop()


async def test_what_waits_to_be_written_is_not_forgotten_over_another_guards_word():
    hub = MemoryHub("bakery")
    core = PresenceCore(PresenceConfig(), VirtualClock())
    store = hub.connect("OTHER").store("roster")
    writer = RosterWriter(hub.connect("GUARD").store("roster"), core)
    await writer.start()
    try:
        first = Card(session="s1", role="trainer")
        second = Card(session="s1", role="trainer", addresses=("tcp://192.0.2.1:5",))
        writer.want(core.card(ANN, first, host="h", standing=Standing(person="p")) or [])
        await writer.written(ANN)
        hub.disconnect("GUARD")
        writer.want(core.card(ANN, second, host="h", standing=Standing(person="p")) or [])
        await store.put(ANN, encode(presence("s1", "suspect")))
        hub.reconnect("GUARD")
        await writer.written(ANN)
        entry = await store.get(ANN)
        assert entry is not None
        told = decode(Presence, entry.value or b"")
        assert (told.card, told.state) == (second, "alive")
        assert core.get(ANN) == told
    finally:
        await writer.stop()


async def test_a_forged_entry_of_the_roster_is_put_right():
    hub = MemoryHub("bakery")
    core = PresenceCore(PresenceConfig(), VirtualClock())
    store = hub.connect("SOMEBODY").store("roster")
    writer = RosterWriter(hub.connect("GUARD").store("roster"), core)
    await writer.start()
    try:
        changes = core.card(ANN, Card(session="s1", role="trainer"), host="h", standing=Standing(person="p"))
        writer.want(changes or [])
        await writer.written(ANN)
        await store.put(ANN, b"garbage")
        await store.put(BOB, encode(presence("s9")))  # somebody else's entry under this key

        async def is_right() -> bool:
            entries = {entry.key: entry.value for entry in await store.entries()}
            return entries == {ANN: encode(core.get(ANN))}

        await poll_until(is_right, 5, "the roster to be put right")
    finally:
        await writer.stop()


async def test_the_roster_is_written_once_the_hub_is_back():
    hub = MemoryHub("bakery")
    core = PresenceCore(PresenceConfig(), VirtualClock())
    writer = RosterWriter(hub.connect("GUARD").store("roster"), core)
    await writer.start()
    try:
        hub.disconnect("GUARD")
        writer.want([RosterChange(peer=ANN, presence=presence("s1", "suspect"))])
        writer.want([RosterChange(peer=ANN, presence=presence("s1", "dead"))])
        waiting = asyncio.create_task(writer.written(ANN))
        await asyncio.sleep(0)
        hub.reconnect("GUARD")
        await asyncio.wait_for(waiting, 10)
        entry = await hub.connect("READER").store("roster").get(ANN)
        assert entry is not None
        assert decode(Presence, entry.value or b"").state == "dead"
        assert writer.num_writes == 1
    finally:
        await writer.stop()


@in_virtual_time
async def test_a_guard_that_was_cut_off_declares_nobody_dead():
    """Its server hears nobody on the other side of the cut, and has no leader to write to."""
    hub, clock = MemoryHub("bakery"), LoopClock()
    core = PresenceCore(PresenceConfig(), clock)
    writer = RosterWriter(hub.connect("GUARD").store("roster"), core)
    told: list[str] = []
    async with registries(hub) as (registry,):
        await writer.start()
        keeper = PresenceKeeper(
            core,
            writer,
            registry,
            Connections(),
            *cast(Any, (None, None)),
            limits=DoorLimits(),
            run="bakery",
            clock=clock,
            spawn=cast(Any, None),
        )
        ticking = asyncio.create_task(keeper.tick_forever(lambda: True))
        try:
            writer.want(
                core.card(ANN, Card(session="s1", role="trainer"), host="h", standing=Standing(person="p")) or []
            )
            await writer.written(ANN)
            await (
                hub.connect("READER")
                .store("roster")
                .watch(lambda entry: told.append(decode(Presence, entry.value or b"").state))
            )
            hub.depose("roster")
            await asyncio.sleep(60.0)
            assert writer.is_failing
            hub.elect("roster")
            await asyncio.sleep(0.9)
            keeper.beacon(ANN, encode(Beacon(session="s1")))
            await asyncio.sleep(5.0)
            assert not writer.is_failing
            assert told == ["alive", "suspect", "alive", "suspect"]
            await asyncio.sleep(7.0)
            assert told[-1] == "dead", "now its silence counts"
        finally:
            await tasks.end(ticking)
            await writer.stop()


@in_virtual_time
async def test_a_write_that_fails_or_is_never_answered_is_made_again(monkeypatch: pytest.MonkeyPatch):
    """As when a server dies: a write on its way is lost, and the next ones are refused for whatever reason."""
    core = PresenceCore(PresenceConfig(), VirtualClock())
    store = MemoryHub("bakery").connect("GUARD").store("roster")
    put = store.put
    troubles: list[Exception | None] = [None, ConfigurationError("no such stream"), HubUnavailableError("no leader")]

    async def put_with_trouble(*arguments: Any, **options: Any) -> int:
        if not troubles:
            return await put(*arguments, **options)
        if (error := troubles.pop(0)) is not None:
            raise error
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(store, "put", put_with_trouble)
    writer = RosterWriter(store, core)
    await writer.start()
    try:
        writer.want([RosterChange(peer=ANN, presence=presence("s1"))])
        async with asyncio.timeout(60):
            await writer.written(ANN)
        assert troubles == []
        assert [entry.key for entry in await store.entries()] == [ANN]
    finally:
        await writer.stop()
