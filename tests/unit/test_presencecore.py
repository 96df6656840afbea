"""Who is there: each rule on its own, then any order of events that Hypothesis finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from potluck.errors import ConfigurationError
from potluck.hub.guard.presencecore import ConnectionId, PresenceConfig, PresenceCore, RosterChange, Standing
from potluck.hub.presence import Card, Presence
from potluck.sim.virtualclock import VirtualClock

ANN, BOB = "U" + "A" * 55, "U" + "B" * 55
MEMBER = Standing(person="key:ann")
CONFIG = PresenceConfig()


def card(session: str = "s1", **changes: Any) -> Card:
    return Card(session=session, role="trainer", **changes)


def connection(number: int, server: str = "one") -> ConnectionId:
    return ConnectionId(server, number)


@dataclass
class Scene:
    """A core, its clock, and the roster as everybody else sees it."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    roster: dict[str, Presence] = field(default_factory=dict)
    is_answering: Callable[[ConnectionId], bool] = lambda _connection: True

    def __post_init__(self) -> None:
        self.core = PresenceCore(CONFIG, self.clock)

    def apply(self, changes: list[RosterChange] | None) -> list[str]:
        """Write the changes to the roster; the new states."""
        states = []
        for change in changes or []:
            if change.presence is None:
                self.roster.pop(change.peer)
                states.append("removed")
            else:
                self.roster[change.peer] = change.presence
                states.append(change.presence.state)
        return states

    def join(self, peer: str = ANN, session: str = "s1", number: int = 1, *, named: bool = False) -> None:
        self.apply(self.core.connected(peer, connection(number), session=session if named else "", host="192.0.2.1"))
        self.apply(self.core.card(peer, card(session), host="192.0.2.1", standing=MEMBER))

    def wait(self, seconds: float, beacons: dict[str, str] | None = None) -> list[str]:
        """Let time pass in ticks of a quarter second, with a beacon each second from those who send any."""
        states: list[str] = []
        for quarter in range(round(seconds * 4)):
            self.clock.advance(0.25)
            if quarter % 4 == 3:
                for peer, session in (beacons or {}).items():
                    states += self.apply(self.core.beacon(peer, session))
            states += self.apply(self.core.tick(self.is_answering))
        return states

    def state(self, peer: str = ANN) -> str | None:
        presence = self.roster.get(peer)
        known = self.core.get(peer)
        assert presence == known
        return presence.state if presence is not None else None


def test_a_card_puts_a_peer_on_the_roster():
    scene = Scene()
    standing = Standing(person="hf:ann", coordinates=True, trusted=True)
    changes = scene.core.card(ANN, card(name="Ann"), host="192.0.2.7", standing=standing)
    assert scene.apply(changes) == ["alive"]
    presence = scene.roster[ANN]
    assert (presence.host, presence.person, presence.coordinates, presence.trusted) == (
        "192.0.2.7",
        "hf:ann",
        True,
        True,
    )
    assert presence.since == scene.clock.wall()


def test_the_same_card_again_writes_nothing_and_a_changed_one_keeps_the_time():
    scene = Scene()
    scene.join()
    since = scene.roster[ANN].since
    scene.clock.advance(1)
    assert scene.core.card(ANN, card(), host="192.0.2.1", standing=MEMBER) == []
    changed = scene.core.card(ANN, card(addresses=("tcp://a:1",)), host="192.0.2.1", standing=MEMBER)
    assert scene.apply(changed) == ["alive"]
    assert scene.roster[ANN].since == since


def test_beacons_keep_a_peer_alive_and_write_nothing():
    scene = Scene()
    scene.join()
    assert scene.wait(60, {ANN: "s1"}) == []
    assert scene.state() == "alive"


def test_silence_is_suspect_then_dead():
    scene = Scene()
    scene.join()
    scene.core.lost_track(ANN, connection(1))
    assert scene.wait(2.75) == []
    assert scene.wait(0.5) == ["suspect"]
    assert scene.wait(6.5) == []
    assert scene.wait(0.5) == ["dead"]
    assert "not heard" in scene.roster[ANN].reason


def test_a_suspect_who_is_heard_is_alive():
    scene = Scene()
    scene.join()
    scene.wait(4)
    assert scene.apply(scene.core.beacon(ANN, "s1")) == ["alive"]
    assert scene.roster[ANN].reason == ""
    assert scene.wait(2.5) == []


