"""A session in virtual time, on a hub in memory, with a guard that the test controls."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from potluck.errors import (
    BannedError,
    DeadlineExceededError,
    FatalError,
    HubUnavailableError,
    NotAdmittedError,
)
from potluck.hub.access.member import Scopes
from potluck.hub.connection import Delivery
from potluck.hub.guard.permissions import main_permissions
from potluck.hub.presence import Beacon, Card, CardAnswer, Presence, State, with_link_proof
from potluck.hub.subjects import Subjects
from potluck.messages import decode, encode
from potluck.peer import session as module
from potluck.peer.identity import Identity
from potluck.peer.roster import RosterEvent
from potluck.peer.session import HubChange, Session, new_session_id
from potluck.sim.memoryhub import MemoryConnection, MemoryHub
from potluck.sim.virtualloop import LoopClock, in_virtual_time

SUBJECTS = Subjects("test")
IDENTITY = Identity.temporary()
PEER = IDENTITY.peer_id


class House:
    """A hub with a simple guard. Made in a running loop."""

    def __init__(self) -> None:
        self.hub = MemoryHub("test")
        self.clock = LoopClock()
        self.connections: list[MemoryConnection] = []
        self.cards: list[Card] = []
        self.beacons: list[Beacon] = []
        self.good_byes: list[Beacon] = []
        self.card_answer: CardAnswer | None = CardAnswer(accepted=True)
        self.hears_good_byes = True
        self.hub_ahead_seconds = 0.0
        self.guard = self.hub.connect("GUARD")

    async def open(self) -> House:
        await self.guard.subscribe(SUBJECTS.every_peer("card"), self._on_card)
        await self.guard.subscribe(SUBJECTS.every_peer("beacon"), self._on_beacon)
        await self.guard.subscribe(SUBJECTS.every_peer("leave"), self._on_leave)
        await self.guard.subscribe(SUBJECTS.ask("*", "time"), self._on_time)
        return self

    async def connect(self, lane: str, **options: Any) -> MemoryConnection:
        assert lane == "main"
        connection = self.hub.connect(PEER, main_permissions(SUBJECTS, PEER, Scopes()), **options)
        self.connections.append(connection)
        return connection

    def session(self, clock: LoopClock | None = None) -> Session:
        card = Card(session=new_session_id(), role="trainer", name="Ada")
        return Session(self.connect, IDENTITY, SUBJECTS, card, clock or self.clock)

    async def say(self, state: State, card: Card, peer: str = PEER, reason: str = "") -> None:
        presence = Presence(peer=peer, card=card, state=state, host="192.0.2.1", person="p", reason=reason)
        await self.guard.store("roster").put(peer, encode(presence))

    async def _on_card(self, delivery: Delivery) -> None:
        card = decode(Card, delivery.payload)
        self.cards.append(card)
        if self.card_answer is None:
            return
        if self.card_answer.accepted:
            await self.say("alive", card)
        await delivery.respond(encode(self.card_answer))

    def _on_beacon(self, delivery: Delivery) -> None:
        self.beacons.append(decode(Beacon, delivery.payload))

    async def _on_leave(self, delivery: Delivery) -> None:
        self.good_byes.append(decode(Beacon, delivery.payload))
        if self.hears_good_byes:
            await delivery.respond(encode(True))

    async def _on_time(self, delivery: Delivery) -> None:
        await delivery.respond(encode(self.clock.wall() + self.hub_ahead_seconds))

    async def close(self) -> None:
        assert [connection.peer for connection in self.hub.connections] == ["GUARD"], "a session stays connected"
        await self.guard.close()


@in_virtual_time
async def test_opening_makes_us_visible_and_closing_says_good_bye() -> None:
    house = await House().open()
    session = house.session()
    with pytest.raises(RuntimeError, match="not open"):
        _ = session.hub
    await session.open()
    assert [card.name for card in house.cards] == ["Ada"]
    assert PEER in session.roster
    assert not session.ended.done()
    await session.close()
    await session.close()
    assert [beacon.session for beacon in house.good_byes] == [session.card.session]
    assert await session.ended is None
    await house.close()


@in_virtual_time
async def test_a_beacon_each_second_with_what_is_new() -> None:
    house = await House().open()
    session = house.session()
    await session.open()
    await asyncio.sleep(10)
    session.update_beacon(epoch=7, leaving=True)
    await asyncio.sleep(2)
    assert 11 <= len(house.beacons) <= 13
    assert [beacon.epoch for beacon in house.beacons[:5]] == [0] * 5
    assert (house.beacons[-1].epoch, house.beacons[-1].leaving) == (7, True)
    assert session.statistics()["beacons"] == len(house.beacons)
    await session.close()
    before = len(house.beacons)
    await asyncio.sleep(10)
    assert len(house.beacons) == before
    await house.close()


@in_virtual_time
async def test_a_change_of_the_card_is_told_once() -> None:
    house = await House().open()
    session = house.session()
    await session.open()
    session.update_card(name="Ada")  # no change at all
    await asyncio.sleep(1)
    assert len(house.cards) == 1
    session.update_card(addresses=("tcp://192.0.2.1:4000",))
    session.update_card(name="Countess")
    await asyncio.sleep(1)
    assert [card.addresses for card in house.cards[1:]] == [("tcp://192.0.2.1:4000",)]
    assert session.card == house.cards[-1]
    own = session.roster.get(PEER)
    assert own is not None
    assert own.card.name == "Countess"
    await session.close()
    await house.close()


@in_virtual_time
async def test_after_a_reconnect_the_card_is_handed_in_again() -> None:
    house = await House().open()
    session = house.session()
    await session.open()
    changes: list[HubChange] = []
    end = session.listen(changes.append)
    house.hub.disconnect(PEER)
    await asyncio.sleep(30)
    assert changes == ["away"]
    assert not session.ended.done()
    beacons = len(house.beacons)
    house.hub.reconnect(PEER)
    await asyncio.sleep(5)
    assert changes == ["away", "back"]
    assert len(house.cards) == 2
    assert house.cards[0] == house.cards[1]
    assert len(house.beacons) >= beacons + 4
    assert session.statistics()["reconnects"] == 1
    end()
    end()
    house.hub.disconnect(PEER)
    assert changes == ["away", "back"]
    await session.close()
    await house.close()


@in_virtual_time
async def test_we_are_back_only_when_the_guard_knows_us_again() -> None:
    house = await House().open()
    session = house.session()
    await session.open()
    changes: list[HubChange] = []
    session.listen(changes.append)
    house.card_answer = None  # the hub is back, its guard is not
    house.hub.disconnect(PEER)
    house.hub.reconnect(PEER)
    await asyncio.sleep(60)
    assert changes == ["away"]
    assert len(house.cards) > 5
    house.card_answer = CardAnswer(accepted=True)
    await asyncio.sleep(10)
    assert changes == ["away", "back"]
    num_cards = len(house.cards)
    await asyncio.sleep(60)
    assert len(house.cards) == num_cards
    await session.close()
    await house.close()


@pytest.mark.parametrize("state", ["dead", "left"])
@in_virtual_time
async def test_who_was_given_up_shows_that_it_is_still_here(state: State) -> None:
    house = await House().open()
    session = house.session()
    await session.open()
    events: list[RosterEvent] = []
    session.roster.listen(events.append)
    await house.say(state, session.card, reason="not heard for 10 s")
    await asyncio.sleep(1)
    assert len(house.cards) == 2
    assert [event.change for event in events] == [state, "joined"]
    assert PEER in session.roster
    await session.close()
    await house.close()


@in_virtual_time
async def test_the_entry_of_an_earlier_life_does_not_matter() -> None:
    house = await House().open()
    await house.say("alive", Card(session="earlier", role="trainer"))
    session = house.session()
    events: list[str] = []
    session.roster.listen(lambda event: events.append(event.change))
    await session.open()
    await asyncio.sleep(5)
    assert events == ["joined", "dead", "joined"]
    assert len(house.cards) == 1
    await session.close()
    await house.close()


@in_virtual_time
async def test_the_death_of_others_is_none_of_our_cards() -> None:
    house = await House().open()
    other = Identity.temporary().peer_id
    session = house.session()
    await session.open()
    events: list[str] = []
    session.roster.listen(lambda event: events.append(f"{event.peer == other} {event.change}"))
    card = Card(session="s", role="aux")
    await house.say("alive", card, peer=other)
    await house.say("suspect", card, peer=other)
    await house.say("dead", card, peer=other)
    await asyncio.sleep(5)
    assert events == ["True joined", "True suspect", "True dead"]
    assert len(house.cards) == 1
    await session.close()
    await house.close()


@in_virtual_time
async def test_who_was_there_before_is_in_the_roster_at_once() -> None:
    house = await House().open()
    other = Identity.temporary().peer_id
    await house.say("alive", Card(session="s", role="aux"), peer=other)
    session = house.session()
    await session.open()
    assert {presence.peer for presence in session.roster} == {PEER, other}
    await house.guard.store("roster").delete(other)
    await asyncio.sleep(1)
    assert {presence.peer for presence in session.roster} == {PEER}
    await session.close()
    await house.close()


@in_virtual_time
async def test_a_link_key_that_its_peer_has_not_signed_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever runs the hub writes the roster; but it cannot sign for a peer."""
    house = await House().open()
    bob, run = Identity.temporary(), SUBJECTS.run
    true = with_link_proof(
        Card(session="s1", role="trainer", name="Bob", link_key="b" * 64), run, bob.peer_id, bob.sign
    )
    session = house.session()
    await session.open()
    await house.say("alive", true, bob.peer_id)
    await asyncio.sleep(1)
    assert session.roster.get(bob.peer_id) == Presence(
        peer=bob.peer_id, card=true, state="alive", host="192.0.2.1", person="p"
    )
    mallory = Identity.temporary()
    swapped = msgspec.structs.replace(true, link_key="e" * 64)
    for forged in (
        swapped,
        msgspec.structs.replace(true, session="s2"),
        msgspec.structs.replace(swapped, link_proof=b""),
        with_link_proof(swapped, run, mallory.peer_id, mallory.sign),
        with_link_proof(swapped, run, bob.peer_id, mallory.sign),
        with_link_proof(swapped, "another-run", bob.peer_id, bob.sign),
    ):
        before = session.statistics()["forged_link_keys"]
        await house.say("alive", forged, bob.peer_id)
        await asyncio.sleep(1)
        shown = session.roster.get(bob.peer_id)
        assert shown is not None
        assert (shown.card.name, shown.card.link_key) == ("Bob", "")
        assert session.statistics()["forged_link_keys"] == before + 1
    assert f"a link key of {bob.peer_id} that this peer has not signed" in caplog.text
    await house.say("alive", true, bob.peer_id)
    await asyncio.sleep(1)
    known = session.roster.get(bob.peer_id)
    assert known is not None
    assert known.card == true
    await session.close()
    await house.close()


