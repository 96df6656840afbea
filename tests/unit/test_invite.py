"""Invites: what is kept of them, and each reason for a no."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ConfigurationError
from potluck.hub.access.invite import (
    MAX_RECENT,
    RECENT_SECONDS,
    Invite,
    after_return,
    after_use,
    check,
    granted,
    invite_id,
    new_invite,
)
from potluck.hub.access.member import Scopes
from potluck.messages import decode, encode

NOW = 1_700_000_000.0


def test_a_new_invite_is_valid_and_holds_no_secret():
    invite, secret = new_invite(scopes=Scopes(), now=NOW)
    assert check(invite, secret, "trainer", NOW) == "valid"
    assert secret.encode() not in encode(invite)
    assert invite.id == invite_id(secret)
    assert decode(Invite, encode(invite)) == invite


def test_two_invites_are_different():
    (first, first_secret), (second, second_secret) = (new_invite(scopes=Scopes(), now=NOW) for _ in range(2))
    assert first.id != second.id
    assert first_secret != second_secret
    assert check(first, second_secret, "trainer", NOW) == "unknown_invite"


def test_each_reason_is_told_apart():
    invite, secret = new_invite(scopes=Scopes(roles=("trainer", "observer")), now=NOW, uses=2, lifetime_seconds=60)
    replace = msgspec.structs.replace
    assert check(None, secret, "trainer", NOW) == "unknown_invite"
    assert check(invite, secret + "x", "trainer", NOW) == "unknown_invite"
    assert check(invite, secret, "trainer", NOW + 59.9) == "valid"
    assert check(invite, secret, "trainer", NOW + 60) == "expired"
    assert check(replace(invite, revoked=True), secret, "trainer", NOW) == "revoked"
    assert check(replace(invite, used=1), secret, "trainer", NOW) == "valid"
    assert check(replace(invite, used=2), secret, "trainer", NOW) == "used_up"
    assert check(invite, secret, "aux", NOW) == "role"
    assert check(invite, secret, "observer", NOW) == "valid"


def test_a_wrong_secret_learns_nothing_of_the_invite():
    invite, _ = new_invite(scopes=Scopes(), now=NOW, lifetime_seconds=1)
    assert check(msgspec.structs.replace(invite, revoked=True), "guess", "aux", NOW + 2) == "unknown_invite"


@given(uses=st.none() | st.integers(1, 20), tries=st.integers(0, 25))
def test_uses_are_counted(uses: int | None, tries: int):
    invite, secret = new_invite(scopes=Scopes(), now=NOW, uses=uses)
    admitted = 0
    for _ in range(tries):
        if check(invite, secret, "trainer", NOW) == "valid":
            invite = after_use(invite)
            admitted += 1
    assert admitted == (tries if uses is None else min(tries, uses))


def test_who_only_looks_is_not_counted_and_may_do_nothing_else():
    scopes = Scopes(roles=("trainer", "observer"), coordinates=True, trusted=True, seats={"local": 3})
    invite, secret = new_invite(scopes=scopes, now=NOW, uses=1)
    used = after_use(invite)
    assert check(used, secret, "trainer", NOW) == "used_up"
    assert check(used, secret, "observer", NOW) == "valid"
    assert check(msgspec.structs.replace(used, revoked=True), secret, "observer", NOW) == "revoked"
    assert granted(invite, "trainer") == scopes
    assert granted(invite, "observer") == Scopes(roles=("observer",), seats={"local": 3})


def test_a_peer_that_comes_again_soon_is_counted_once():
    """The hub may have lost a server after it counted, and before it wrote the member down."""
    invite, secret = new_invite(scopes=Scopes(), now=NOW, uses=1)
    used = after_use(invite, "ann", NOW)
    assert used.used == 1
    assert check(used, secret, "trainer", NOW + 1, "bob") == "used_up"
    assert check(used, secret, "trainer", NOW + 1, "ann") == "valid"
    assert after_use(used, "ann", NOW + 1) == used
    assert check(used, secret, "trainer", NOW + RECENT_SECONDS, "ann") == "used_up"
    assert check(after_return(used, "ann"), secret, "trainer", NOW, "bob") == "valid"
    many, _ = new_invite(scopes=Scopes(), now=NOW)
    for number in range(10 * MAX_RECENT):
        many = after_use(many, f"peer {number}", NOW + number)
    assert many.used == 10 * MAX_RECENT
    assert list(many.recent) == [f"peer {number}" for number in range(9 * MAX_RECENT, 10 * MAX_RECENT)]


def test_a_use_can_be_given_back():
    invite, secret = new_invite(scopes=Scopes(), now=NOW, uses=1)
    used = after_use(invite)
    assert check(used, secret, "trainer", NOW) == "used_up"
    assert check(after_return(used), secret, "trainer", NOW) == "valid"
    assert after_return(invite).used == 0


@pytest.mark.parametrize(
    "wrong",
    [{"uses": 0}, {"uses": -1}, {"lifetime_seconds": 0}, {"note": "x" * 501}, {"person": "alice"}],
)
def test_impossible_invites_are_refused_with_the_remedy(wrong: dict[str, object]):
    with pytest.raises(ConfigurationError):
        new_invite(scopes=Scopes(), now=NOW, **wrong)  # type: ignore[arg-type]


def test_scopes_are_checked():
    with pytest.raises(ConfigurationError, match="at least one"):
        Scopes(roles=())
    with pytest.raises(ConfigurationError, match="0 or more"):
        Scopes(seats={"kaggle": -1})
