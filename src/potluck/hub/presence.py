"""Who is in the run: a peer's own card, and the guard's verdict on it for all peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from potluck.hub.keys import verify
from potluck.hub.subjects import MAIN
from potluck.messages import PROTOCOL_VERSION, Message

# A worker uses queues, a machine runs jobs: neither takes part in rounds.
Role = Literal["trainer", "aux", "observer", "worker", "machine"]
State = Literal["alive", "suspect", "dead", "left"]


class Card(Message, frozen=True, kw_only=True):
    """What a peer says about itself on joining, and again whenever it changes."""

    session: str  # one process's life; a restarted peer has another
    role: Role
    name: str = ""  # what its person wants to be called; shown, never trusted
    service: str = "local"  # kaggle, colab, cloud, local
    version: str = ""
    protocol: int = PROTOCOL_VERSION
    link_key: str = ""  # X25519 public key of this session, hexadecimal
    link_proof: bytes = b""  # the peer's signature of run, session and link key: the hub cannot make it
    addresses: tuple[str, ...] = ()  # tcp://HOST:PORT where it accepts links; empty for a client peer
    lan_addresses: tuple[str, ...] = ()  # more of them, worth dialling only from the same LAN; also of a client peer
    upload_bytes_per_second: float | None = None  # as measured; None: not known yet
    download_bytes_per_second: float | None = None
    groups: tuple[str, ...] = (MAIN,)  # that it is in


def with_link_proof(card: Card, run: str, peer: str, sign: Callable[[bytes], bytes]) -> Card:
    """The card with its link key signed by the identity of `peer`."""
    return msgspec.structs.replace(card, link_proof=sign(_link_claim(card, run, peer)))


def is_link_proven(card: Card, run: str, peer: str) -> bool:
    """Whether the link key is the peer's own, by its word and nobody else's; so is none at all."""
    return not card.link_key or verify(peer, _link_claim(card, run, peer), card.link_proof)


def _link_claim(card: Card, run: str, peer: str) -> bytes:
    # None of these can contain a line break.
    return f"potluck link key {PROTOCOL_VERSION}\n{run}\n{peer}\n{card.session}\n{card.link_key}".encode()


class Beacon(Message, frozen=True, kw_only=True):
    """A sign of life each second, with what changes all the time."""

    session: str
    epoch: int = 0
    samples: int = 0  # handed in since the last committed epoch
    samples_per_second: float = 0.0
    steps_per_second: float = 0.0  # of its own optimizer, where it takes several between two rounds; 0: it does not say
    counted_at: float = 0.0  # hub time at which it had these samples; 0: it does not say
    target: int = 0  # how many samples make an epoch, as this peer was told; 0: it does not say
    leaving: bool = False  # it computes no more, and waits for the next epoch to hand in what it has done
    loss: float | None = None  # of its latest batches, smoothed; shown, never trusted


class Presence(Message, frozen=True, kw_only=True):
    """The guard's word on one peer: an entry of the `roster` store, under the peer's id."""

    peer: str
    card: Card
    state: State
    host: str  # the address the hub sees it come from
    person: str  # whose peer it is
    coordinates: bool = False  # may hold the coordinator's lease
    trusted: bool = False  # may reduce where a run lets only trusted peers do so
    pardoned_at: float = 0.0  # hub time: an organiser has lifted what audits had found by then
    since: float = 0.0  # hub time of the last change of state
    reason: str = ""  # why it is suspect, dead or gone


class CardAnswer(Message, frozen=True, kw_only=True):
    """What the guard says to a card."""

    accepted: bool
    message: str = ""  # why not: a newer process has taken this peer's place, or the role is not allowed
    banned: bool = False  # that is why; it may be told before the connection is cut
    refused_groups: tuple[str, ...] = ()  # of those in the card: it was accepted without them, and the message says why