def test_who_is_silent_while_its_connection_lives_is_busy_and_not_dead():
    scene = Scene()
    scene.join()
    assert scene.wait(80) == ["suspect", "suspect"]
    assert "busy" in scene.roster[ANN].reason
    assert scene.apply(scene.core.beacon(ANN, "s1")) == ["alive"]
    assert scene.roster[ANN].reason == ""


def test_who_is_busy_is_dead_at_once_when_its_connection_closes():
    scene = Scene()
    scene.join()
    scene.wait(20)
    assert scene.apply(scene.core.disconnected(ANN, connection(1), "Client Closed")) == ["dead"]


def test_a_machine_that_acknowledges_nothing_is_not_busy():
    scene = Scene(is_answering=lambda asked: asked != connection(1))
    scene.join()
    scene.join(BOB, number=2)
    assert scene.wait(11, {BOB: "s1"}) == ["suspect", "dead"]
    assert scene.state() == "dead"
    assert scene.wait(20) == ["suspect", "suspect"]
    assert scene.state(BOB) == "suspect"


def test_a_frozen_peer_comes_back_after_death():
    scene = Scene()
    scene.join()
    assert scene.wait(91) == ["suspect", "suspect", "dead"]
    assert scene.apply(scene.core.beacon(ANN, "s1")) == ["alive"]


def test_a_closed_connection_is_death_at_once():
    scene = Scene()
    scene.join()
    assert scene.apply(scene.core.disconnected(ANN, connection(1), "Client Closed")) == ["dead"]
    assert "Client Closed" in scene.roster[ANN].reason


def test_whom_the_hub_cuts_off_for_being_slow_is_suspected_and_comes_back():
    scene = Scene()
    scene.join()
    scene.apply(scene.core.connected(ANN, connection(2)))
    assert scene.apply(scene.core.disconnected(ANN, connection(1), "Slow Consumer (Pending Bytes)")) == []
    assert scene.apply(scene.core.disconnected(ANN, connection(2), "Slow Consumer (Pending Bytes)")) == ["suspect"]
    assert "Slow Consumer" in scene.roster[ANN].reason
    scene.apply(scene.core.connected(ANN, connection(3)))
    assert scene.apply(scene.core.beacon(ANN, "s1")) == ["alive"]


def test_whom_the_hub_cuts_off_for_being_slow_is_dead_if_it_stays_silent():
    scene = Scene()
    scene.join()
    assert scene.wait(4) == ["suspect"]
    assert scene.apply(scene.core.disconnected(ANN, connection(1), "Slow Consumer (Write Deadline)")) == []
    assert scene.apply(scene.core.beacon(ANN, "s1")) == []  # an echo
    assert scene.wait(7) == ["dead"]


def test_a_closed_connection_is_nothing_while_there_is_another():
    scene = Scene()
    scene.join()
    scene.apply(scene.core.connected(ANN, connection(2)))
    assert scene.apply(scene.core.disconnected(ANN, connection(1))) == []
    assert scene.apply(scene.core.disconnected(ANN, connection(2))) == ["dead"]


def test_a_new_connection_of_the_same_process_replaces_the_old_one():
    scene = Scene()
    scene.join(named=True)
    scene.apply(scene.core.connected(ANN, connection(1, "two"), session="s1"))  # its first server died unseen
    assert scene.apply(scene.core.disconnected(ANN, connection(1, "two"))) == ["dead"]


def test_an_unknown_connection_that_closes_means_nothing():
    scene = Scene()
    scene.join()
    assert scene.core.disconnected(ANN, connection(99)) == []
    assert scene.core.disconnected(BOB, connection(1)) == []


def test_a_peer_that_reconnects_is_alive_again_with_its_session():
    scene = Scene()
    scene.join(named=True)
    scene.apply(scene.core.disconnected(ANN, connection(1)))
    assert scene.apply(scene.core.connected(ANN, connection(2), session="s1")) == ["alive"]
    assert scene.roster[ANN].card.session == "s1"


def test_without_a_named_session_the_next_beacon_tells():
    scene = Scene()
    scene.join()
    scene.apply(scene.core.disconnected(ANN, connection(1)))
    assert scene.apply(scene.core.connected(ANN, connection(2))) == []
    assert scene.apply(scene.core.beacon(ANN, "s1")) == ["alive"]


def test_a_beacon_that_was_overtaken_by_the_news_of_death_is_an_echo():
    scene = Scene()
    scene.join()
    scene.apply(scene.core.disconnected(ANN, connection(1)))
    assert scene.core.beacon(ANN, "s1") == []
    assert scene.core.num_stray_beacons == 1
    assert scene.apply(scene.core.card(ANN, card(name="x"), host="h", standing=MEMBER)) == ["dead"]
    scene.clock.advance(CONFIG.echo_seconds)
    assert scene.apply(scene.core.beacon(ANN, "s1")) == ["alive"]  # so its connection was only not known


