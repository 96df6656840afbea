"""How relayed packets are kept from the hub (pure): sealed from end to end, under the keys of one greeting.

Each direction has one key (greeting.py). A packet's number is in its prefix, and makes its nonce; the prefix is
authenticated along with what follows. Link packets arrive in the order in which they were sealed, as the hub delivers
them, and their receiver counts along:

    a number from before    it was sent again, by the hub that carries it: dropped
    a number too high       something is missing, which the link must learn: the path ends, and another begins
    does not open           it was changed: the same

Words about credit overtake link packets, so they have numbers of their own, which only have to grow: what they say is
said again.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag

from potluck.errors import ProtocolError
from potluck.link.carrier import Buffer
from potluck.link.direct.noise import TAG_BYTES, Cipher
from potluck.link.direct.sealing import JOINED_BYTES, Slabs
from potluck.link.relay.packet import (
    HAS_PAYLOAD,
    IS_JOINED,
    PREFIX_BYTES,
    Control,
    RelayKind,
    RelayPacket,
    encode_prefix,
)

CONTROL_NONCES = 1 << 88  # where the nonces of words begin; link packets have two each, from 0


class ReplayedError(ProtocolError):
    """A packet that has come before."""


class LostError(ProtocolError):
    """A packet before this one is missing."""


class ForgedError(ProtocolError):
    """A packet that its sender did not seal like this."""


def sealing_bytes(header_bytes: int, payload: memoryview | None) -> int:
    """By how much a link packet is longer on the wire than its header and payload are."""
    is_apart = payload is not None and header_bytes + len(payload) > JOINED_BYTES
    return PREFIX_BYTES + (2 if is_apart else 1) * TAG_BYTES


class RelaySeal:
    """Both directions of one path."""

    def __init__(self, outgoing: Cipher, incoming: Cipher, slabs: Slabs) -> None:
        self._outgoing = outgoing.aead
        self._incoming = incoming.aead
        self._slabs = slabs
        self._next_sent = 0
        self._next_received = 0
        self._last_word_sent = 0
        self._last_word_received = 0

    def seal(self, epochs: tuple[int, int], header: bytes, payload: memoryview | None) -> list[Buffer]:
        """The next link packet, as it is to be sent, before any later one."""
        number, kind = self._next_sent, RelayKind.DATA
        self._next_sent = number + 1
        if payload is None or len(header) + len(payload) <= JOINED_BYTES:
            flags = 0 if payload is None else HAS_PAYLOAD | IS_JOINED
            prefix = encode_prefix(kind, *epochs, number, flags=flags, header_bytes=len(header))
            plain = header if payload is None else b"".join((header, payload))
            return [prefix + self._outgoing.encrypt(_nonce(2 * number), plain, prefix)]
        prefix = encode_prefix(kind, *epochs, number, flags=HAS_PAYLOAD, header_bytes=len(header))
        start = prefix + self._outgoing.encrypt(_nonce(2 * number), header, prefix)
        sealed = self._slabs.take(len(payload) + TAG_BYTES)
        self._outgoing.encrypt_into(_nonce(2 * number + 1), payload, prefix, sealed)
        return [start, sealed]

    def open(self, packet: RelayPacket) -> tuple[memoryview, memoryview | None]:
        """Header and payload of a link packet. The payload is opened in the packet's own memory, where it can be."""
        number, prefix, body, header_bytes = packet.number, packet.prefix, packet.body, packet.header_bytes
        if number < self._next_received:
            raise ReplayedError(f"relay packet {number} has come before")
        if number > self._next_received:
            raise LostError(f"relay packet {number} came where {self._next_received} was due")
        is_apart = packet.flags & HAS_PAYLOAD and not packet.flags & IS_JOINED
        first_bytes = header_bytes + TAG_BYTES if is_apart else len(body)
        header = memoryview(self._decrypt(2 * number, body[:first_bytes], prefix))
        payload: memoryview | None = None
        if is_apart:
            payload = self._decrypt_in_place(2 * number + 1, body[first_bytes:], prefix)
        elif packet.flags & HAS_PAYLOAD:
            header, payload = header[:header_bytes], header[header_bytes:]
        if len(header) != header_bytes:
            raise ForgedError("a relay packet whose sizes do not add up")
        self._next_received = number + 1
        return header, payload

    def seal_word(
        self, kind: RelayKind, epochs: tuple[int, int], word: bytes, *, flags: int = 0
    ) -> tuple[bytes, bytes]:
        """Prefix and sealed content of something that is not a link packet."""
        self._last_word_sent += 1
        prefix = encode_prefix(kind, *epochs, self._last_word_sent, flags=flags)
        return prefix, self._outgoing.encrypt(_nonce(CONTROL_NONCES + self._last_word_sent), word, prefix)

    def open_word(self, packet: RelayPacket, sealed: bytes | memoryview) -> bytes:
        """What was sealed by `seal_word`."""
        if packet.number <= self._last_word_received:
            raise ReplayedError(f"word {packet.number} has come before")
        word = self._decrypt(CONTROL_NONCES + packet.number, sealed, packet.prefix)
        self._last_word_received = packet.number
        return word

    def open_control(self, packet: RelayPacket) -> Control:
        """What a peer says about credit."""
        return Control.parse(self.open_word(packet, packet.body))

    def _decrypt(self, nonce: int, sealed: bytes | memoryview, prefix: bytes) -> bytes:
        try:
            return self._incoming.decrypt(_nonce(nonce), sealed, prefix)
        except (InvalidTag, ValueError):
            raise ForgedError("a relay packet does not open: it was changed on its way") from None

    def _decrypt_in_place(self, nonce: int, sealed: memoryview, prefix: bytes) -> memoryview:
        if len(sealed) < TAG_BYTES or sealed.readonly:
            return memoryview(self._decrypt(nonce, sealed, prefix))
        opened = sealed[:-TAG_BYTES]
        try:
            self._incoming.decrypt_into(_nonce(nonce), sealed, prefix, opened)
        except (InvalidTag, ValueError):
            raise ForgedError("a relay packet does not open: it was changed on its way") from None
        return opened


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")
