"""Naming the model: one vote a person, in nobody else's name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.clock import SystemClock
from potluck.errors import ConfigurationError, ProtocolError
from potluck.hub.keys import Signer, new_seed
from potluck.hub.presence import Card, Presence, Role
from potluck.messages import MAX_MESSAGE_BYTES, decode, encode
from potluck.peer.identity import Identity
from potluck.round.averager import Averager
from potluck.sim.memoryrun import MemoryRun
from potluck.testing.polling import poll_until
from potluck.training.books.ballot import (
    KEY,
    LONGEST_MODEL_NAME,
    MAX_VOTES,
    Ballot,
    BallotDesk,
    CastVote,
    SignedVote,
    Vote,
    cast,
    clean_name,
    read_ballot,
    read_vote,
    send_vote,
    sign_vote,
)


def presence(peer: str, person: str, role: Role = "trainer") -> Presence:
    return Presence(peer=peer, card=Card(session="s", role=role), state="alive", host="", person=person)


def vote(peer: str, name: str, at: float) -> Vote:
    return Vote(peer=peer, name=name, at=at)


def test_each_person_has_one_vote_and_the_last_one_counts() -> None:
    ballot = Ballot()
    ballot = cast(ballot, presence("a1", "hf:alice"), vote("a1", "Rye", 1.0), 10.0)
    ballot = cast(ballot, presence("a2", "hf:alice"), vote("a2", "Bun", 2.0), 10.0)
    ballot = cast(ballot, presence("b", "key:b"), vote("b", "Bun", 2.0), 10.0)
    assert ballot.counted() == [("Bun", 2)]
    assert cast(ballot, presence("a1", "hf:alice"), vote("a1", "Rye", 2.0), 10.0) is ballot  # an old one, repeated
    assert cast(ballot, presence("b", "key:b"), vote("b", "Rye", 1e9), 10.0) is ballot  # from the future
    assert cast(ballot, None, vote("c", "Rye", 3.0), 10.0) is ballot  # nobody who is here
    assert cast(ballot, presence("c", "key:c", "observer"), vote("c", "Rye", 3.0), 10.0) is ballot  # only watches
    assert cast(ballot, presence("b", "key:b"), vote("c", "Rye", 3.0), 10.0) is ballot
    ballot = cast(ballot, presence("b", "key:b"), vote("b", "", 3.0), 10.0)
    assert ballot.counted() == [("Bun", 1)]


@given(st.text(max_size=80))
def test_a_name_fits_on_one_line(text: str) -> None:
    try:
        name = clean_name(text)
    except ConfigurationError:
        return
    assert 1 <= len(name) <= LONGEST_MODEL_NAME
    assert name.isprintable() or " " in name
    assert clean_name(name) == name
    assert "\n" not in name


def test_a_vote_is_signed_for_its_run() -> None:
    signer, other = Signer(new_seed("user")), Signer(new_seed("user"))
    data = sign_vote("Rye", "bakery", signer, 5.0)
    assert read_vote(data, "bakery") == Vote(peer=signer.public_key, name="Rye", at=5.0)
    with pytest.raises(ProtocolError):
        read_vote(data, "brewery")
    body = encode(Vote(peer=other.public_key, name="Rye", at=5.0))
    with pytest.raises(ProtocolError):
        read_vote(encode(SignedVote(body=body, signature=signer.sign(b"potluck vote bakery\0" + body))), "bakery")
    long = encode(Vote(peer=signer.public_key, name="x" * 200, at=5.0))
    with pytest.raises(ProtocolError):
        read_vote(encode(SignedVote(body=long, signature=signer.sign(b"potluck vote bakery\0" + long))), "bakery")


def test_the_ballot_always_fits_into_a_message() -> None:
    votes = {f"key:U{n:055}": CastVote(name="🥖" * LONGEST_MODEL_NAME, at=1e9) for n in range(MAX_VOTES - 1)}
    ballot = Ballot(votes=votes)
    for name in ("last", "one too many"):
        ballot = cast(ballot, presence(name, f"key:{name}"), vote(name, "Rye", 1.0), 10.0)
    assert len(ballot.votes) == MAX_VOTES
    data = encode(ballot)
    assert len(data) <= MAX_MESSAGE_BYTES
    assert decode(Ballot, data) == ballot
    assert read_ballot(b"scribble") == Ballot()


async def test_the_coordinator_counts_what_others_send_for_a_peer_that_trains() -> None:
    run = MemoryRun(clock=SystemClock())
    await run.open()
    host = await run.join("host", identity=Identity.temporary(), coordinates=True, role="aux")
    averager = Averager(host)
    await averager.start()
    desk = BallotDesk(host.session, averager)
    identity = Identity.temporary()
    await run.join("trainer", identity=identity)
    messenger = await run.join("messenger", identity=Identity.temporary(), role="observer")
    await poll_until(lambda: bool(averager.lease.token) and desk._news is not None, 60, "a coordinator")
    await messenger.session.hub.publish(messenger.session.subjects.news(messenger.peer_id, "vote"), b"scribble")
    await send_vote(messenger.session, "Sourdough", Signer(identity.seed))
    await poll_until(lambda: desk.counts["votes"] == 1, 60, "the vote")
    entry = await messenger.session.hub.store("ballot").get(KEY)
    assert entry is not None
    assert read_ballot(entry.value).counted() == [("Sourdough", 1)]
    assert desk.counts["bad_votes"] == 1
    await desk.close()
    await averager.close()
    await run.close()
