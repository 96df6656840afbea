"""The auth callout's messages: a server asks about a connection, the guard answers (pure).

A peer proves that it holds its key by a signature over the server's nonce, so the question holds all that is needed
to know *who* connects. *What* it may do is the guard's decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from potluck.errors import ProtocolError
from potluck.hub import keys
from potluck.hub.guard.connections import Lane, known_lane, user_name
from potluck.hub.guard.jwt import decode_base64, decode_token, encode_token
from potluck.hub.guard.permissions import Permissions
from potluck.hub.guard.presencecore import ConnectionId
from potluck.hub.subjects import PEER_ID

SUBJECT = "$SYS.REQ.USER.AUTH"
CONNECTION_TYPES = ("nats", "websocket")
NO_LIMIT = -1


class _Server(msgspec.Struct):
    id: str


class _Client(msgspec.Struct):
    id: int
    host: str = ""
    nonce: str = ""
    type: str = ""


class _Options(msgspec.Struct):
    nkey: str = ""
    sig: str = ""
    name: str = ""


class _Question(msgspec.Struct):
    user_nkey: str
    server_id: _Server
    client_info: _Client
    connect_opts: _Options


class _Claims(msgspec.Struct):
    nats: _Question


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectRequest:
    """A server's question about one connection. Nothing in it is proven but that the server asked."""

    user: str  # the name under which this one question is answered
    id: ConnectionId
    host: str
    peer: str  # who it says it is
    signature: str
    nonce: str
    name: str  # the lane, and after a dot the session
    type: str

    @property
    def lane(self) -> Lane | None:
        """Which lane is wanted; None when there is no such lane."""
        return known_lane(self.name.partition(".")[0])

    @property
    def session(self) -> str:
        """Which process of the peer it is, if it says so."""
        return self.name.partition(".")[2]

    def is_proven(self) -> bool:
        """Whether the peer holds the key that it is named after."""
        if not self.nonce or not self.signature or not PEER_ID.fullmatch(self.peer):
            return False
        try:
            signature = decode_base64(self.signature)
        except ProtocolError:
            return False
        return keys.verify(self.peer, self.nonce.encode(), signature)


def read_request(token: bytes) -> ConnectRequest:
    """The question in a server's token; ProtocolError when it is not one, or not signed by the server it names."""
    claims, issuer = decode_token(_Claims, token)
    question = claims.nats
    if issuer != question.server_id.id:
        raise ProtocolError(f"a question in the name of server {question.server_id.id} signed by {issuer}: dropped")
    client, options = question.client_info, question.connect_opts
    return ConnectRequest(
        user=question.user_nkey,
        id=ConnectionId(question.server_id.id, client.id),
        host=client.host,
        peer=options.nkey,
        signature=options.sig,
        nonce=client.nonce,
        name=options.name,
        type=client.type,
    )


def allow(
    request: ConnectRequest, lane: Lane, permissions: Permissions, *, account: str, signer: keys.Signer, now: float
) -> bytes:
    """The answer that lets a connection in."""
    user = {
        "sub": request.user,
        "name": user_name(request.peer, lane, request.session),
        "aud": account,
        # The limits are stated for completeness: a server in this mode takes them from its own configuration.
        "nats": {
            "type": "user",
            "version": 2,
            **permissions.as_claims(),
            "subs": NO_LIMIT,
            "data": NO_LIMIT,
            "payload": NO_LIMIT,
        },
    }
    return _answer(request, {"jwt": encode_token(user, signer, now=now)}, signer, now)


def refuse(request: ConnectRequest, why: str, *, signer: keys.Signer, now: float) -> bytes:
    """The answer that keeps a connection out. The server logs why; the client only learns that it was refused."""
    return _answer(request, {"error": why}, signer, now)


def _answer(request: ConnectRequest, content: dict[str, Any], signer: keys.Signer, now: float) -> bytes:
    claims = {
        "sub": request.user,
        "aud": request.id.server,
        "nats": {"type": "authorization_response", "version": 2, **content},
    }
    return encode_token(claims, signer, now=now).encode()
