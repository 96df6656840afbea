"""How two peers greet on a fresh connection, and how each proves who it is.

    dialler                                                    listener
    link key and first handshake message, as credentials   →   the admission decides (admission.py)
    Knock                                                  →
                                                           ←   Welcome: the second handshake message
    Ready, sealed                                          →

The credentials are those of ZeroMQ's PLAIN mechanism, so a connection has proven its key before its first message is
let in. A Knock says nothing; ZeroMQ shows a listener who is there by a first message only. The Welcome proves the
listener's key, the Ready that the dialler is there now and does not merely repeat what it once overheard. Both sides
then know that messages pass both ways, and hold keys for them that no other connection has (noise.py).

Whom the dialler means, both keys, the version of the protocol and the mode are part of what the handshake proves: two
sides that differ in one of them do not understand each other's first message. In trusted-LAN mode the same greeting
tells a member from a stranger, and what follows it is not sealed. (Whoever can change packets on that LAN can take over
a connection once it stands; that is the trust in the name.)
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec
import zmq
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from zmq.utils import z85

from potluck.errors import ProtocolError
from potluck.link.direct.noise import KEY_BYTES, MESSAGE_BYTES, Cipher, Handshake
from potluck.messages import PROTOCOL_VERSION

DATA = 0  # first byte of a packet's header frame; the rest is the header, as it was given
CONTROL = 1  # first byte of what belongs to a greeting
DATA_MARK, CONTROL_MARK = bytes([DATA]), bytes([CONTROL])

KNOCK = READY = CONTROL_MARK
WELCOME_BYTES = len(CONTROL_MARK) + MESSAGE_BYTES
KEY_LENGTH = 40  # characters of a link key in Z85

Key = Annotated[str, msgspec.Meta(min_length=KEY_LENGTH, max_length=KEY_LENGTH)]


class LinkKeys:
    """The pair of X25519 keys of one process's life."""

    def __init__(self, public: bytes, secret: bytes) -> None:
        """Take both keys in Z85; ProtocolError when they are none, or no pair."""
        raw = decode_key(public.decode("ascii", "replace"))
        self.public = public
        self.secret = secret
        self.private = X25519PrivateKey.from_private_bytes(decode_key(secret.decode("ascii", "replace")))
        if self.private.public_key().public_bytes_raw() != raw:
            raise ProtocolError("a link key and its secret do not belong together")

    @classmethod
    def generate(cls) -> LinkKeys:
        """A fresh pair."""
        return cls(*zmq.curve_keypair())

    @property
    def link_key(self) -> str:
        """The public key as a card shows it."""
        return self.public.decode("ascii")


class Caller:
    """The dialler's side of a greeting."""

    def __init__(self, keys: LinkKeys, their_key: str, *, plain: bool) -> None:
        """ProtocolError when `their_key` is no key."""
        self._handshake = _handshake(keys, their_key, dials=True, plain=plain)
        self.username = keys.public
        self.password = self._handshake.write()

    def answer(self, welcome: bytes) -> tuple[Cipher, Cipher]:
        """The ciphers out and in; ProtocolError when the Welcome is not from the peer that was meant."""
        if len(welcome) != WELCOME_BYTES or welcome[0] != CONTROL:
            raise ProtocolError("something else came where a Welcome was due: dropped")
        self._handshake.read(welcome[1:])
        return self._handshake.split()


class Answerer:
    """The listener's side of a greeting."""

    def __init__(self, keys: LinkKeys, their_key: str, password: bytes, *, plain: bool) -> None:
        """Read the dialler's credentials; ProtocolError when they do not prove its key."""
        if len(password) != MESSAGE_BYTES:
            raise ProtocolError(f"a handshake message of {len(password)} bytes instead of {MESSAGE_BYTES}: dropped")
        self._handshake = _handshake(keys, their_key, dials=False, plain=plain)
        self._handshake.read(password)

    def welcome(self) -> tuple[bytes, Cipher, Cipher]:
        """The Welcome, and the ciphers out and in."""
        message = CONTROL_MARK + self._handshake.write()
        return message, *self._handshake.split()


def ephemeral_of(password: bytes) -> bytes:
    """What no two greetings have in common."""
    return password[:KEY_BYTES]


def decode_key(key: str) -> bytes:
    """The 32 bytes of a link key; ProtocolError when it is not one."""
    try:
        raw: bytes = z85.decode(key.encode("ascii"))
    except (ValueError, KeyError, struct.error) as error:
        raise ProtocolError(f"{key!r} is no link key: {error!r}") from error
    if len(raw) != KEY_BYTES:
        raise ProtocolError(f"{key!r} is no link key: it has {len(raw)} bytes instead of {KEY_BYTES}")
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
