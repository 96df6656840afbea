"""A real host and real peers in one process, on loopback: what the tests of whole peers stand on."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from potluck.clock import Clock
from potluck.hub.access.organise import Organiser
from potluck.hub.guard.guard import GuardConfig
from potluck.hub.guard.presencecore import PresenceConfig
from potluck.hub.joinlink import JoinLink, fetch_address
from potluck.hub.keys import HubKeys
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.server.configuration import HubConfig
from potluck.hub.subjects import Subjects
from potluck.peer.identity import Identity
from potluck.peer.roster import RosterEvent
from potluck.run.host import Host, HostConfig
from potluck.run.peer import Peer, PeerConfig
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children, ManagedProcess

RUN = "bakery"
PATIENCE_SECONDS = 40.0  # for whatever should happen soon: the machine may be busy
QUICK = PresenceConfig(
    suspect_after_seconds=2.0, dead_after_seconds=4.0, busy_seconds=4.0
)  # for those who wait for a death by silence
LOOPBACK = ("tcp://127.0.0.1:0",)


def host_config(folder: Path, run: str = RUN, presence: PresenceConfig | None = None, **changes: Any) -> HostConfig:
    config = HostConfig(
        hub=HubConfig(folder=folder, run=run, host="127.0.0.1", advertised_hosts=("127.0.0.1",), sync_always=False),
        guard=GuardConfig(run=run, presence=presence or PresenceConfig()),
        peer=PeerConfig(role="aux", name="host", listen=LOOPBACK),
    )
    return replace(config, **changes)


class RunHouse:
    """A run with its host; whatever joins it ends with it."""

    def __init__(self, config: HostConfig, stack: AsyncExitStack) -> None:
        self.folder = config.hub.folder
        self.host = Host(config)
        self._stack = stack

    @property
    def own_peer(self) -> Peer:
        """The host's own."""
        assert self.host.peer is not None
        return self.host.peer

    async def restart(self, away: Any = None) -> None:
        """Stop the host, do something while it is away, and start it again on the same folder."""
        await self.host.stop()
        if away is not None:
            await away()
        self.host = Host(self.host.config)
        await self.host.start()

    async def join(
        self,
        name: str,
        *,
        link: JoinLink | None = None,
        seed: bytes | None = None,
        clock: Clock | None = None,
        **config: Any,
    ) -> Peer:
        """A peer that came in by the join link."""
        peer = await self.prepare(name, link=link, seed=seed, clock=clock, **config)
        await peer.start()
        return peer

    async def prepare(
        self,
        name: str,
        *,
        link: JoinLink | None = None,
        seed: bytes | None = None,
        clock: Clock | None = None,
        **config: Any,
    ) -> Peer:
        """A peer that has not started yet."""
        link = link or self.host.link
        identity = Identity(seed) if seed is not None else Identity.temporary()
        if not config.get("client_mode"):
            config.setdefault("listen", LOOPBACK)
        options = PeerConfig(name=name, invite=link.invite, **config)
        peer = Peer(await fetch_address(link), link.run, identity, options, clock=clock)
        self._stack.push_async_callback(peer.close)
        return peer

    async def organiser(self) -> Organiser:
        keys = HubKeys.load_or_create(self.folder / "identity")
        hub = await NatsConnection.connect(self.host.address, seed=keys.organiser_seed, run=RUN, name="main")
        self._stack.push_async_callback(hub.close)
        return Organiser(hub, Subjects(RUN), keys.organiser_public)

    def spawn(self, children: Children, name: str, *arguments: str | Path) -> ManagedProcess:
        """A peer in a process of its own, by the real command."""
        key = self.folder.parent / f"{name}.nkey"
        command = [sys.executable, "-m", "potluck.cli", "join", str(self.host.link), "--json", "--name", name]
        options = ["--identity-path", str(key), "--listen", LOOPBACK[0], *map(str, arguments)]
        return children.spawn([*command, *options], name=name)


@asynccontextmanager
async def open_run(folder: Path, **options: Any) -> AsyncIterator[RunHouse]:
    """A host on loopback."""
    async with AsyncExitStack() as stack:
        house = RunHouse(host_config(folder / "run", **options), stack)
        stack.push_async_callback(lambda: house.host.stop())
        await house.host.start()
        yield house


class Diary:
    """What a peer's roster told, in order."""

    def __init__(self, peer: Peer) -> None:
        self.events: list[tuple[str, str]] = []  # name, change
        self.reasons: dict[str, str] = {}  # by name: why it is as it was told last
        self._names: dict[str, str] = {}
        self.end = peer.session.roster.listen(self._note)

    def _note(self, event: RosterEvent) -> None:
        self.events.append((event.presence.card.name, event.change))
        self.reasons[event.presence.card.name] = event.presence.reason

    def of(self, name: str) -> list[str]:
        """What was told of one peer, changes of its card left out."""
        return [change for who, change in self.events if who == name and change != "changed"]

    async def until(self, name: str, *changes: str) -> None:
        """Wait until exactly this was told of a peer."""
        await poll_until(
            lambda: self.of(name) == list(changes),
            PATIENCE_SECONDS,
            lambda: f"{name} to be {changes}; so far {self.events}",
        )


def names(peer: Peer) -> set[str]:
    """Who is in a peer's roster."""
    return {presence.card.name for presence in peer.session.roster}


async def until_see(*peers: Peer, wanted: set[str]) -> None:
    """Wait until each of these peers sees exactly those names."""
    await poll_until(
        lambda: all(names(peer) == wanted for peer in peers),
        PATIENCE_SECONDS,
        lambda: f"all to see {wanted}; they see {[names(peer) for peer in peers]}",
    )


async def until_path(peer: Peer, other: str, kind: str) -> None:
    """Wait until a peer's link to another uses that kind of carrier."""

    def path() -> str | None:
        found = peer.links.statistics().peers.get(other)
        return found.path if found is not None else None

    await poll_until(lambda: path() == kind, PATIENCE_SECONDS, lambda: f"a {kind} path; it is {path()}")
