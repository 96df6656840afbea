"""Who gets in to the direct links, on a clock of its own."""

from __future__ import annotations

import os

import pytest

from potluck.errors import ProtocolError
from potluck.link.direct import admission as limits
from potluck.link.direct.admission import ANSWERS, Admission, KnownPeer
from potluck.link.direct.greeting import (
    KEY_LENGTH,
    NOT_ADMITTED,
    READY,
    REFUSALS,
    Answerer,
    Caller,
    Knock,
    LinkKeys,
    decode_key,
    is_key,
)
from potluck.sim.virtualclock import VirtualClock

OURS = LinkKeys.generate()
ADA = LinkKeys.generate()
MEMBER = KnownPeer(peer="ada", session="s1", key=ADA.link_key)


CLOCK = VirtualClock()


def admission(*, plain: bool = False) -> Admission:
    return Admission(CLOCK, OURS, plain=plain)


def call(desk: Admission, caller: Caller, *, host: str = "127.0.0.1", **changes: object) -> Answerer | None:
    """What becomes of this Knock, or of a changed one; None when it is refused."""
    answer = desk.judge(caller.knock._replace(**changes), host=host)
    assert isinstance(answer, Answerer) or answer in REFUSALS
    return answer if isinstance(answer, Answerer) else None


def ada(*, plain: bool = False) -> Caller:
    return Caller(ADA, OURS.link_key, plain=plain)


def test_a_member_gets_in_and_both_hold_the_same_keys() -> None:
    desk = admission()
    assert desk.admit(MEMBER)
    caller = ada()
    answerer = call(desk, caller)
    assert answerer is not None
    welcome, out, back = answerer.welcome()
    their_out, their_back = caller.answer(welcome[1:])
    assert back.open(their_out.seal(READY)) == READY
    assert their_back.open(out.seal(b"packet")) == b"packet"
    assert desk.counts == {"admitted": 1}


def test_strangers_the_withdrawn_and_the_banned_stay_out() -> None:
    desk = admission()
    assert call(desk, ada()) is None
    assert call(desk, ada(), key="ff" * 32) is None
    desk.admit(MEMBER)
    desk.withdraw("ada")
    assert call(desk, ada()) is None
    desk.admit(MEMBER)
    desk.ban("ada")
    assert call(desk, ada()) is None
    assert not desk.admit(MEMBER)
    assert desk.counts == {"refused_unknown_key": 3, "refused_banned_key": 1}


def test_another_version_or_mode_is_told_apart() -> None:
    desk = admission()
    desk.admit(MEMBER)
    assert call(desk, ada(), version=7) is None
    assert call(desk, ada(plain=True)) is None
    assert desk.counts == {"refused_version": 1, "refused_mode": 1}


def test_what_a_stranger_is_told_does_not_say_why() -> None:
    assert {ANSWERS[reason] for reason in ("unknown_key", "banned_key", "far_address")} == {NOT_ADMITTED}


def test_a_key_without_its_proof_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_USED", 2)
    desk = admission()
    desk.admit(MEMBER)
    known = ada()
    assert call(desk, known) is not None
    bob = LinkKeys.generate()
    false = [
        Caller(bob, OURS.link_key, plain=False).knock.handshake,  # somebody else's
        Caller(ADA, bob.link_key, plain=False).knock.handshake,  # meant for somebody else
        ada(plain=True).knock.handshake,  # for another mode
        ada().knock.handshake[:-1],
        ada().knock.handshake + b"x",
        bytes(48),  # a point of small order
        os.urandom(48),
        b"",
    ]
    for handshake in false:
        assert call(desk, ada(), handshake=handshake) is None
    assert desk.counts == {"admitted": 1, "refused_bad_proof": len(false)}
    assert call(desk, known) is None, "it is remembered: strangers cannot fill the room for that"
    assert desk.counts["refused_replay"] == 1


def test_a_proof_counts_once() -> None:
    desk = admission()
    desk.admit(MEMBER)
    caller = ada()
    assert call(desk, caller) is not None
    assert call(desk, caller) is None
    CLOCK.advance(limits.USED_SECONDS - 1)
    assert call(desk, caller) is None
    assert desk.counts == {"admitted": 1, "refused_replay": 2}
    CLOCK.advance(2)
    assert call(desk, caller) is not None, "it is forgotten"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_USED", 5)
    desk = admission()
    desk.admit(MEMBER)
    callers = [ada() for _ in range(10)]
    for caller in callers:
        assert call(desk, caller) is not None
        CLOCK.advance(1)
    assert call(desk, callers[-1]) is None
    assert call(desk, callers[0]) is not None, "the oldest make room"


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
    CLOCK.advance(1.1)
    assert call(desk, ada()) is not None


def test_on_a_trusted_lan_only_neighbours_get_in_and_they_prove_their_key_too() -> None:
    desk = admission(plain=True)
    desk.admit(MEMBER)
    assert call(desk, ada(plain=True), host="8.8.8.8") is None
    assert call(desk, ada(plain=True), host="nonsense") is None
    assert call(desk, ada(), host="192.168.1.5") is None
    assert call(desk, ada(plain=True), host="192.168.1.5") is not None
    assert call(desk, ada(), host="192.168.1.5", plain=True) is None
    assert desk.counts == {"refused_far_address": 2, "refused_mode": 1, "refused_bad_proof": 1, "admitted": 1}


def test_a_probe_gets_in_for_a_while() -> None:
    desk = admission()
    desk.invite_probe(ADA.link_key, seconds=10)
    assert call(desk, ada()) is not None
    assert desk.is_probe(ADA.link_key)
    assert desk.member(ADA.link_key) is None
    CLOCK.advance(11)
    assert call(desk, ada()) is None


def test_one_key_belongs_to_one_peer() -> None:
    desk = admission()
    desk.admit(MEMBER)
    assert not desk.admit(KnownPeer(peer="eve", session="s1", key=ADA.link_key))
    assert not desk.admit(KnownPeer(peer="eve", session="s1", key="x"))
    assert desk.counts == {"unusable_keys": 2}
    assert desk.member(ADA.link_key) == MEMBER


@pytest.mark.parametrize("key", ["", "0" * 63, "0" * 65, "x" * 64, "é" * 64, "0 " * 32, "AB" * 32, "0" * 62 + "  "])
def test_what_is_no_key_is_told_from_one(key: str) -> None:
    assert not is_key(key)
    with pytest.raises(ProtocolError, match="no link key"):
        decode_key(key)


def test_keys_that_are_no_pair_are_refused() -> None:
    with pytest.raises(ProtocolError, match="belong together"):
        LinkKeys.parse(ADA.link_key, OURS.secret)


def test_keys_and_knocks_are_read_as_they_were_written() -> None:
    again = LinkKeys.parse(ADA.link_key, ADA.secret)
    assert again.link_key == ADA.link_key
    assert len(ADA.link_key) == len(ADA.secret) == KEY_LENGTH
    knock = ada().knock
    assert Knock.parse(knock.pack()) == knock
    for other in (b"Potluck" + knock.pack()[7:], knock.pack()[:9] + b"\x02" + knock.pack()[10:]):
        with pytest.raises(ProtocolError, match="Knock"):
            Knock.parse(other)
