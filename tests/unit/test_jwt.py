"""The auth callout's tokens: round trips, forgeries, and whatever bytes arrive instead."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ProtocolError
from potluck.hub.guard import callout
from potluck.hub.guard.connections import read_user_name, user_name
from potluck.hub.guard.jwt import MAX_TOKEN_BYTES, decode_base64, decode_token, encode_token
from potluck.hub.guard.permissions import Permissions
from potluck.hub.guard.presencecore import ConnectionId
from potluck.hub.keys import Signer, new_seed

NOW = 1_700_000_000.0
SERVER, ACCOUNT, PEER = Signer(new_seed("account")), Signer(new_seed("account")), Signer(new_seed("user"))
NONCE = "5Tfh4MPJyqt0Ke4"


class Claims(msgspec.Struct):
    sub: str
    iss: str
    iat: int
    jti: str


def read(token: str) -> dict[str, Any]:
    part = token.split(".")[1]
    return dict(json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))))


def question(**changes: Any) -> bytes:
    """What a server asks, as nats-server 2.15 writes it."""
    options = {
        "nkey": PEER.public_key,
        "sig": base64.b64encode(PEER.sign(NONCE.encode())).decode(),
        "name": "main",
        "lang": "python3",
        "protocol": 1,
    }
    client = {"host": "127.0.0.1", "id": 8, "kind": "Client", "type": "nats", "nonce": NONCE, "name": "main"}
    claims = {
        "aud": "nats-authorization-request",
        "sub": ACCOUNT.public_key,
        "nats": {
            "server_id": {"name": "one", "host": "127.0.0.1", "id": changes.pop("server", SERVER.public_key)},
            "user_nkey": "U" + "B" * 55,
            "client_info": {**client, **changes.pop("client", {})},
            "connect_opts": {**options, **changes.pop("options", {})},
            "type": "authorization_request",
            "version": 2,
        },
    }
    assert not changes
    return encode_token(claims, SERVER, now=NOW).encode()


def test_a_token_round_trip():
    token = encode_token({"sub": "x"}, ACCOUNT, now=NOW)
    claims, issuer = decode_token(Claims, token.encode())
    assert issuer == claims.iss == ACCOUNT.public_key
    assert (claims.sub, claims.iat) == ("x", int(NOW))
    assert "=" not in token


def test_each_flipped_character_is_noticed():
    token = encode_token({"sub": "x"}, ACCOUNT, now=NOW).encode()
    for position in range(len(token)):
        flipped = bytearray(token)
        flipped[position] = ord("A") if flipped[position] != ord("A") else ord("B")
        if decode_equal(bytes(flipped), token):  # the last character of a part has bits that mean nothing
            continue
        with pytest.raises(ProtocolError):
            decode_token(Claims, bytes(flipped))


def decode_equal(first: bytes, second: bytes) -> bool:
    try:
        return [decode_base64(p) for p in first.split(b".")] == [decode_base64(p) for p in second.split(b".")] and (
            first.split(b".")[:2] == second.split(b".")[:2]
        )
    except ProtocolError:
        return False


def test_another_algorithm_is_not_accepted():
    header = base64.urlsafe_b64encode(json.dumps({"typ": "JWT", "alg": "none"}).encode()).rstrip(b"=")
    token = encode_token({"sub": "x"}, ACCOUNT, now=NOW).encode().split(b".")
    with pytest.raises(ProtocolError, match="algorithm"):
        decode_token(Claims, b".".join([header, token[1], b""]))


def test_an_oversized_token_is_not_looked_at():
    with pytest.raises(ProtocolError, match="exceeds"):
        decode_token(Claims, b"." * (MAX_TOKEN_BYTES + 1))


@given(st.binary(max_size=300) | st.lists(st.binary(max_size=60), min_size=3, max_size=3).map(b".".join))
def test_any_bytes_are_refused(data: bytes):
    with pytest.raises(ProtocolError):
        callout.read_request(data)


def test_base64_of_both_alphabets():
    raw = bytes(range(256))
    for encoded in (base64.b64encode(raw), base64.urlsafe_b64encode(raw), base64.urlsafe_b64encode(raw).rstrip(b"=")):
        assert decode_base64(encoded) == raw
        assert decode_base64(encoded.decode()) == raw
    with pytest.raises(ProtocolError):
        decode_base64("a")
    with pytest.raises(ProtocolError):
        decode_base64("ab c")


def test_a_question_is_read():
    request = callout.read_request(question(options={"name": "main.abc-1"}))
    assert request.id == ConnectionId(SERVER.public_key, 8)
    assert (request.peer, request.lane, request.session, request.host) == (
        PEER.public_key,
        "main",
        "abc-1",
        "127.0.0.1",
    )
    assert request.is_proven()


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"sig": ""}},
        {"options": {"sig": "!!!"}},
        {"options": {"sig": base64.b64encode(b"x" * 64).decode()}},
        {"options": {"sig": base64.b64encode(PEER.sign(b"another nonce")).decode()}},
        {"options": {"nkey": Signer(new_seed("user")).public_key}},
        {"options": {"nkey": ""}},
        {"options": {"nkey": "U" + "A" * 55}},
        {"options": {"nkey": ACCOUNT.public_key, "sig": base64.b64encode(ACCOUNT.sign(NONCE.encode())).decode()}},
        {"client": {"nonce": ""}},
        {"client": {"nonce": "another nonce"}},
    ],
)
def test_a_key_that_is_not_proven(changes: dict[str, Any]):
    assert not callout.read_request(question(**changes)).is_proven()


def test_an_empty_nonce_signed_is_no_proof():
    signature = base64.b64encode(PEER.sign(b"")).decode()
    assert not callout.read_request(question(client={"nonce": ""}, options={"sig": signature})).is_proven()


def test_a_question_in_another_servers_name():
    with pytest.raises(ProtocolError, match="signed by"):
        callout.read_request(question(server=ACCOUNT.public_key))


@pytest.mark.parametrize("name", ["", "Main", "admin", "main ", "lobby2", ".main"])
def test_lanes_that_there_are_not(name: str):
    assert callout.read_request(question(options={"name": name})).lane is None


def test_the_answers():
    request = callout.read_request(question())
    permissions = Permissions(publish=("a.>",), subscribe=("b",))
    allowed = read(callout.allow(request, "main", permissions, account="RUN", signer=ACCOUNT, now=NOW).decode())
    assert (allowed["sub"], allowed["aud"], allowed["iss"]) == (request.user, SERVER.public_key, ACCOUNT.public_key)
    user = read(allowed["nats"]["jwt"])
    assert (user["sub"], user["aud"]) == (request.user, "RUN")
    assert user["nats"]["pub"] == {"allow": ["a.>"]}
    assert user["nats"]["sub"] == {"allow": ["b"]}
    assert read_user_name(user["name"]) == (PEER.public_key, "main", "")
    refused = read(callout.refuse(request, "banned", signer=ACCOUNT, now=NOW).decode())
    assert refused["nats"]["error"] == "banned"
    assert "jwt" not in refused["nats"]


@given(lane=st.sampled_from(["lobby", "main", "bulk"]), session=st.from_regex(r"\A[A-Za-z0-9_-]{0,64}\Z"))
def test_user_names_round_trip(lane: Any, session: str):
    if session == "-":
        session = ""
    assert read_user_name(user_name(PEER.public_key, lane, session)) == (PEER.public_key, lane, session)


@given(st.text(max_size=100))
def test_other_user_names_are_nobodys(name: str):
    assert read_user_name(name) is None
