"""A handshake of the Noise framework: Noise_KK_25519_AESGCM_SHA256 (pure).

Both sides know each other's static key beforehand, from the roster. Two messages make two secret keys, one for each
direction, that nobody can compute who has not the static keys, nor even who gets hold of them later:

    dialler → listener    e, es, ss
    listener → dialler    e, ee, se

The first message proves the dialler's static key to the listener, and means nothing to anybody else. It can be sent
again by an eavesdropper, so the listener remembers whose it has had; who sends it again cannot go on, since the
keys depend on the ephemeral secret. The second proves the listener's key. See revision 34 of noiseprotocol.org, whose
names are used here: h, ck, k, MixHash, MixKey.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from potluck.errors import ProtocolError

PROTOCOL = b"Noise_KK_25519_AESGCM_SHA256"
KEY_BYTES = 32
TAG_BYTES = 16
MESSAGE_BYTES = KEY_BYTES + TAG_BYTES  # of a handshake message without a payload


class Cipher:
    """One direction's key and how often it was used: each message has a number, which is never sent."""

    __slots__ = ("aead", "number")

    def __init__(self, key: bytes) -> None:
        self.aead = AESGCM(key)
        self.number = 0

    def nonce(self) -> bytes:
        """The nonce of the next message, which no other has."""
        number = self.number
        self.number = number + 1
        return number.to_bytes(12, "big")

    def seal(self, plain: bytes | memoryview, associated: bytes | None = None) -> bytes:
        """The next message, sealed."""
        return self.aead.encrypt(self.nonce(), plain, associated)

    def open(self, sealed: bytes | memoryview, associated: bytes | None = None) -> bytes:
        """What the next message says; ProtocolError when it is not what the other side sealed next."""
        try:
            return self.aead.decrypt(self.nonce(), sealed, associated)
        except (InvalidTag, ValueError):
            raise ProtocolError("a message does not open: it was changed, or is not the next one") from None


class Handshake:
    """One side of one handshake: `write` and `read` in turn, the dialler first, then `split`."""

    def __init__(
        self,
        *,
        dials: bool,
        static: X25519PrivateKey,
        remote: bytes,
        prologue: bytes,
        ephemeral: X25519PrivateKey | None = None,
    ) -> None:
        """`remote` is the other side's static key. Only tests choose the ephemeral key."""
        self._dials = dials
        self._static = static
        self._remote_static = _public(remote)
        self._remote_ephemeral: X25519PublicKey | None = None
        self._ephemeral = ephemeral or X25519PrivateKey.generate()
        self._num_messages = 0
        self.hash = PROTOCOL.ljust(32, b"\0")  # h
        self._chain = self.hash  # ck
        self._cipher: Cipher | None = None  # k and n
        own = static.public_key().public_bytes_raw()
        for known in (prologue, own if dials else remote, remote if dials else own):
            self._mix_hash(known)

    @property
    def is_complete(self) -> bool:
        """Whether both messages have been seen."""
        return self._num_messages == 2

    def write(self, payload: bytes = b"") -> bytes:
        """Our message."""
        self._take_turn(writes=True)
        public = self._ephemeral.public_key().public_bytes_raw()
        self._mix_hash(public)
        self._mix_secrets()
        assert self._cipher is not None
        sealed = self._cipher.seal(payload, self.hash)
        self._mix_hash(sealed)
        return public + sealed

    def read(self, message: bytes) -> bytes:
        """The payload of the other side's message; ProtocolError, and the end, when it does not prove its key."""
        self._take_turn(writes=False)
        if len(message) < MESSAGE_BYTES:
            raise ProtocolError(f"a handshake message of {len(message)} bytes is cut off")
        self._remote_ephemeral = _public(message[:KEY_BYTES])
        self._mix_hash(message[:KEY_BYTES])
        self._mix_secrets()
        assert self._cipher is not None
        sealed = message[KEY_BYTES:]
        payload = self._cipher.open(sealed, self.hash)
        self._mix_hash(sealed)
        return payload

    def split(self) -> tuple[Cipher, Cipher]:
        """The ciphers for what we send and for what we receive."""
        assert self.is_complete, "a handshake has two messages"
        from_dialler, from_listener = (Cipher(key) for key in _derive(self._chain, b""))
        return (from_dialler, from_listener) if self._dials else (from_listener, from_dialler)

    def _take_turn(self, *, writes: bool) -> None:
        assert not self.is_complete, "a handshake has two messages"
        assert writes == (self._dials == (self._num_messages == 0)), "it is the other side's turn"
        self._num_messages += 1

    def _mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def _mix_secrets(self) -> None:
        """The two Diffie-Hellman results of this message: es and ss, or ee and se."""
        # What one side computes with its ephemeral key and the other's static one, the other computes the other way.
        with_ephemeral = (self._ephemeral, self._remote_static)
        with_static = (self._static, self._remote_ephemeral)
        pairs: list[tuple[X25519PrivateKey, X25519PublicKey | None]]
        if self._num_messages == 1:
            pairs = [with_ephemeral if self._dials else with_static, (self._static, self._remote_static)]
        else:
            pairs = [(self._ephemeral, self._remote_ephemeral), with_static if self._dials else with_ephemeral]
        for secret, public in pairs:
            assert public is not None, "the other side's message comes first"
            try:
                shared = secret.exchange(public)
            except ValueError as error:  # a point of small order, which makes any secret zero
                raise ProtocolError(f"a key that gives no secret: {error}") from error
            self._chain, key = _derive(self._chain, shared)
            self._cipher = Cipher(key)


def _public(raw: bytes) -> X25519PublicKey:
    try:
        return X25519PublicKey.from_public_bytes(raw)
    except ValueError as error:
        raise ProtocolError(f"{len(raw)} bytes are no key: {error}") from error


def _derive(chain: bytes, secret: bytes) -> tuple[bytes, bytes]:
    """HKDF with two outputs."""
    inner = hmac.digest(chain, secret, "sha256")
    first = hmac.digest(inner, b"\x01", "sha256")
    return first, hmac.digest(inner, first + b"\x02", "sha256")
