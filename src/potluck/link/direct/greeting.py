"""How two peers greet on a fresh connection, and how each proves who it is.

    dialler                                                         listener
    Knock: version, mode, link key, first handshake message     →   the admission decides (admission.py)
                                                                ←   Welcome: the second handshake message
                                                                    or one byte that says why not
    Ready, sealed                                               →

Each of them has one size, so nobody has to believe a length before it knows the other side. The Knock proves the
dialler's key; the Welcome proves the listener's, and the Ready that the dialler is there now and does not merely repeat
what it once overheard. Both sides then know that bytes pass both ways, and hold keys for them that no other connection
has (noise.py).

The peer that the dialler means, both keys, the protocol's version and the mode are part of what the handshake proves:
two sides that differ in one of them do not understand each other's first message. In trusted-LAN mode the same greeting
tells a member from a stranger, and what follows it is not sealed. (An attacker who can change packets on that LAN can
take over a connection once it stands; that is the trust in the name.)

A refusal is not proven, since who refuses may not know the key that was meant: it is for a person to read.
"""

from __future__ import annotations

import struct
from typing import Annotated, NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from potluck.errors import ProtocolError
from potluck.link.direct.noise import KEY_BYTES, MESSAGE_BYTES, TAG_BYTES, Cipher, Handshake
from potluck.messages import PROTOCOL_VERSION

_KNOCK = struct.Struct(f">7sHB{KEY_BYTES}s{MESSAGE_BYTES}s")
MAGIC = b"potluck"
KNOCK_BYTES = _KNOCK.size

WELCOME = 1  # the first byte of an answer; the second handshake message follows
NOT_ADMITTED, BAD_PROOF, OTHER_VERSION, OTHER_MODE, NOT_WANTED, TOO_OFTEN = range(2, 8)
REFUSALS = {
    NOT_ADMITTED: "it does not admit this peer (yet)",
    BAD_PROOF: "the handshake failed: another peer may be there",
    OTHER_VERSION: "the handshake failed: it speaks another version of the protocol",
    OTHER_MODE: "the handshake failed: only one of both is in trusted-LAN mode",
    NOT_WANTED: "it has a connection to this peer already",
    TOO_OFTEN: "it was dialled too often",
}
NO_PEER_THERE = "the handshake failed: another peer or service may be there"

READY = b"\x01"
READY_BYTES = len(READY) + TAG_BYTES
KEY_LENGTH = 2 * KEY_BYTES  # characters of a link key, in hexadecimal

Key = Annotated[str, msgspec.Meta(min_length=KEY_LENGTH, max_length=KEY_LENGTH)]


class LinkKeys:
    """The pair of X25519 keys of one process's life."""

    def __init__(self, private: X25519PrivateKey) -> None:
        self.private = private
        self.link_key = private.public_key().public_bytes_raw().hex()  # the public key, as a card shows it

    @classmethod
    def generate(cls) -> LinkKeys:
        """A fresh pair."""
        return cls(X25519PrivateKey.generate())

    @classmethod
    def parse(cls, link_key: str, secret: str) -> LinkKeys:
        """The pair of these two; ProtocolError when they are no keys, or do not belong together."""
        keys = cls(X25519PrivateKey.from_private_bytes(decode_key(secret)))
        if keys.link_key != link_key:
            raise ProtocolError("a link key and its secret do not belong together")
        return keys

    @property
    def secret(self) -> str:
        """The private key, for code that may act in the name of this pair."""
        return self.private.private_bytes_raw().hex()


class Knock(NamedTuple):
    """What a dialler says first."""

    version: int
    plain: bool
    key: str
    handshake: bytes

    @classmethod
    def parse(cls, data: bytes) -> Knock:
        """Read it; ProtocolError when it is something else."""
        magic, version, mode, key, handshake = _KNOCK.unpack(data)
        if magic != MAGIC or mode > 1:
            raise ProtocolError("something else came where a Knock was due")
        return cls(version, bool(mode), key.hex(), handshake)

    def pack(self) -> bytes:
        """As it is sent."""
        return _KNOCK.pack(MAGIC, self.version, self.plain, bytes.fromhex(self.key), self.handshake)


class Caller:
    """The dialler's side of a greeting."""

    def __init__(self, keys: LinkKeys, their_key: str, *, plain: bool) -> None:
        """ProtocolError when `their_key` is no key."""
        self._handshake = _handshake(keys, their_key, dials=True, plain=plain)
        self.knock = Knock(PROTOCOL_VERSION, plain, keys.link_key, self._handshake.write())

    def answer(self, message: bytes) -> tuple[Cipher, Cipher]:
        """The ciphers out and in; ProtocolError when the Welcome's message is not from the peer that was meant."""
        self._handshake.read(message)
        return self._handshake.split()


class Answerer:
    """The listener's side of a greeting."""

    def __init__(self, keys: LinkKeys, their_key: str, message: bytes, *, plain: bool) -> None:
        """Read the dialler's handshake message; ProtocolError when it does not prove its key."""
        self._handshake = _handshake(keys, their_key, dials=False, plain=plain)
        self._handshake.read(message)

    def welcome(self) -> tuple[bytes, Cipher, Cipher]:
        """The Welcome, and the ciphers out and in."""
        message = bytes([WELCOME]) + self._handshake.write()
        return message, *self._handshake.split()


def ephemeral_of(message: bytes) -> bytes:
    """What no two greetings have in common."""
    return message[:KEY_BYTES]


def decode_key(key: str) -> bytes:
    """The 32 bytes of a link key; ProtocolError when it is not one, or not as we write it: each key has one name."""
    try:
        raw = bytes.fromhex(key)
    except ValueError:
        raw = b""
    if len(raw) != KEY_BYTES or raw.hex() != key:
        raise ProtocolError(f"{key[:100]!r} is no link key: that has {KEY_LENGTH} hexadecimal digits")
    return raw


def is_key(key: str) -> bool:
    """Whether this is a link key, by its form."""
    try:
        return len(decode_key(key)) == KEY_BYTES
    except ProtocolError:
        return False


def _handshake(keys: LinkKeys, their_key: str, *, dials: bool, plain: bool) -> Handshake:
    prologue = f"potluck direct link {PROTOCOL_VERSION} {'plain' if plain else 'sealed'}".encode()
    return Handshake(dials=dials, static=keys.private, remote=decode_key(their_key), prologue=prologue)