def test_good_bye_is_left_not_dead():
    scene = Scene()
    scene.join()
    assert scene.apply(scene.core.leave(ANN, "s1")) == ["left"]
    assert scene.apply(scene.core.disconnected(ANN, connection(1))) == []
    assert scene.core.beacon(ANN, "s1") == []
    assert scene.core.leave(ANN, "s1") == []
    assert scene.state() == "left"


def test_a_last_beacon_does_not_undo_good_bye():
    scene = Scene()
    scene.join()
    scene.apply(scene.core.leave(ANN, "s1"))
    assert scene.core.beacon(ANN, "s1") == []
    assert scene.wait(20, {ANN: "s1"}) == []
    assert scene.state() == "left"


def test_who_left_may_come_again():
    scene = Scene()
    scene.join()
    scene.apply(scene.core.leave(ANN, "s1"))
    scene.apply(scene.core.disconnected(ANN, connection(1)))
    scene.join(number=2)
    assert scene.state() == "alive"


def test_a_restarted_process_is_not_killed_by_its_forerunner():
    scene = Scene()
    scene.join(named=True)
    scene.join(session="s2", number=2, named=True)
    assert scene.roster[ANN].card.session == "s2"
    assert scene.apply(scene.core.disconnected(ANN, connection(1))) == []
    assert scene.core.leave(ANN, "s1") == []
    assert scene.core.beacon(ANN, "s1") == []
    assert scene.core.card(ANN, card("s1"), host="h", standing=MEMBER) is None
    assert scene.state() == "alive"
    assert scene.apply(scene.core.disconnected(ANN, connection(2))) == ["dead"]


def test_the_forerunners_end_is_not_taken_for_that_of_a_process_whose_connection_is_not_known_yet():
    scene = Scene()
    scene.join(named=True)
    scene.apply(scene.core.card(ANN, card("s2"), host="192.0.2.1", standing=MEMBER))
    assert scene.apply(scene.core.disconnected(ANN, connection(1))) == []
    assert scene.state() == "alive"


def test_the_forerunners_connection_does_not_hide_the_death_of_the_new_process():
    scene = Scene()
    scene.join(named=True)
    scene.join(session="s2", number=2, named=True)
    assert scene.apply(scene.core.disconnected(ANN, connection(2))) == ["dead"]


def test_the_forerunners_beacons_do_not_keep_the_new_process_alive():
    scene = Scene()
    scene.join()
    scene.join(session="s2", number=2)
    assert scene.wait(91, {ANN: "s1"}) == ["suspect", "suspect", "dead"]


def test_a_paused_guard_does_not_declare_everybody_dead():
    scene = Scene()
    scene.join()
    scene.join(BOB, number=2)
    scene.wait(1, {ANN: "s1", BOB: "s1"})
    scene.clock.advance(3600)
    assert scene.apply(scene.core.tick()) == []
    assert scene.wait(2.5, {ANN: "s1"}) == []
    assert scene.wait(1, {ANN: "s1"}) == ["suspect"]
    assert (scene.state(ANN), scene.state(BOB)) == ("alive", "suspect")


def test_a_guard_that_could_not_hear_gives_everybody_a_full_timeout():
    scene = Scene()
    scene.join()
    scene.clock.advance(1.9)
    scene.apply(scene.core.tick())
    scene.clock.advance(1.5)
    scene.core.was_deaf()
    assert scene.wait(2.75) == []
    assert scene.wait(0.5) == ["suspect"]


def test_a_restarted_guard_goes_on_with_the_roster():
    before = Scene()
    before.join()
    before.join(BOB, number=2)
    before.apply(before.core.leave(BOB, "s1"))
    after = Scene(clock=before.clock, roster=dict(before.roster))
    for presence in before.roster.values():
        after.core.observe(presence)
    after.core.connected(ANN, connection(1))
    assert after.wait(2, {ANN: "s1"}) == []
    assert after.apply(after.core.disconnected(ANN, connection(1))) == ["dead"]
    assert after.state(BOB) == "left"


def test_a_restarted_guard_finds_who_died_meanwhile():
    before = Scene()
    before.join()
    before.clock.advance(100)
    after = Scene(clock=before.clock, roster=dict(before.roster))
    after.core.observe(before.roster[ANN])
    assert after.wait(2.75) == []
    assert after.wait(8) == ["suspect", "dead"]


