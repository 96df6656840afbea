"""Who gets in: every answer the lobby can give, from facts alone."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ProtocolError
from potluck.hub.access.application import Application
from potluck.hub.access.invite import new_invite
from potluck.hub.access.member import AccessRequest, Ban, Member, Policy, Scopes
from potluck.hub.guard import lobby
from potluck.hub.guard.huggingface import TokenFailure, TokenOwner
from potluck.hub.guard.lobby import Admit, Facts, Refuse, Wait, decide
from potluck.messages import PROTOCOL_VERSION, decode, encode

NOW = 1_700_000_000.0
PEER = "U" + "A" * 55
BOTH = Scopes(roles=("trainer", "aux"), coordinates=True)
INVITE, SECRET = new_invite(scopes=BOTH, now=NOW, lifetime_seconds=100)
TOKENS = Policy(token_holders="listed", users=("alice",), organisations=("bakers",))


def facts(**changes: Any) -> Facts:
    return Facts(**{"peer": PEER, "host": "192.0.2.1", "now": NOW, "policy": Policy(), **changes})


def member(**changes: Any) -> Member:
    return Member(**{"peer": PEER, "person": f"key:{PEER}", "scopes": Scopes(), **changes})


def refusal(application: Application, **known: Any) -> str:
    decision = decide(application, facts(**known))
    assert isinstance(decision, Refuse), decision
    assert decision.message
    return decision.code


def test_an_invite_lets_in_with_its_scopes():
    decision = decide(Application(role="aux", invite=SECRET, name="Ann", service="kaggle"), facts(invite=INVITE))
    assert isinstance(decision, Admit)
    assert decision.invite_id == INVITE.id
    assert decision.member.scopes == BOTH
    assert (decision.member.role, decision.member.service, decision.member.name) == ("aux", "kaggle", "Ann")
    assert decision.member.person == f"key:{PEER}"
    assert lobby.admitted(decision.member).scopes == BOTH


def test_all_who_come_by_a_persons_invite_are_that_persons_peers():
    invite = msgspec.structs.replace(INVITE, person="guest:bob")
    decision = decide(Application(role="aux", invite=SECRET), facts(invite=invite))
    assert isinstance(decision, Admit)
    assert decision.member.person == "guest:bob"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"revoked": True}, "revoked"),
        ({"expires_at": NOW}, "expired"),
        ({"uses": 3, "used": 3}, "used_up"),
        ({"scopes": Scopes(roles=("observer",))}, "role"),
        ({"secret_hash": "0" * 64}, "unknown_invite"),
    ],
)
def test_what_is_wrong_with_an_invite_is_told(change: dict[str, Any], code: str):
    invite = msgspec.structs.replace(INVITE, **change)
    assert refusal(Application(role="trainer", invite=SECRET), invite=invite) == code


def test_an_unknown_invite_does_not_lead_to_the_waiting_list():
    assert refusal(Application(role="trainer", invite="guess")) == "unknown_invite"


def test_a_member_needs_no_invite_and_uses_none():
    known = member(name="Ann", admitted_by="invite:abc")
    decision = decide(Application(role="trainer", invite=SECRET, service="colab"), facts(member=known, invite=INVITE))
    assert isinstance(decision, Admit)
    assert decision.invite_id == ""
    assert (decision.member.service, decision.member.name) == ("colab", "Ann")
    assert decision.member.admitted_by == "invite:abc"


def test_a_member_is_told_which_roles_it_has_and_an_invite_adds_others():
    known = member()
    assert refusal(Application(role="aux"), member=known) == "role"
    decision = decide(Application(role="aux", invite=SECRET), facts(member=known, invite=INVITE))
    assert isinstance(decision, Admit)
    assert set(decision.member.scopes.roles) == {"trainer", "aux"}
    assert decision.member.scopes.coordinates


def test_the_banned_are_told_so_whatever_they_bring():
    ban = Ban(target=PEER, reason="noise")
    known = {"bans": (ban,), "member": member(), "invite": INVITE}
    assert refusal(Application(role="trainer", invite=SECRET), **known) == "banned"
    decision = decide(Application(role="trainer"), facts(**known))
    assert isinstance(decision, Refuse)
    assert "noise" in decision.message


@pytest.mark.parametrize(
    ("version", "minimum", "protocol", "code"),
    [
        ("0.1.0", "0.2.0", PROTOCOL_VERSION, "version_too_old"),
        ("0.2.0rc1", "0.10.0", PROTOCOL_VERSION, "version_too_old"),
        ("", "0.1.0", PROTOCOL_VERSION, "version_too_old"),
        ("latest", "0.1.0", PROTOCOL_VERSION, "version_too_old"),
        ("9.9.9", "", PROTOCOL_VERSION - 1, "version_too_old"),
        ("0.1.0", "", PROTOCOL_VERSION + 1, "version_too_new"),
    ],
)
def test_versions_that_do_not_fit(version: str, minimum: str, protocol: int, code: str):
    application = Application(role="trainer", invite=SECRET, version=version, protocol=protocol)
    assert refusal(application, invite=INVITE, policy=Policy(minimum_version=minimum)) == code


def test_a_new_enough_version_gets_in():
    application = Application(role="trainer", invite=SECRET, version="0.10.1.dev3")
    assert isinstance(decide(application, facts(invite=INVITE, policy=Policy(minimum_version="0.9.5"))), Admit)


def test_seats_are_limited_by_policy_and_by_invite():
    application = Application(role="trainer", invite=SECRET, service="kaggle")
    policy = Policy(seats={"kaggle": 2})
    assert isinstance(decide(application, facts(invite=INVITE, policy=policy, seats_taken=1)), Admit)
    assert refusal(application, invite=INVITE, policy=policy, seats_taken=2) == "seats"
    wider = msgspec.structs.replace(INVITE, scopes=Scopes(seats={"kaggle": 3}))
    assert isinstance(decide(application, facts(invite=wider, policy=policy, seats_taken=2)), Admit)
    assert refusal(application, invite=wider, policy=policy, seats_taken=3) == "seats"
    elsewhere = Application(role="trainer", invite=SECRET, service="local")
    assert isinstance(decide(elsewhere, facts(invite=INVITE, policy=policy, seats_taken=99)), Admit)


def test_a_made_up_service_counts_as_local():
    application = Application(role="trainer", invite=SECRET, service="my-own-cloud")
    assert refusal(application, invite=INVITE, policy=Policy(seats={"local": 1}), seats_taken=1) == "seats"


def test_without_invite_one_waits_and_keeps_ones_place():
    application = Application(role="trainer", name="Ann", message="let me in")
    decision = decide(application, facts(num_waiting=4))
    assert isinstance(decision, Wait)
    assert (decision.place, decision.is_new) == (5, True)
    assert decision.request == AccessRequest(
        peer=PEER,
        person=f"key:{PEER}",
        role="trainer",
        name="Ann",
        message="let me in",
        host="192.0.2.1",
        asked_at=NOW,
    )
    again = decide(application, facts(num_waiting=9, place=3, request=decision.request))
    assert isinstance(again, Wait)
    assert (again.place, again.is_new) == (3, False)
    assert lobby.waiting(again.place).place == 3


def test_looking_uses_up_no_invite_and_gives_no_other_role():
    invite, secret = new_invite(scopes=Scopes(roles=("trainer", "observer"), coordinates=True), now=NOW, uses=1)
    looking = decide(Application(role="observer", invite=secret), facts(invite=invite))
    assert isinstance(looking, Admit)
    assert (looking.invite_id, looking.member.scopes) == ("", Scopes(roles=("observer",)))
    training = decide(Application(role="trainer", invite=secret), facts(invite=invite, member=looking.member))
    assert isinstance(training, Admit)
    assert training.invite_id == invite.id, "whoever looked first is counted all the same"
    assert set(training.member.scopes.roles) == {"trainer", "observer"}
    used = msgspec.structs.replace(invite, used=1)
    assert isinstance(decide(Application(role="observer", invite=secret), facts(invite=used)), Admit)


def test_who_does_not_ask_leaves_no_request():
    assert refusal(Application(role="observer", asks=False)) == "closed"
    mine = AccessRequest(peer=PEER, person=f"key:{PEER}", role="observer")
    assert isinstance(decide(Application(role="observer", asks=False), facts(request=mine, place=1)), Wait)


def test_a_refused_role_is_told_with_what_may_be_done_instead():
    decision = decide(Application(role="observer", invite=SECRET), facts(invite=INVITE))
    assert isinstance(decision, Refuse)
    assert "only as trainer or aux, not as observer" in decision.message
    assert "potluck join --role trainer" in decision.message


def test_the_denied_are_told_so_when_they_ask_again():
    request = AccessRequest(peer=PEER, person=f"key:{PEER}", role="trainer", denied=True, reason="full house")
    decision = decide(Application(role="trainer"), facts(request=request))
    assert isinstance(decision, Refuse)
    assert decision.code == "denied"
    assert "full house" in decision.message
    assert isinstance(decide(Application(role="aux", invite=SECRET), facts(request=request, invite=INVITE)), Admit)


def test_the_waiting_list_is_bounded_and_may_be_closed():
    assert refusal(Application(role="trainer"), num_waiting=5, policy=Policy(max_waiting=5)) == "lobby_full"
    assert refusal(Application(role="trainer"), num_waiting=10, lobby_places=20) == "lobby_full"
    assert refusal(Application(role="trainer"), policy=Policy(waiting_list=False)) == "closed"


def test_an_address_has_its_share_of_the_waiting_list():
    assert refusal(Application(role="trainer"), num_waiting=60, num_from_address=50) == "lobby_full"
    decision = decide(Application(role="trainer"), facts(num_waiting=60, num_from_address=49))
    assert isinstance(decision, Wait)
    assert (decision.place, decision.displaces) == (61, "")


def test_who_comes_from_a_quiet_address_displaces_somebody_of_the_busiest():
    decision = decide(Application(role="trainer"), facts(num_waiting=200, first_to_go="UMALLORY"))
    assert isinstance(decision, Wait)
    assert (decision.place, decision.displaces) == (200, "UMALLORY")
    assert isinstance(decide(Application(role="aux", invite=SECRET), facts(num_waiting=200, invite=INVITE)), Admit)


@pytest.mark.parametrize(
    ("owner", "holders", "admitted"),
    [
        (TokenOwner(user="alice"), "listed", True),
        (TokenOwner(user="bob", organisations=("brewers", "bakers")), "listed", True),
        (TokenOwner(user="bob", organisations=("brewers",)), "listed", False),
        (TokenOwner(user="bob"), "anyone", True),
    ],
)
def test_tokens_by_policy(owner: TokenOwner, holders: Any, admitted: bool):
    policy = msgspec.structs.replace(TOKENS, token_holders=holders)
    decision = decide(Application(role="trainer", token="hf_x"), facts(policy=policy, token=owner))
    if admitted:
        assert isinstance(decision, Admit)
        assert decision.member.person == owner.person
        assert decision.member.admitted_by == "huggingface"
    else:
        assert isinstance(decision, Wait)
        assert decision.request.person == owner.person
    closed = msgspec.structs.replace(policy, waiting_list=False)
    if not admitted:
        assert refusal(Application(role="trainer", token="hf_x"), policy=closed, token=owner) == "not_listed"


def test_a_tokens_owner_without_the_role_may_wait_for_it():
    owner = TokenOwner(user="alice")
    decision = decide(Application(role="aux", token="hf_x"), facts(policy=TOKENS, token=owner))
    assert isinstance(decision, Wait)
    closed = msgspec.structs.replace(TOKENS, waiting_list=False)
    assert refusal(Application(role="aux", token="hf_x"), policy=closed, token=owner) == "role"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("bad_token", "bad_token"),
        ("too_many", "token_service_down"),
        ("server_error", "token_service_down"),
        ("timeout", "token_service_down"),
        ("not_json", "token_service_down"),
    ],
)
def test_a_token_that_cannot_be_checked(kind: Any, code: str):
    failure = TokenFailure(kind=kind, message="why", retry_after_seconds=None if kind == "bad_token" else 7.0)
    decision = decide(Application(role="trainer", token="hf_x"), facts(policy=TOKENS, token=failure))
    assert isinstance(decision, Refuse)
    assert decision.code == code
    assert lobby.refused(decision).retry_after_seconds == failure.retry_after_seconds


def test_when_a_token_has_to_be_checked():
    with_token = Application(role="trainer", token="hf_x")
    assert lobby.needs_token_check(with_token, None, TOKENS)
    assert not lobby.needs_token_check(with_token, None, Policy())
    assert not lobby.needs_token_check(with_token, member(), TOKENS)
    assert not lobby.needs_token_check(Application(role="trainer", token="hf_x", invite="y"), None, TOKENS)
    assert not lobby.needs_token_check(Application(role="trainer"), None, TOKENS)


def test_secrets_do_not_show_in_logs():
    text = repr(Application(role="trainer", token="hf_secret", invite="hidden"))
    assert "hf_secret" not in text
    assert "hidden" not in text


def test_oversized_fields_do_not_decode():
    for field in ("invite", "token", "name", "service", "version", "message"):
        data = encode({"role": "trainer", field: "x" * 600})
        with pytest.raises(ProtocolError, match=field):
            decode(Application, data)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(data: bytes):
    with contextlib.suppress(ProtocolError):
        decode(Application, data)


@given(
    role=st.sampled_from(["trainer", "aux", "observer"]),
    invite=st.sampled_from(["", SECRET, "guess"]),
    token=st.sampled_from(["", "hf_x"]),
    banned=st.booleans(),
    is_member=st.booleans(),
    waits=st.booleans(),
    seats_taken=st.integers(0, 10),
    holders=st.sampled_from(["refused", "listed", "anyone"]),
    waiting_list=st.booleans(),
    owner=st.sampled_from([TokenOwner(user="bob"), TokenFailure(kind="bad_token", message="no")]),
)
def test_nobody_gets_in_without_a_reason(
    role: Any,
    invite: str,
    token: str,
    banned: bool,
    is_member: bool,
    waits: bool,
    seats_taken: int,
    holders: Any,
    waiting_list: bool,
    owner: Any,
):
    application = Application(role=role, invite=invite, token=token)
    known = facts(
        bans=(Ban(target=PEER),) if banned else (),
        member=member() if is_member else None,
        invite=INVITE if invite == SECRET else None,
        token=owner,
        request=AccessRequest(peer=PEER, person="key:x", role=role) if waits else None,
        seats_taken=seats_taken,
        policy=Policy(token_holders=holders, waiting_list=waiting_list, seats={"local": 5}),
    )
    decision = decide(application, known)
    if isinstance(decision, Admit):
        by_record = is_member and role == "trainer"
        by_invite = invite == SECRET and role in BOTH.roles
        by_token = bool(token) and not invite and holders == "anyone" and isinstance(owner, TokenOwner)
        assert by_record or by_invite or (by_token and role == "trainer")
        assert not banned
        assert seats_taken < 5
        assert role in decision.member.scopes.roles
    elif isinstance(decision, Wait):
        assert waiting_list or waits
        assert not banned
