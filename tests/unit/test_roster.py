from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from potluck.hub.presence import Card, Presence, State
from potluck.peer.roster import Roster


def presence(peer: str = "A", state: State = "alive", session: str = "s1", name: str = "") -> Presence:
    return Presence(
        peer=peer, card=Card(session=session, role="trainer", name=name), state=state, host="192.0.2.1", person="p"
    )


def changes(roster: Roster, word: Presence) -> list[str]:
    return [event.change for event in roster.apply(word)]


def test_a_life_from_joining_to_leaving() -> None:
    roster = Roster()
    assert changes(roster, presence()) == ["joined"]
    assert changes(roster, presence()) == []
    assert changes(roster, presence(name="Ada")) == ["changed"]
    assert changes(roster, presence(name="Ada", state="suspect")) == ["suspect"]
    assert "A" in roster
    assert roster.alive() == []
    assert changes(roster, presence(name="Ada")) == ["alive"]
    assert changes(roster, presence(state="left")) == ["left"]
    assert "A" not in roster


def test_a_restarted_process_is_a_death_and_a_birth() -> None:
    roster = Roster()
    roster.apply(presence())
    events = roster.apply(presence(session="s2"))
    assert [(event.change, event.presence.card.session) for event in events] == [("dead", "s1"), ("joined", "s2")]


def test_a_death_that_was_never_a_life_says_nothing() -> None:
    assert changes(Roster(), presence(state="dead")) == []


def test_a_peer_that_vanished_from_the_hub_has_left() -> None:
    roster = Roster()
    roster.apply(presence())
    assert [event.change for event in roster.forget("A")] == ["left"]
    assert roster.forget("A") == []


def test_a_listener_hears_each_event_until_it_ends() -> None:
    roster = Roster()
    heard: list[str] = []
    end = roster.listen(lambda event: heard.append(event.change))
    roster.apply(presence())
    end()
    end()
    roster.apply(presence(state="dead"))
    assert heard == ["joined"]


WORDS = st.builds(
    presence,
    peer=st.sampled_from("ABC"),
    state=st.sampled_from(["alive", "suspect", "dead", "left"]),
    session=st.sampled_from(["s1", "s2"]),
)


@given(st.lists(WORDS, max_size=60))
def test_events_alone_rebuild_the_table(words: list[Presence]) -> None:
    roster, rebuilt = Roster(), dict[str, Presence]()
    for word in words:
        for event in roster.apply(word):
            if event.change in ("dead", "left"):
                del rebuilt[event.peer]
            elif event.change == "joined":
                assert event.peer not in rebuilt
                rebuilt[event.peer] = event.presence
            else:
                assert event.peer in rebuilt
                rebuilt[event.peer] = event.presence
    assert rebuilt == {entry.peer: entry for entry in roster}
    assert all(msgspec.structs.asdict(entry)["state"] in ("alive", "suspect") for entry in roster)
