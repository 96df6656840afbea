"""Direct carriers for tests: what they told, and the roster that introduces them to each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from potluck.hub.presence import Card, Presence, State
from potluck.link.direct.addresses import Interface
from potluck.link.direct.carrier import DirectCarrier, DirectConfig
from potluck.link.direct.path import PathConfig
from potluck.link.direct.sockets import SocketSettings
from potluck.testing.polling import poll_until

DEADLINE_SECONDS = 60.0
LOOPBACK = ("tcp://127.0.0.1:0",)


def direct_config(
    *, listen: tuple[str, ...] = LOOPBACK, plain: bool = False, sockets: Any = None, paths: Any = None, **more: Any
) -> DirectConfig:
    """A configuration for tests: quick to try again."""
    return DirectConfig(
        listen=listen,
        sockets=SocketSettings(trusted_lan=plain, **(sockets or {})),
        paths=PathConfig(**{"longest_backoff_seconds": 1.0, **(paths or {})}),
        **more,
    )


@dataclass
class Recorder:
    """Carrier events, as they came."""

    packets: list[tuple[str, bytes, bytes | None]] = field(default_factory=list)
    paths: list[tuple[str, str]] = field(default_factory=list)  # (opened or closed, peer)
    reasons: list[str] = field(default_factory=list)
    writable: list[str] = field(default_factory=list)

    def packet_arrived(self, carrier: object, peer: str, header: memoryview, payload: memoryview | None) -> None:
        self.packets.append((peer, bytes(header), bytes(payload) if payload is not None else None))

    def path_opened(self, carrier: object, peer: str) -> None:
        self.paths.append(("opened", peer))

    def path_closed(self, carrier: object, peer: str, reason: str) -> None:
        self.paths.append(("closed", peer))
        self.reasons.append(reason)

    def path_writable(self, carrier: object, peer: str) -> None:
        self.writable.append(peer)

    def is_open(self, peer: str) -> bool:
        mine = [what for what, whose in self.paths if whose == peer]
        return bool(mine) and mine[-1] == "opened"


@dataclass
class Peer:
    """One peer: its carrier, what that told, and its entry in the roster."""

    name: str
    carrier: DirectCarrier
    events: Recorder
    session: str = "s1"
    host: str = "127.0.0.1"

    def presence(self, *, state: State = "alive", addresses: Iterable[str] | None = None) -> Presence:
        announced = tuple(addresses) if addresses is not None else tuple(str(bound) for bound in self.carrier.bound)
        card = Card(session=self.session, role="trainer", link_key=self.carrier.link_key, addresses=announced)
        return Presence(peer=self.name, card=card, state=state, host=self.host, person="somebody")

    def stat(self, name: str) -> float:
        return self.carrier.statistics().get(name, 0)

    async def until_open(self, peer: str) -> None:
        await poll_until(
            lambda: self.events.is_open(peer),
            DEADLINE_SECONDS,
            lambda: f"{self.name} to have a path to {peer} ({self.carrier.why_no_path(peer)})",
        )

    async def until_closed(self, peer: str) -> None:
        await poll_until(
            lambda: ("closed", peer) in self.events.paths and not self.events.is_open(peer),
            DEADLINE_SECONDS,
            f"{self.name}'s path to {peer} to close",
        )

    async def until_received(self, count: int) -> None:
        await poll_until(
            lambda: len(self.events.packets) >= count,
            DEADLINE_SECONDS,
            lambda: f"{self.name} to receive {count} packets ({len(self.events.packets)} came)",
        )


@asynccontextmanager
async def open_peer(
    name: str,
    config: DirectConfig | None = None,
    *,
    session: str = "s1",
    events: Any = None,
    interfaces: list[Interface] | None = None,
) -> AsyncIterator[Peer]:
    """A peer that accepts connections on loopback, unless configured otherwise."""
    recorder = events if events is not None else Recorder()
    carrier = DirectCarrier(peer=name, events=recorder, config=config or direct_config(), interfaces=interfaces)
    try:
        carrier.start()
        yield Peer(name, carrier, recorder, session)
    finally:
        await carrier.close()


def introduce(*peers: Peer) -> None:
    """Tell every peer about every other, as the roster does."""
    roster = [peer.presence() for peer in peers]
    for peer in peers:
        for presence in roster:
            peer.carrier.update_peer(presence)


def rekeyed(presence: Presence, key: str) -> Presence:
    """The same entry with another link key."""
    return Presence(
        peer=presence.peer,
        card=Card(
            session=presence.card.session, role=presence.card.role, link_key=key, addresses=presence.card.addresses
        ),
        state=presence.state,
        host=presence.host,
        person=presence.person,
    )


async def send_all(sender: Peer, receiver: str, packets: Iterable[tuple[bytes, Any]]) -> int:
    """Send packet after packet, waiting where there is no room; return how often that was."""
    refusals = 0
    for header, payload in packets:
        while not sender.carrier.send(receiver, header, payload):
            refusals += 1
            seen = len(sender.events.writable)
            await poll_until(
                lambda seen=seen: len(sender.events.writable) > seen,  # type: ignore[misc]
                DEADLINE_SECONDS,
                f"{sender.name} to have room for {receiver}",
                every_seconds=0.001,
            )
        await asyncio.sleep(0)
    return refusals


def entry(
    peer: str,
    session: str,
    key: str,
    *addresses: str,
    lan_addresses: tuple[str, ...] = (),
    host: str = "127.0.0.1",
) -> Presence:
    """An entry of the roster."""
    card = Card(session=session, role="trainer", link_key=key, addresses=addresses, lan_addresses=lan_addresses)
    return Presence(peer=peer, card=card, state="alive", host=host, person="somebody")
