"""How two relays prove to each other who they are, inside of their greetings (pure).

The handshake is that of direct links, Noise's KK with the link keys that both peers have signed (direct/noise.py). It
has two messages, and the peer whose id comes first in the alphabet begins, also where the other greets first:

    dialler's HELLO     its handshake message; once it has read the answer, READY, sealed
    listener's HELLO    nothing; once it has read the dialler's message, its own

A greeting may be repeated at any time: it then carries the same again. The dialler's end is open when it has read the
listener's message, the listener's when it has heard READY: so neither believes what was overheard earlier, or made up
by the hub that carries it.
"""

from __future__ import annotations

from potluck.errors import ProtocolError
from potluck.link.direct.greeting import LinkKeys, decode_key
from potluck.link.direct.noise import MESSAGE_BYTES, Handshake
from potluck.link.direct.sealing import Slabs
from potluck.link.relay.packet import RelayKind, RelayPacket, encode_hello, encode_prefix
from potluck.link.relay.sealing import RelaySeal
from potluck.messages import PROTOCOL_VERSION

READY = b"\x01"


class RelayGreeting:
    """One peer's side of one greeting; a path that begins anew has another."""

    def __init__(self, keys: LinkKeys, self_id: str, peer: str, their_key: str, slabs: Slabs) -> None:
        """ProtocolError when `their_key` is no key."""
        self.seal: RelaySeal | None = None
        self._dials = self_id < peer
        self._slabs = slabs
        first, second = sorted((self_id, peer))
        prologue = f"potluck relayed link {PROTOCOL_VERSION} {first} {second}".encode()
        remote = decode_key(their_key)
        self._handshake = Handshake(dials=self._dials, static=keys.private, remote=remote, prologue=prologue)
        self._message = self._handshake.write() if self._dials else b""

    def hello(self, epochs: tuple[int, int], flags: int, limit_bytes: int) -> bytes:
        """Our greeting, with what it can prove by now."""
        if self._dials and self.seal is not None:
            prefix, proof = self.seal.seal_word(RelayKind.HELLO, epochs, READY, flags=flags)
            return encode_hello(prefix, limit_bytes, proof)
        return encode_hello(encode_prefix(RelayKind.HELLO, *epochs, 0, flags=flags), limit_bytes, self._message)

    def hear(self, packet: RelayPacket, proof: bytes, *, is_to_us: bool) -> bool:
        """Take in the proof of a greeting; whether it makes our end open. ProtocolError: this greeting is over.

        `is_to_us`: it names our number of the path, so the peer has heard our greeting.
        """
        if self.seal is None and len(proof) == MESSAGE_BYTES and (is_to_us or not self._dials):
            self._handshake.read(proof)
            if not self._dials:
                self._message = self._handshake.write()
            self.seal = RelaySeal(*self._handshake.split(), self._slabs)
            return self._dials
        if self.seal is None or self._dials or not is_to_us or len(proof) == MESSAGE_BYTES:
            return False
        if self.seal.open_word(packet, proof) != READY:
            raise ProtocolError("a greeting does not prove its peer's key")
        return True