def test_the_dead_are_forgotten_after_a_while():
    scene = Scene()
    scene.join()
    scene.join(BOB, number=2)
    scene.apply(scene.core.disconnected(ANN, connection(1)))
    assert scene.wait(CONFIG.forget_after_seconds - 1, {BOB: "s1"}) == []
    assert scene.wait(2, {BOB: "s1"}) == ["removed"]
    assert scene.state(ANN) is None
    assert len(scene.core) == 1
    scene.join(number=3)
    assert scene.state(ANN) == "alive"


def test_the_dead_of_an_earlier_guard_are_forgotten_too():
    before = Scene()
    before.join()
    before.apply(before.core.disconnected(ANN, connection(1)))
    before.clock.advance(CONFIG.forget_after_seconds - 5)
    after = Scene(clock=before.clock, roster=dict(before.roster))
    after.core.observe(before.roster[ANN])
    assert after.wait(4) == []
    assert after.wait(2) == ["removed"]


def test_another_guards_word_is_taken_over():
    first, second = Scene(), Scene()
    first.join()
    second.core.observe(first.roster[ANN])
    first.apply(first.core.disconnected(ANN, connection(1)))
    second.core.observe(first.roster[ANN])
    assert second.core.get(ANN) == first.roster[ANN]
    assert second.wait(20) == []  # no second opinion without evidence
    second.core.observe_removal(ANN)
    assert second.core.get(ANN) is None


def test_another_guards_newer_session_replaces_ours():
    first, second = Scene(), Scene()
    first.join()
    second.core.observe(first.roster[ANN])
    first.join(session="s2", number=2)
    second.core.observe(first.roster[ANN])
    assert second.core.is_old_session(ANN, "s1")
    assert second.core.card(ANN, card("s1"), host="h", standing=MEMBER) is None


def test_a_removal_does_not_forget_the_living():
    scene = Scene()
    scene.join()
    scene.core.observe_removal(ANN)
    assert scene.core.get(ANN) is not None


def test_a_changed_record_shows_in_the_roster():
    scene = Scene()
    scene.join()
    scene.apply(scene.core.standing(ANN, Standing(person="hf:ann", coordinates=True)))
    assert (scene.roster[ANN].person, scene.roster[ANN].coordinates) == ("hf:ann", True)
    assert scene.core.standing(ANN, Standing(person="hf:ann", coordinates=True)) == []
    assert scene.core.standing(BOB, MEMBER) == []


def test_the_host_is_corrected_when_the_connection_becomes_known():
    scene = Scene()
    scene.apply(scene.core.card(ANN, card(), host="", standing=MEMBER))
    assert scene.apply(scene.core.connected(ANN, connection(1), host="192.0.2.9")) == ["alive"]
    assert scene.roster[ANN].host == "192.0.2.9"


def test_a_connection_that_is_lost_sight_of_kills_nobody():
    scene = Scene()
    scene.join()
    scene.core.lost_track(ANN, connection(1))
    assert scene.wait(5, {ANN: "s1"}) == []
    assert scene.wait(11) == ["suspect", "dead"]


def test_impossible_timeouts_are_refused():
    for wrong in (
        {"suspect_after_seconds": 10.0},
        {"busy_seconds": 9.0},
        {"suspect_after_seconds": 0.0},
        {"forget_after_seconds": 0.0},
        {"echo_seconds": -1.0},
    ):
        with pytest.raises(ConfigurationError):
            PresenceConfig(**wrong)


@dataclass
class Process:
    """One process of one peer, as it really is."""

    session: str
    connections: set[ConnectionId] = field(default_factory=set)
    named: bool = False
    left: bool = False


