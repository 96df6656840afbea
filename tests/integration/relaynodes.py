"""Relay carriers on a real hub, for tests."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from potluck.hub.address import HubAddress
from potluck.hub.bulk.wire import BulkWire, BulkWireConfig
from potluck.hub.guard.permissions import bulk_permissions
from potluck.hub.presence import Card, Presence
from potluck.hub.subjects import Subjects
from potluck.link.carrier import Carrier
from potluck.link.direct.greeting import LinkKeys
from potluck.link.relay.carrier import RelayCarrier, RelayConfig
from potluck.messages import Message
from potluck.testing.plainhub import PlainUser
from potluck.testing.polling import poll_until

DEADLINE_SECONDS = 60.0
SUBJECTS = Subjects("test")
QUICK = BulkWireConfig(backoff_first_seconds=0.05, backoff_limit_seconds=0.2)


class Question(Message, frozen=True, kw_only=True, tag="test_question"):
    text: str


class Answer(Message, frozen=True, kw_only=True, tag="test_answer"):
    text: str


def member() -> PlainUser:
    """A user with the permissions of a bulk connection and no others."""
    user = PlainUser.make()
    return user.with_permissions(bulk_permissions(SUBJECTS, user.peer))


def keys_of(peer: str) -> LinkKeys:
    """The link keys of a peer: every process that plays it in a test has the same."""
    return LinkKeys(X25519PrivateKey.from_private_bytes(hashlib.sha256(peer.encode()).digest()))


def presence(peer: str, session: str = "s") -> Presence:
    card = Card(session=session, role="trainer", link_key=keys_of(peer).link_key)
    return Presence(peer=peer, card=card, state="alive", host="127.0.0.1", person="somebody")


class Recorder:
    """Keeps headers and digests, not payloads: transfers are large."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.headers: list[tuple[str, bytes]] = []
        self.digests: dict[str, hashlib.blake2b] = {}
        self.num_bytes = 0
        self.on_packet: Callable[[str, memoryview | None], None] = lambda peer, payload: None

    def packet_arrived(self, carrier: Carrier, peer: str, header: memoryview, payload: memoryview | None) -> None:
        self.headers.append((peer, bytes(header)))
        digest = self.digests.setdefault(peer, hashlib.blake2b())
        digest.update(header)
        if payload is not None:
            digest.update(payload)
            self.num_bytes += len(payload)
        self.on_packet(peer, payload)

    def path_opened(self, carrier: Carrier, peer: str) -> None:
        self.log.append(("opened", peer))

    def path_closed(self, carrier: Carrier, peer: str, reason: str) -> None:
        self.log.append(("closed", peer, reason))

    def path_writable(self, carrier: Carrier, peer: str) -> None:
        self.log.append(("writable", peer))


class Node:
    """One peer's relay."""

    def __init__(self, address: HubAddress, user: PlainUser, config: RelayConfig | None = None) -> None:
        self.peer = user.peer
        self.events = Recorder()
        self.carrier = RelayCarrier(
            self.events,
            user.peer,
            SUBJECTS,
            BulkWire(address, seed=user.seed, config=QUICK),
            keys_of(user.peer),
            config=config,
        )

    def meet(self, *peers: str) -> None:
        for peer in peers:
            self.carrier.update_peer(presence(peer))

    def is_open(self, peer: str) -> bool:
        return self.carrier.why_no_path(peer) == ""

    async def until(self, condition: Callable[[], object], what: str) -> None:
        await poll_until(
            condition,
            DEADLINE_SECONDS,
            lambda: f"{what}; {dict(self.carrier.statistics())}, {self.events.log[-3:]}",
            every_seconds=0.002,
        )

    async def until_open(self, peer: str) -> None:
        await self.until(lambda: self.is_open(peer), f"a path to {peer}")

    async def push(self, peer: str, number: int, payload: bytes) -> bytes:
        """Send so many packets as fast as they are taken; the digest of all."""
        digest = hashlib.blake2b()
        for position in range(number):
            header = position.to_bytes(8, "little")
            await self.until(lambda header=header: self.carrier.send(peer, header, payload), "to be allowed to send")
            digest.update(header)
            digest.update(payload)
        return digest.digest()


@asynccontextmanager
async def node(address: HubAddress, user: PlainUser, config: RelayConfig | None = None) -> AsyncIterator[Node]:
    """A relay that is started, and closed in the end."""
    opened = Node(address, user, config)
    await opened.carrier.start()
    try:
        yield opened
    finally:
        await opened.carrier.close()
