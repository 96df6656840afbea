"""A real hub with a real guard, and people who knock at it: what the guard's integration tests stand on."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from potluck.hub.access.application import Answer, Application
from potluck.hub.access.member import Scopes
from potluck.hub.access.organise import Organiser
from potluck.hub.connection import Entry
from potluck.hub.guard.guard import Guard, GuardConfig
from potluck.hub.keys import HubKeys, new_seed, public_key
from potluck.hub.nats.connection import ConnectionConfig, NatsConnection
from potluck.hub.presence import Beacon, Card, CardAnswer, Presence
from potluck.hub.server.configuration import HubConfig
from potluck.hub.server.embedded import EmbeddedHub
from potluck.hub.subjects import Subjects
from potluck.messages import decode, encode
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children, ManagedProcess

RUN = "bakery"
SUBJECTS = Subjects(RUN)
PATIENCE_SECONDS = 30.0  # for whatever should happen soon: the machine may be busy
MEMBER_PROGRAM = Path(__file__).with_name("memberprocess.py")


class Person:
    """Somebody with a key."""

    def __init__(self, house: GuardHouse, seed: bytes | None = None) -> None:
        self.house = house
        self.seed = seed or new_seed("user")
        self.peer = public_key(self.seed)

    async def connect(self, name: str = "main", **options: Any) -> NatsConnection:
        """A connection that ends with the house."""
        return await self.house.connect(self.seed, name, **options)

    async def apply(self, application: Application) -> Answer:
        """Knock at the lobby once."""
        lobby = await self.connect("lobby")
        try:
            return await knock(lobby, self.peer, application)
        finally:
            await lobby.close()

    async def join(self, *, session: str = "s1", **card: Any) -> NatsConnection:
        """Connect as a member and hand in a card."""
        main = await self.connect()
        answer = await hand_in_card(main, self.peer, session=session, **card)
        assert answer.accepted, answer
        return main


class GuardHouse:
    """A hub, its guard, and everything that has to be closed in the end."""

    def __init__(self, hub: EmbeddedHub, guard: Guard, config: GuardConfig, stack: AsyncExitStack) -> None:
        self.hub = hub
        self.guard = guard
        self.config = config
        self._stack = stack
        self.host = Person(self, hub.keys.organiser_seed)
        self._organiser: Organiser | None = None

    @property
    def keys(self) -> HubKeys:
        return self.hub.keys

    async def connect(self, seed: bytes, name: str, **options: Any) -> NatsConnection:
        config = ConnectionConfig(stores="direct" if name == "guard" else "guard")
        connection = await NatsConnection.connect(
            self.hub.address(), seed=seed, run=RUN, name=name, config=config, **options
        )
        self._stack.push_async_callback(connection.close)
        return connection

    def close_later(self, close: Callable[[], Awaitable[None]]) -> None:
        """Have this called when the house closes."""
        self._stack.push_async_callback(close)

    async def organiser(self) -> Organiser:
        if self._organiser is None:
            self._organiser = Organiser(await self.host.connect(), SUBJECTS, self.host.peer)
        return self._organiser

    async def newcomer(self, **scopes: Any) -> Person:
        """Somebody who was let in by an invite."""
        person = Person(self)
        _, secret = await (await self.organiser()).create_invite(scopes=Scopes(**scopes), uses=1)
        role = scopes.get("roles", ("trainer",))[0]
        answer = await person.apply(Application(role=role, invite=secret))
        assert answer.status == "admitted", answer
        return person

    async def restart_guard(self) -> None:
        await self.guard.stop()
        self.guard = Guard(self.config, self.keys, self.hub.address())
        await self.guard.start()

    async def roster(self) -> dict[str, Presence]:
        """The roster as it stands in the store."""
        entries: list[Entry] = await (await self._reader()).store("roster").entries()
        return {entry.key: decode(Presence, entry.value or b"") for entry in entries}

    async def until_state(self, peer: str, *states: str, within_seconds: float = PATIENCE_SECONDS) -> Presence:
        """Wait until the roster says one of these of a peer."""

        async def found() -> Presence | None:
            presence = (await self.roster()).get(peer)
            return presence if presence is not None and presence.state in states else None

        presence = await poll_until(found, within_seconds, f"{peer[:6]} to be {' or '.join(states)}")
        assert presence is not None
        return presence

    async def _reader(self) -> NatsConnection:
        await self.organiser()
        assert self._organiser is not None
        connection = self._organiser._connection
        assert isinstance(connection, NatsConnection)
        return connection

    def spawn_member(self, children: Children, person: Person, folder: Path) -> ManagedProcess:
        """A member in a process of its own, which beacons until it is stopped."""
        seed_file = folder / f"{person.peer}.seed"
        seed_file.write_bytes(person.seed)
        server = self.hub.address().servers[0]
        return children.spawn(
            [sys.executable, MEMBER_PROGRAM, server, RUN, seed_file], name=f"member-{person.peer[:6]}"
        )


@asynccontextmanager
async def open_house(folder: Path, **guard_options: Any) -> AsyncIterator[GuardHouse]:
    """A hub on loopback and its guard."""
    config = HubConfig(
        folder=folder / "hub", run=RUN, host="127.0.0.1", tls=False, websocket_port=None, sync_always=False
    )
    guard_config = GuardConfig(run=RUN, **guard_options)
    async with AsyncExitStack() as stack:
        hub = EmbeddedHub(config)
        await hub.start()
        stack.push_async_callback(hub.stop)
        guard = Guard(guard_config, hub.keys, hub.address())
        await guard.start()
        async with AsyncExitStack() as connections:
            house = GuardHouse(hub, guard, guard_config, connections)
            stack.push_async_callback(lambda: house.guard.stop())
            async with connections:
                yield house


async def knock(lobby: NatsConnection, peer: str, application: Application) -> Answer:
    """One application on an open lobby connection."""
    data = await lobby.request(SUBJECTS.lobby(peer), encode(application), timeout_seconds=PATIENCE_SECONDS)
    return decode(Answer, data)


async def hand_in_card(main: NatsConnection, peer: str, *, session: str, **card: Any) -> CardAnswer:
    """One card on an open main connection."""
    payload = encode(Card(session=session, role=card.pop("role", "trainer"), **card))
    return decode(CardAnswer, await main.request(SUBJECTS.card(peer), payload, timeout_seconds=PATIENCE_SECONDS))


async def beacon(main: NatsConnection, peer: str, session: str = "s1") -> None:
    """One sign of life."""
    await main.publish(SUBJECTS.beacon(peer), encode(Beacon(session=session)))


async def until_refused(main: NatsConnection) -> None:
    """Wait until a connection was cut and has tried in vain to come back."""
    await poll_until(
        lambda: main.statistics()["refusals"] >= 1 and not main.is_connected, PATIENCE_SECONDS, "a refusal to come back"
    )