class Chaos(RuleBasedStateMachine):
    """Processes come, go, freeze and reconnect; news may be late. The roster must tell the truth in the end."""

    peers = st.sampled_from([ANN, BOB])

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene()
        self.running: dict[str, Process] = {}
        self.numbers = 0
        self.late: list[tuple[str, str]] = []  # beacons under way
        self.bystanders: dict[str, list[ConnectionId]] = {}  # connections of earlier processes, not closed yet

    def _connect(self, peer: str) -> None:
        process = self.running[peer]
        self.numbers += 1
        new = connection(self.numbers)
        process.connections.add(new)
        session = process.session if process.named else ""
        self.scene.apply(self.scene.core.connected(peer, new, session=session))

    def _card(self, peer: str) -> None:
        process = self.running[peer]
        changes = self.scene.core.card(peer, card(process.session), host="h", standing=MEMBER)
        assert changes is not None
        self.scene.apply(changes)

    @rule(peer=peers, named=st.booleans())
    def start(self, peer: str, named: bool) -> None:
        before = self.running.pop(peer, None)
        if before is not None:
            self.bystanders.setdefault(peer, []).extend(before.connections)
        self.numbers += 1
        self.running[peer] = Process(f"s{self.numbers}", named=named)
        self._connect(peer)
        self._card(peer)
        assert self.scene.state(peer) == "alive"

    @rule(peer=peers)
    def kill(self, peer: str) -> None:
        process = self.running.pop(peer, None)
        if process is None:
            return
        for each in process.connections:
            self.scene.apply(self.scene.core.disconnected(peer, each))
        if not self.bystanders.get(peer):
            assert self.scene.state(peer) in ("dead", "left")

    @rule(peer=peers)
    def late_close(self, peer: str) -> None:
        if not self.bystanders.get(peer):
            return
        before = self.scene.state(peer)
        self.scene.apply(self.scene.core.disconnected(peer, self.bystanders[peer].pop()))
        if peer in self.running and self.running[peer].connections:
            assert self.scene.state(peer) == before

    @rule(peer=peers)
    def reconnect(self, peer: str) -> None:
        process = self.running.get(peer)
        if process is None or process.left:
            return
        for each in process.connections:
            self.scene.apply(self.scene.core.disconnected(peer, each))
        process.connections.clear()
        self._connect(peer)
        self._card(peer)
        assert self.scene.state(peer) == "alive"

    @rule(peer=peers)
    def say_good_bye(self, peer: str) -> None:
        process = self.running.get(peer)
        if process is None:
            return
        self.scene.apply(self.scene.core.leave(peer, process.session))
        process.left = True
        assert self.scene.state(peer) == "left"

    @rule(peer=peers)
    def beacon_under_way(self, peer: str) -> None:
        if peer in self.running:
            self.late.append((peer, self.running[peer].session))

    @rule()
    def late_beacons_arrive(self) -> None:
        before = {peer: self.scene.state(peer) for peer in (ANN, BOB)}
        for peer, session in self.late:
            self.scene.apply(self.scene.core.beacon(peer, session))
        self.late.clear()
        for peer in (ANN, BOB):
            if peer not in self.running and not self.bystanders.get(peer) and before[peer] == "left":
                assert self.scene.state(peer) == "left"

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0, 12.0, 92.0]), beacons=st.booleans())
    def time_passes(self, seconds: float, beacons: bool) -> None:
        heard = {peer: process.session for peer, process in self.running.items() if not process.left}
        self.scene.wait(seconds, heard if beacons else {})
        if beacons and seconds >= 4:
            for peer in heard:
                assert self.scene.state(peer) == "alive"
        if not beacons and seconds >= 12:
            for peer in (ANN, BOB):
                is_connected = bool(self.bystanders.get(peer)) or (
                    peer in self.running and bool(self.running[peer].connections)
                )
                may_be_busy = is_connected and seconds < CONFIG.busy_seconds
                assert self.scene.state(peer) in (None, "dead", "left", *(["suspect"] if may_be_busy else []))

    @rule(seconds=st.sampled_from([3.0, 30.0]))
    def guard_freezes(self, seconds: float) -> None:
        before = {peer: self.scene.state(peer) for peer in (ANN, BOB)}
        self.scene.clock.advance(seconds)
        self.scene.apply(self.scene.core.tick())
        assert {peer: self.scene.state(peer) for peer in (ANN, BOB)} == before

    @rule()
    def guard_restarts(self) -> None:
        scene = Scene(clock=self.scene.clock, roster=self.scene.roster)
        for presence in scene.roster.values():
            scene.core.observe(presence)
        for peer, process in self.running.items():
            for each in process.connections:
                scene.apply(scene.core.connected(peer, each, session=process.session if process.named else ""))
        for peer, connections in self.bystanders.items():
            for each in connections:
                scene.apply(scene.core.connected(peer, each))
        self.scene = scene

    @invariant()
    def the_roster_names_the_newest_process(self) -> None:
        for peer, process in self.running.items():
            presence = self.scene.roster.get(peer)
            assert presence is not None
            assert presence.card.session == process.session


TestChaos = Chaos.TestCase
TestChaos.settings = settings(max_examples=60, stateful_step_count=30)