@in_virtual_time
async def test_an_entry_that_cannot_be_read_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    house = await House().open()
    other = Identity.temporary().peer_id
    await house.guard.store("roster").put(other, b"\xc1")
    session = house.session()
    await session.open()
    assert session.statistics()["bad_presences"] == 1
    assert len(session.roster) == 1
    assert "passed over" in caplog.text
    await session.close()
    await house.close()


# How it ends


@in_virtual_time
async def test_a_refusal_ends_the_session_without_a_stray_error(caplog: pytest.LogCaptureFixture) -> None:
    house = await House().open()
    session = house.session()
    await session.open()
    await asyncio.sleep(3)
    house.hub.refuse(PEER)
    with pytest.raises(NotAdmittedError):
        await session.ended
    await asyncio.sleep(60)
    with caplog.at_level(logging.ERROR):
        await session.close()
    assert not caplog.records
    assert not house.good_byes
    await house.close()


@in_virtual_time
async def test_the_reason_of_a_refusal_is_kept() -> None:
    house = await House().open()
    session = house.session()
    await session.open()
    on_refused = house.connections[0]._on_refused
    assert on_refused is not None
    on_refused(BannedError("an organiser has banned you"))
    house.hub.refuse(PEER)
    with pytest.raises(BannedError, match="banned you"):
        await session.ended
    await session.close()
    await house.close()


