"""Seals: in an audited round a sender signs the hash of each frame, so that it cannot deny later what it sent.

A seal covers the run, the round, the chunk, what the frame is, and its SHA-256. A contribution's seal leaves the
generation out: a member has one contribution to a chunk, however often it must be sent. Two different ones under one
seal cannot be made, and two seals for different ones convict the member. An average belongs to its generation.
"""

from __future__ import annotations

import hashlib

from potluck.errors import ProtocolError
from potluck.hub.keys import verify
from potluck.messages import encode
from potluck.peer.identity import Identity
from potluck.round.codecs.memory import Buffer
from potluck.round.plan.messages import RoundKey

SEAL_BYTES = 64  # an Ed25519 signature


def sealed_hash(frame: Buffer) -> bytes:
    """What a seal is for: unlike the quick hash of other rounds, nobody can make two frames with the same one."""
    return hashlib.sha256(frame).digest()


class Sealer:
    """Seals in this peer's name, and checks those of others; for one round. Usable from any thread."""

    def __init__(self, identity: Identity, run: str, key: RoundKey) -> None:
        self._identity = identity
        self._notary = Notary(run, key)

    def seal_contribution(self, chunk: int, frame_hash: bytes) -> bytes:
        """We send these values of the chunk."""
        return self._identity.sign(self._notary.contribution(chunk, frame_hash))

    def seal_average(self, chunk: int, generation: int, frame_hash: bytes) -> bytes:
        """We give out this average of the chunk."""
        return self._identity.sign(self._notary.average(chunk, generation, frame_hash))


class Notary:
    """What seals of a round say, and whether they are good."""

    def __init__(self, run: str, key: RoundKey) -> None:
        self._run = run
        self._key = key

    def contribution(self, chunk: int, frame_hash: bytes) -> bytes:
        """What the seal of a contribution signs."""
        return self._statement("contribution", chunk, 0, frame_hash)

    def average(self, chunk: int, generation: int, frame_hash: bytes) -> bytes:
        """What the seal of an average signs."""
        return self._statement("average", chunk, generation, frame_hash)

    def is_contribution(self, peer: str, chunk: int, frame_hash: bytes, seal: bytes) -> bool:
        """Whether the peer sealed these values of the chunk."""
        return verify(peer, self.contribution(chunk, frame_hash), seal)

    def is_average(self, peer: str, chunk: int, generation: int, frame_hash: bytes, seal: bytes) -> bool:
        """Whether the peer sealed this average of the chunk."""
        return verify(peer, self.average(chunk, generation, frame_hash), seal)

    def require_average(self, peer: str, chunk: int, generation: int, frame_hash: bytes, seal: bytes) -> None:
        """ProtocolError unless the peer sealed this average."""
        if not self.is_average(peer, chunk, generation, frame_hash, seal):
            raise ProtocolError(f"{peer} did not seal this average of chunk {chunk}: it may not be held to it")

    def _statement(self, what: str, chunk: int, generation: int, frame_hash: bytes) -> bytes:
        return f"potluck {what} {self._run}\0".encode() + encode((self._key, chunk, generation)) + frame_hash
