"""How two peers greet on a fresh connection, and how each proves who it is.

    dialler                                  listener
    Hello(who I am, whom I mean, nonce)  →
                                         ←   Welcome(nonce, proof over both)
    Ready(proof over both)               →

Both sides then know that packets pass both ways. With CURVE, the connection has already proven both keys and the proofs
are a second lock. In trusted-LAN mode, where nothing is encrypted, they are what tells a member from a stranger: only
the holders of the two link keys can compute them. (Whoever can change packets on that LAN can still take over a
connection once it stands; that is the trust in the name.)
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Annotated

import msgspec
import zmq
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from zmq.utils import z85

from potluck.errors import ProtocolError
from potluck.messages import PROTOCOL_VERSION, Message, decode, encode

DATA = 0  # first byte of a packet's header frame; the rest is the header, as it was given
CONTROL = 1  # first byte of a greeting
DATA_MARK, CONTROL_MARK = bytes([DATA]), bytes([CONTROL])

MAX_CONTROL_BYTES = 1024
KEY_LENGTH = 40  # characters of a CURVE key in Z85

Name = Annotated[str, msgspec.Meta(max_length=128)]
Key = Annotated[str, msgspec.Meta(min_length=KEY_LENGTH, max_length=KEY_LENGTH)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Proof = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """The dialler's first word."""

    peer: Name  # empty: only a probe that tries whether this address can be reached
    session: Name
    key: Key  # the dialler's link key
    to: Key  # the link key of the peer that it means to reach
    nonce: Nonce
    protocol: int = PROTOCOL_VERSION


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The listener's answer."""

    nonce: Nonce
    proof: Proof


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    """The dialler has the answer: the path is open."""

    proof: Proof


Control = Hello | Welcome | Ready


class LinkKeys:
    """The CURVE keypair of one process's life."""

    def __init__(self, public: bytes, secret: bytes) -> None:
        """Take both keys in Z85; ProtocolError when they are none."""
        decode_key(public.decode("ascii", "replace"))
        self.public = public
        self.secret = secret
        self._private = X25519PrivateKey.from_private_bytes(decode_key(secret.decode("ascii", "replace")))

    @classmethod
    def generate(cls) -> LinkKeys:
        """A fresh pair."""
        return cls(*zmq.curve_keypair())

    @property
    def link_key(self) -> str:
        """The public key as a card shows it."""
        return self.public.decode("ascii")

    def shared_with(self, key: str) -> bytes:
        """A secret that only the holders of this pair and of `key` can compute; ProtocolError for a false key."""
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(decode_key(key)))
        except ValueError as error:
            raise ProtocolError(f"{key!r} is no link key: {error}") from error
        return hashlib.sha256(b"potluck link greeting" + shared).digest()


def decode_key(key: str) -> bytes:
    """The 32 bytes of a link key; ProtocolError when it is not one."""
    try:
        raw: bytes = z85.decode(key.encode("ascii"))
    except (ValueError, KeyError, struct.error) as error:
        raise ProtocolError(f"{key!r} is no link key: {error!r}") from error
    if len(raw) != 32:
        raise ProtocolError(f"{key!r} is no link key: it has {len(raw)} bytes instead of 32")
    return raw


def is_key(key: str) -> bool:
    """Whether this is a link key, by its form."""
    try:
        return len(decode_key(key)) == 32
    except ProtocolError:
        return False


def pack(message: Control) -> bytes:
    """A greeting as one frame."""
    return CONTROL_MARK + encode(message)


def unpack(frame: memoryview) -> Control:
    """The greeting in a control frame, or ProtocolError."""
    return decode(Control, frame[1:], limit_bytes=MAX_CONTROL_BYTES)  # type: ignore[arg-type]


def new_nonce() -> bytes:
    """Something that no greeting has had before."""
    return secrets.token_bytes(16)


def welcome_to(hello: Hello, keys: LinkKeys) -> Welcome:
    """The listener's answer to a Hello."""
    nonce = new_nonce()
    return Welcome(nonce=nonce, proof=_proof(b"welcome", hello, nonce, keys.shared_with(hello.key)))


def answer_to(hello: Hello, welcome: Welcome, keys: LinkKeys) -> Ready:
    """The dialler's last word; ProtocolError when the Welcome does not come from the peer that it meant."""
    shared = keys.shared_with(hello.to)
    if not hmac.compare_digest(welcome.proof, _proof(b"welcome", hello, welcome.nonce, shared)):
        raise ProtocolError("the answer to a greeting does not prove the key it was meant for: dropped")
    return Ready(proof=_proof(b"ready", hello, welcome.nonce, shared))


def check_ready(hello: Hello, welcome: Welcome, ready: Ready, keys: LinkKeys) -> None:
    """ProtocolError when the Ready does not come from the peer that said Hello."""
    shared = keys.shared_with(hello.key)
    if not hmac.compare_digest(ready.proof, _proof(b"ready", hello, welcome.nonce, shared)):
        raise ProtocolError("the end of a greeting does not prove the key it began with: dropped")


def _proof(word: bytes, hello: Hello, nonce: bytes, shared: bytes) -> bytes:
    return hmac.digest(shared, word + nonce + encode(hello), "sha256")
