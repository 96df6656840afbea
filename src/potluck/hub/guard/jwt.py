"""The tokens that a NATS server and its auth callout exchange.

They are JSON Web Tokens with one algorithm, `ed25519-nkey`, and base64url without padding. A server signs its question
with its own key; the answer, and the user inside it, are signed with the account's key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any, TypeVar

import msgspec

from potluck.errors import ProtocolError
from potluck.hub import keys

MAX_TOKEN_BYTES = 64 * 1024
ALGORITHM = "ed25519-nkey"

C = TypeVar("C")


class _Header(msgspec.Struct):
    alg: str
    typ: str = "JWT"


class _Issuer(msgspec.Struct):
    iss: str


_HEADER = {"typ": "JWT", "alg": ALGORITHM}
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def encode_token(claims: dict[str, Any], signer: keys.Signer, *, now: float) -> str:
    """The claims as a token; who issued it, when, and its id are filled in."""
    body = {**claims, "iss": signer.public_key, "iat": int(now)}
    digest = hashlib.sha256(msgspec.json.encode(body)).digest()
    body["jti"] = base64.b32encode(digest).rstrip(b"=").decode()
    signed = _encode_part(msgspec.json.encode(_HEADER)) + "." + _encode_part(msgspec.json.encode(body))
    return f"{signed}.{_encode_part(signer.sign(signed.encode()))}"


def decode_token(kind: type[C], token: bytes) -> tuple[C, str]:
    """The claims of a token, and who signed them; ProtocolError when it is malformed or the signature is wrong."""
    if len(token) > MAX_TOKEN_BYTES:
        raise ProtocolError(f"a token of {len(token)} bytes exceeds the limit of {MAX_TOKEN_BYTES}: dropped")
    parts = token.split(b".")
    if len(parts) != 3:
        raise ProtocolError(f"a token has three parts and this one {len(parts)}: dropped")
    header, body, signature = (decode_base64(part) for part in parts)
    if _decode_json(_Header, header).alg != ALGORITHM:
        raise ProtocolError("a token with another algorithm: dropped")
    issuer = _decode_json(_Issuer, body).iss
    if not keys.verify(issuer, parts[0] + b"." + parts[1], signature):
        raise ProtocolError("a token whose signature is wrong: dropped")
    return _decode_json(kind, body), issuer


def decode_base64(data: bytes | str) -> bytes:
    """Base64 in either alphabet, padded or not; ProtocolError for anything else."""
    raw = data.encode() if isinstance(data, str) else data
    raw = raw.rstrip(b"=").translate(bytes.maketrans(b"-_", b"+/"))
    try:
        return base64.b64decode(raw + b"=" * (-len(raw) % 4), validate=True)
    except binascii.Error as error:
        raise ProtocolError(f"not base64: {error}") from error


def _encode_part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode_json(kind: type[C], data: bytes) -> C:
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        claims: C = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a token with unreadable claims: {error}") from error
    return claims