@in_virtual_time
async def test_a_card_that_is_not_taken_keeps_out() -> None:
    house = await House().open()
    house.card_answer = CardAnswer(accepted=False, message="you may take part only as aux")
    session = house.session()
    with pytest.raises(NotAdmittedError, match="only as aux"):
        await session.open()
    await house.close()


@in_virtual_time
async def test_a_newer_process_in_our_place_ends_the_session() -> None:
    house = await House().open()
    session = house.session()
    await session.open()
    house.card_answer = CardAnswer(accepted=False, message="a newer process has taken this peer's place")
    await house.say("alive", Card(session="another", role="trainer"))
    with pytest.raises(NotAdmittedError, match="newer process"):
        await session.ended
    num_cards = len(house.cards)
    await asyncio.sleep(60)
    assert len(house.cards) == num_cards
    await session.close()
    await house.close()


@in_virtual_time
async def test_a_bug_in_a_task_is_told_and_ends_the_session(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    house = await House().open()
    session = house.session()
    await session.open()

    async def broken(*_: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(session.hub, "publish", broken)
    with pytest.raises(FatalError, match=r"beacons failed.*a bug"):
        await session.ended
    assert "a bug" in caplog.text
    await session.close()
    await house.close()


@in_virtual_time
async def test_a_ban_that_meets_a_card_on_its_way_is_told_as_a_ban() -> None:
    house = await House().open()
    session = house.session()
    await session.open()
    house.card_answer = CardAnswer(accepted=False, banned=True, message="an organiser has banned you: too noisy")
    session.update_card(name="Eve")
    with pytest.raises(BannedError, match="too noisy"):
        await session.ended
    await session.close()
    await house.close()


@pytest.mark.parametrize("silent", ["time", "card"])
@in_virtual_time
async def test_a_silent_guard_fails_the_opening_and_leaves_nothing(silent: str) -> None:
    house = await House().open()
    rule = house.hub.drop(f"{SUBJECTS.root}.{'ask' if silent == 'time' else silent}.>")
    session = house.session()
    began = house.clock.monotonic()
    with pytest.raises(DeadlineExceededError):
        await session.open()
    assert module.OPEN_SECONDS - 1 < house.clock.monotonic() - began < module.OPEN_SECONDS + 1
    assert rule.num_caught > 3
    await house.close()


@in_virtual_time
async def test_who_waits_for_its_card_to_be_written_down_is_not_silent() -> None:
    house = await House().open()
    house.card_answer = None  # the roster's store has no leader for a while
    session = house.session()
    opening = asyncio.create_task(session.open())
    await asyncio.sleep(8)
    assert not opening.done()
    assert len(house.cards) > 1  # asked again, since a question may be lost with the server that it was on its way to
    assert len(house.beacons) >= 8
    house.card_answer = CardAnswer(accepted=True)
    await opening
    assert PEER in session.roster
    await session.close()
    await house.close()


@in_virtual_time
async def test_a_connection_that_fails_fails_the_opening() -> None:
    house = await House().open()

    async def refuse(lane: str, **_: Any) -> MemoryConnection:
        raise HubUnavailableError(f"no {lane} connection")

    session = Session(refuse, IDENTITY, SUBJECTS, Card(session="s", role="trainer"), house.clock)
    with pytest.raises(HubUnavailableError, match="no main connection"):
        await session.open()
    await house.close()


@in_virtual_time
async def test_leaving_does_not_wait_long_for_a_silent_hub() -> None:
    house = await House().open()
    house.hears_good_byes = False
    session = house.session()
    await session.open()
    started = house.clock.monotonic()
    await session.close()
    assert house.clock.monotonic() - started == pytest.approx(module.GOOD_BYE_SECONDS)
    await house.close()


@in_virtual_time
async def test_leaving_while_the_hub_is_away_waits_for_nothing() -> None:
    house = await House().open()
    session = house.session()
    await session.open()
    house.hub.disconnect(PEER)
    started = house.clock.monotonic()
    await session.close()
    assert house.clock.monotonic() == started
    assert not house.good_byes
    await house.close()


@in_virtual_time
async def test_a_leave_that_is_broken_off_still_disconnects() -> None:
    house = await House().open()
    house.hears_good_byes = False
    session = house.session()
    await session.open()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await session.close()
    await house.close()  # checks that we are disconnected


# Hub time


@in_virtual_time
async def test_hub_time_does_not_depend_on_our_wall_clock() -> None:
    house = await House().open()
    wrong = LoopClock(wall_error_seconds=-1e6)
    session = house.session(wrong)
    await session.open()
    assert session.now() == pytest.approx(house.clock.wall(), abs=0.1)
    error = session.hub_time.clock_error_seconds(monotonic=wrong.monotonic(), wall=wrong.wall())
    assert error == pytest.approx(-1e6, abs=0.1)
    await session.close()
    await house.close()


@in_virtual_time
async def test_hub_time_is_learnt_anew_after_a_reconnect() -> None:
    house = await House().open()
    session = house.session()
    await session.open()
    house.hub.disconnect(PEER)
    house.hub_ahead_seconds = 3600.0  # our machine slept meanwhile: its monotonic clock stood still
    await asyncio.sleep(5)
    rule = house.hub.drop(SUBJECTS.ask("*", "time"), count=1)
    house.hub.reconnect(PEER)
    await asyncio.sleep(10)
    assert rule.num_caught == 1
    assert session.now() == pytest.approx(house.clock.wall() + 3600.0, abs=0.1)
    await session.close()
    await house.close()


@in_virtual_time
async def test_hub_time_follows_a_slow_drift() -> None:
    house = await House().open()
    session = house.session()
    await session.open()
    house.hub_ahead_seconds = 2.0
    await asyncio.sleep(module.TIME_EVERY_SECONDS * 10)
    assert session.now() == pytest.approx(house.clock.wall() + 2.0, abs=0.1)
    await session.close()
    await house.close()


def test_every_life_has_its_own_session() -> None:
    assert len({new_session_id() for _ in range(100)}) == 100
