"""Who gets in to the direct links, on a clock of its own."""

from __future__ import annotations

import os

import pytest

from potluck.errors import ProtocolError
from potluck.link.direct import admission as limits
from potluck.link.direct.admission import Admission, Member, key_of
from potluck.link.direct.greeting import READY, Caller, LinkKeys, decode_key, is_key
from potluck.testing.virtualclock import VirtualClock

OURS = LinkKeys.generate()
ADA = LinkKeys.generate()
MEMBER = Member(peer="ada", session="s1", key=ADA.link_key)


def admission(*, plain: bool = False) -> Admission:
    return Admission(VirtualClock(), OURS, plain=plain)


def advance(desk: Admission, seconds: float) -> None:
    assert isinstance(desk._clock, VirtualClock)
    desk._clock.advance(seconds)


def call(
    desk: Admission,
    caller: Caller,
    *,
    address: str = "127.0.0.1",
    mechanism: str = "PLAIN",
    username: bytes | None = None,
) -> str | None:
    return desk.name_connection(
        address=address, mechanism=mechanism, username=username or caller.username, password=caller.password
    )


def ada(*, plain: bool = False) -> Caller:
    return Caller(ADA, OURS.link_key, plain=plain)


def test_a_member_gets_in_and_both_hold_the_same_keys() -> None:
    desk = admission()
    assert desk.admit(MEMBER)
    caller = ada()
    name = call(desk, caller)
    assert name is not None
    assert key_of(name) == ADA.link_key
    answerer = desk.answerer(name)
    assert answerer is not None
    assert desk.answerer(name) is None  # once
    welcome, out, back = answerer.welcome()
    their_out, their_back = caller.answer(welcome)
    assert back.open(their_out.seal(READY)) == READY
    assert their_back.open(out.seal(b"packet")) == b"packet"
    assert desk.counts == {"admitted": 1}


def test_each_connection_has_a_name_of_its_own() -> None:
    desk = admission()
    desk.admit(MEMBER)
    assert len({call(desk, ada()) for _ in range(5)}) == 5


def test_strangers_the_withdrawn_and_the_banned_stay_out() -> None:
    desk = admission()
    assert call(desk, ada()) is None
    assert call(desk, ada(), username=b"\xff" * 40) is None
    desk.admit(MEMBER)
    desk.withdraw("ada")
    assert call(desk, ada()) is None
    desk.admit(MEMBER)
    desk.ban("ada")
    assert call(desk, ada()) is None
    assert not desk.admit(MEMBER)
    assert desk.counts == {"refused_unknown_key": 3, "refused_banned_key": 1}


@pytest.mark.parametrize("mechanism", ["NULL", "CURVE", "plain", ""])
def test_no_other_mechanism_counts(mechanism: str) -> None:
    desk = admission()
    desk.admit(MEMBER)
    assert call(desk, ada(), mechanism=mechanism) is None
    assert desk.counts == {"refused_mechanism": 1}


def test_a_key_without_its_proof_is_not_enough() -> None:
    desk = admission()
    desk.admit(MEMBER)
    bob = LinkKeys.generate()
    false = [
        Caller(bob, OURS.link_key, plain=False).password,  # somebody else's
        Caller(ADA, bob.link_key, plain=False).password,  # meant for somebody else
        ada(plain=True).password,  # for another mode
        ada().password[:-1],
        ada().password + b"x",
        bytes(48),  # a point of small order
        os.urandom(48),
        b"",
    ]
    for password in false:
        assert (
            desk.name_connection(address="127.0.0.1", mechanism="PLAIN", username=ADA.public, password=password) is None
        )
    assert desk.counts == {"refused_bad_proof": len(false)}
    assert not desk._used  # strangers cannot fill what is remembered


def test_a_proof_counts_once() -> None:
    desk = admission()
    desk.admit(MEMBER)
    caller = ada()
    assert call(desk, caller) is not None
    assert call(desk, caller) is None
    advance(desk, limits.USED_SECONDS - 1)
    assert call(desk, caller) is None
    assert desk.counts == {"admitted": 1, "refused_replay": 2}
    advance(desk, 2)
    call(desk, ada())
    assert len(desk._used) == 1  # the first is forgotten


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_USED", 5)
    monkeypatch.setattr(limits, "MAX_WAITING", 3)
    desk = admission()
    desk.admit(MEMBER)
    names = []
    for _ in range(10):
        names.append(call(desk, ada()))
        advance(desk, 1)
    assert len(desk._used) == 5
    assert len(desk._waiting) == 3
    assert [desk.answerer(name or "") is not None for name in names] == [False] * 7 + [True] * 3


def test_who_connects_too_often_waits_and_a_replay_does_not_count_against_anybody() -> None:
    desk = admission()
    desk.admit(MEMBER)
    overheard = ada()
    assert call(desk, overheard) is not None
    for _ in range(100):
        assert call(desk, overheard) is None
    for _ in range(limits.BURST_CONNECTIONS - 1):
        assert call(desk, ada()) is not None
    assert call(desk, ada()) is None
    assert desk.counts["refused_too_often"] == 1
    advance(desk, 1.1)
    assert call(desk, ada()) is not None


def test_on_a_trusted_lan_only_neighbours_get_in_and_they_prove_their_key_too() -> None:
    desk = admission(plain=True)
    desk.admit(MEMBER)
    assert call(desk, ada(plain=True), address="8.8.8.8") is None
    assert call(desk, ada(plain=True), address="nonsense") is None
    assert call(desk, ada(), address="192.168.1.5") is None
    assert call(desk, ada(plain=True), address="192.168.1.5") is not None
    assert desk.counts == {"refused_far_address": 2, "refused_bad_proof": 1, "admitted": 1}


def test_a_probe_gets_in_for_a_while() -> None:
    desk = admission()
    desk.invite_probe(ADA.link_key, seconds=10)
    assert call(desk, ada()) is not None
    assert desk.is_probe(ADA.link_key)
    assert desk.member(ADA.link_key) is None
    advance(desk, 11)
    assert call(desk, ada()) is None


def test_one_key_belongs_to_one_peer() -> None:
    desk = admission()
    desk.admit(MEMBER)
    assert not desk.admit(Member(peer="eve", session="s1", key=ADA.link_key))
    assert not desk.admit(Member(peer="eve", session="s1", key="x"))
    assert desk.counts == {"unusable_keys": 2}
    assert desk.member(ADA.link_key) == MEMBER


@pytest.mark.parametrize("key", ["", "x" * 40 + "y", "é" * 40, "#" * 39, '"' * 40, "00000"])
def test_what_is_no_key_is_told_from_one(key: str) -> None:
    assert not is_key(key)
    with pytest.raises(ProtocolError, match="no link key"):
        decode_key(key)


def test_keys_that_are_no_pair_are_refused() -> None:
    with pytest.raises(ProtocolError, match="belong together"):
        LinkKeys(ADA.public, OURS.secret)
